"""Short tasks on characters for small models: reverse a string, add two numbers."""

from __future__ import annotations

import math
import random
from string import ascii_lowercase

from streamrl.envs.environment import Policy, Task
from streamrl.errors import ConfigError


class Reverse:
    """``abc>`` is answered by ``cba``; lengths are log-uniform from 1 to ``longest``, so answers have a long tail.

    With ``partial`` the reward is the share of positions that are right, over the longer of the two strings; it is 1
    only for the exact answer. Without it only exact answers count, which an untrained policy never finds for more
    than a few characters: long strings then teach nothing.
    """

    def __init__(self, longest: int = 64, alphabet: str = ascii_lowercase, partial: bool = True) -> None:
        if longest < 1 or not alphabet or ">" in alphabet:
            raise ConfigError(
                f"env.args: longest={longest} must be positive, alphabet={alphabet!r} non-empty without '>'"
            )
        self._longest = longest
        self._alphabet = alphabet
        self._partial = partial

    def task(self, index: int) -> Task:
        draw = random.Random(index)
        length = int(math.exp(draw.uniform(0.0, math.log(self._longest + 1))))
        text = "".join(draw.choices(self._alphabet, k=min(length, self._longest)))
        return Task(f"{text}>", text[::-1])

    async def episode(self, task: Task, policy: Policy) -> float:
        given = (await policy.complete(task.prompt)).text
        assert task.answer is not None
        if not self._partial:
            return float(given == task.answer)
        right = sum(a == b for a, b in zip(given, task.answer, strict=False))
        return right / max(len(given), len(task.answer))


class Addition:
    """``12+34=`` is answered by ``46``: two numbers of ``digits`` digits each, every pair once."""

    def __init__(self, digits: int = 2) -> None:
        if digits < 1:
            raise ConfigError(f"env.args.digits={digits}: must be at least 1")
        self._least = 10 ** (digits - 1) if digits > 1 else 0
        self._count = 10**digits - self._least

    def __len__(self) -> int:
        return self._count**2

    def task(self, index: int) -> Task:
        a, b = (self._least + each for each in divmod(index, self._count))
        return Task(f"{a}+{b}=", str(a + b))

    async def episode(self, task: Task, policy: Policy) -> float:
        completion = await policy.complete(task.prompt)
        return float(completion.text == task.answer)
