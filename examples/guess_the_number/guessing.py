"""Several turns: find a hidden number in three tries, hearing after each guess whether it is lower or higher."""

import random

from streamrl.envs import Task

SPAN, TRIES = 7, 3  # always guessing the middle finds one of seven numbers in three tries


class Guessing:
    def task(self, index):
        draw = random.Random(index)
        low = index % 93
        numbers = range(low, low + SPAN)
        hidden = draw.choice(numbers)
        shown = [f"{low}-{low + SPAN - 1}?"]
        for guess in draw.sample(numbers, TRIES):  # any guesses: they show the form, not the way
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
