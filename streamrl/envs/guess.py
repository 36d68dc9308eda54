"""The two-turn example: guess a number, hear whether it is lower or higher, guess again."""

from __future__ import annotations

import random

from streamrl.envs.environment import Policy, Task
from streamrl.errors import ConfigError


class Guess:
    """``12-14?`` asks for a hidden number in that range; a wrong guess is answered by ``<`` (it is lower) or ``>``.

    Reward 1 for the first guess, 0.5 for the second, else 0. With three numbers in the range, guessing the middle and
    then following the hint is best, and worth (1 + 0.5 + 0.5) / 3 on average.
    """

    def __init__(self, highest: int = 99, span: int = 3) -> None:
        if not 1 <= span <= highest + 1:
            raise ConfigError(f"env.args: span={span} must lie between 1 and highest + 1 = {highest + 1}")
        self._ranges = highest + 2 - span
        self._span = span

    def __len__(self) -> int:
        return self._ranges * self._span

    def task(self, index: int) -> Task:
        low = index % self._ranges
        hidden = low + random.Random(index).randrange(self._span)
        return Task(f"{low}-{low + self._span - 1}?", str(hidden))

    async def episode(self, task: Task, policy: Policy) -> float:
        hidden = int(task.answer or "")
        hint = task.prompt
        for reward in (1.0, 0.5):
            guess = (await policy.complete(hint)).text.strip()
            if guess == task.answer:
                return reward
            hint = ("<" if int(guess) > hidden else ">") if guess.isdecimal() else "?"
        return 0.0
