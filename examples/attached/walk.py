"""A small world: walk from one field of a 10 x 10 board to another, seeing after each step where you are."""

import random

from streamrl.envs import Task

STEPS = {"n": (0, 1), "s": (0, -1), "e": (1, 0), "w": (-1, 0)}


class Walk:
    max_turns = 4

    def task(self, index):
        draw = random.Random(index)
        x, y = draw.randint(2, 7), draw.randint(2, 7)
        goal = draw.choice([(x + 1, y + 1), (x - 1, y + 1), (x + 1, y - 1), (x - 1, y - 1), (x + 2, y), (x, y - 2)])
        prompt = view((x, y), goal)
        shown = [prompt, draw.choice(list(STEPS))]  # any step: it shows the form, not the way
        return Task(prompt, metadata={"at": (x, y), "goal": goal}, demonstration=shown)

    def reset(self, task):
        self.at, self.goal = tuple(task.metadata["at"]), tuple(task.metadata["goal"])
        return task.prompt

    def step(self, action):
        dx, dy = STEPS.get(action, (0, 0))
        self.at = self.at[0] + dx, self.at[1] + dy
        arrived = self.at == self.goal
        return view(self.at, self.goal), float(arrived), arrived


def view(at, goal):
    return "{}{}>{}{}:".format(*at, *goal)
