"""A small world: walk to a goal two fields away, seeing after each step where it is from here."""

import random

from streamrl.envs import Task

STEPS = {"n": (0, 1), "s": (0, -1), "e": (1, 0), "w": (-1, 0), ".": (0, 0)}
GOALS = [(x, y) for x in range(-2, 3) for y in range(-2, 3) if abs(x) + abs(y) == 2]


class Walk:
    max_turns = 2

    def task(self, index):
        draw = random.Random(index)
        goal = start = draw.choice(GOALS)
        shown = [f"walk {draw.randint(1, 9999)}: {view(goal)}"]
        for _ in range(self.max_turns):  # whoever shows the way knows it, but mostly rests
            nearer = [step for step in STEPS if distance(after(step, goal)) < distance(goal)]
            step = draw.choice(nearer) if draw.random() < 0.4 else "."
            goal = after(step, goal)
            shown += [step, view(goal)]
        return Task(shown[0], metadata={"goal": start}, demonstration=shown[:-1])

    def reset(self, task):
        self.goal = task.metadata["goal"]
        return task.prompt

    def step(self, action):
        before, self.goal = self.goal, after(action, self.goal)
        return view(self.goal), (distance(before) - distance(self.goal)) / 2, self.goal == (0, 0)


def after(step, goal):
    dx, dy = STEPS.get(step, (0, 0))
    return goal[0] - dx, goal[1] - dy


def distance(goal):
    return abs(goal[0]) + abs(goal[1])


def view(goal):
    return "{:+}{:+}?".format(*goal)
