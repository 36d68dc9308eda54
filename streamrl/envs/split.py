"""Which tasks train and which are held out for evaluation.

A stable hash of the prompt decides, so a held-out prompt cannot come back in training under another index, another
seed or another run. An environment that makes its own prompts has none to hash; there the task's index decides, and
two indices may lead to the same prompt.
"""

from __future__ import annotations

import random
import struct

import xxhash

from streamrl.envs.environment import Environment, Task
from streamrl.errors import ConfigError
from streamrl.schema import Config

_INDICES = 1 << 32
"""Raw indices that an environment without a size is asked for."""

_MAX_DRAWS = 1_000
"""Held-out tasks drawn in a row before training is declared impossible; at a tenth held out one in 10^1000."""


class Split:
    """The training sequence and the held-out set of one environment."""

    def __init__(self, environment: Environment, seed: int, held_out: float = 0.1) -> None:
        """``held_out`` is the share of prompts kept from training, in [0, 1); 0 keeps none."""
        if not 0.0 <= held_out < 1.0:
            raise ConfigError(f"held_out={held_out}: the share of held-out tasks must lie in [0, 1)")
        self.environment = environment
        self.share = held_out
        self._seed = seed
        self._threshold = int(held_out * 2**64)

    @classmethod
    def of(cls, environment: Environment, config: Config) -> Split:
        """The split of a run; with ``eval.tasks=0`` every task trains."""
        return cls(environment, config.seed, 0.1 if config.eval.tasks else 0.0)

    def train(self, index: int) -> Task:
        """The ``index``-th training task of this run: a function of the run's seed and ``index`` alone.

        Raises ``ConfigError`` where every prompt of the environment is held out.
        """
        size = self.environment.size or _INDICES
        for draw in range(_MAX_DRAWS):
            key = struct.pack("<3Q", self._seed & 0xFFFFFFFFFFFFFFFF, index, draw)
            task = self.environment.training_task(xxhash.xxh3_64_intdigest(key) % size)
            if not self.is_held_out(task):
                return task
        raise ConfigError(
            f"{self.environment.name}: {_MAX_DRAWS} tasks in a row are held out, so it has too few distinct prompts to "
            "split; give it more, or set eval.tasks=0 to train on all of them"
        )

    def held_out(self, count: int) -> list[Task]:
        """Up to ``count`` held-out tasks with distinct prompts, the same for every seed; fewer where no more exist.

        Scans a bounded number of raw indices in a fixed random order. Raises ``ConfigError`` where none is found.
        """
        if count == 0:
            return []
        found: dict[str | int, Task] = {}
        indices = self._scan(count)
        for index in indices:
            task = self.environment.task(index)
            if self.is_held_out(task):
                found.setdefault(task.prompt or task.index, task)
                if len(found) == count:
                    break
        if not found:
            raise ConfigError(
                f"{self.environment.name}: none of {len(indices)} tasks is held out for evaluation; give it more "
                "distinct prompts, or set eval.tasks=0"
            )
        return list(found.values())

    def _scan(self, count: int) -> list[int]:
        """Raw indices among which ``count`` held-out prompts are looked for.

        Shuffled, because an environment may enumerate its tasks in an order: the first ones are not typical.
        """
        if not self.share:
            return []
        bound = 1_000 + int(8 * count / self.share)
        size = self.environment.size or _INDICES
        draw = random.Random(0)
        if size <= bound:
            return draw.sample(range(size), size)
        return draw.sample(range(size), bound)

    def is_held_out(self, task: Task) -> bool:
        """Decided by the prompt, or by the index where the task has no prompt."""
        key = task.prompt.encode() if task.prompt else struct.pack("<Q", task.index)
        return xxhash.xxh3_64_intdigest(key) < self._threshold
