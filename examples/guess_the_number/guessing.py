"""Several turns: find a hidden number in three tries, hearing after each guess whether it is lower or higher."""

import random

from streamrl.envs import Task

NUMBERS, TRIES = range(1, 8), 3  # who always guesses the middle finds any of seven numbers in three tries


class Guessing:
    def task(self, index):
        draw = random.Random(index)
        hidden = draw.choice(NUMBERS)
        shown = [f"game {draw.randint(1, 99999)}:"]
        for guess in draw.sample(NUMBERS, TRIES):  # any guesses: they show the form, not the way
            shown += [str(guess), hint(guess, hidden)]
        return Task(shown[0], str(hidden), demonstration=shown[:-1])

    async def episode(self, task, policy):
        said = task.prompt
        for _ in range(TRIES):
            guess = (await policy.complete(said)).text
            if guess == task.answer:
                return 1.0
            said = hint(int(guess), int(task.answer)) if guess.isdecimal() else "?"
        return 0.0


def hint(guess, hidden):
    return "<" if hidden < guess else ">"
