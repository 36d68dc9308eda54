"""A small world: walk to a goal two fields away, seeing after each step where it is from here."""

import random

from streamrl.envs import Task

STEPS = {"n": (0, 1), "s": (0, -1), "e": (1, 0), "w": (-1, 0)}
GOALS = [(x, y) for x in range(-2, 3) for y in range(-2, 3) if abs(x) + abs(y) == 2]


class Walk:
    max_turns = 2

    def task(self, index):
        draw = random.Random(index)
        goal = draw.choice(GOALS)
        prompt = f"walk {draw.randint(1, 9999)}: {view(goal)}"
        any_steps = [prompt, draw.choice(list(STEPS)), view(goal), draw.choice(list(STEPS))]  # the form, not the way
        return Task(prompt, metadata={"goal": goal}, demonstration=any_steps)

    def reset(self, task):
        self.goal = task.metadata["goal"]
        return task.prompt

    def step(self, action):
        before = abs(self.goal[0]) + abs(self.goal[1])
        dx, dy = STEPS.get(action, (0, 0))
        self.goal = self.goal[0] - dx, self.goal[1] - dy
        left = abs(self.goal[0]) + abs(self.goal[1])
        return view(self.goal), (before - left) / 2, left == 0


def view(goal):
    return "{:+}{:+}?".format(*goal)
