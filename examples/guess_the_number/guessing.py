"""Several turns: find a hidden number in three tries, hearing after each guess whether it is lower or higher."""

import random

from streamrl.envs import Task

SPAN, TRIES = 7, 3  # always guessing the middle finds one of seven numbers in three tries


class Guessing:
    def task(self, index):
        low = index % 93
        numbers = range(low, low + SPAN)
        hidden = random.Random(index).choice(numbers)
        shown = random.Random(index + 1).sample(numbers, 2)  # any two guesses: it shows the form, not the way
        first, second = (f"{guess}" for guess in shown)
        prompt = f"{low}-{low + SPAN - 1}?"
        return Task(prompt, str(hidden), demonstration=[prompt, first, hint(shown[0], hidden), second])

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
