"""Several environments as one, with weights: ``env=streamrl.envs.adapters.mixture:Mixture``.

Which part an index belongs to is decided by a hash of the index and the weights, so every process agrees. A curriculum
moves the weights while training: it is asked when a training task is made, by the process that plays it, and what it
chose stands in the task. Held-out tasks are drawn with the weights as they are written.
"""

from __future__ import annotations

import itertools
import math
import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import xxhash

from streamrl.envs.environment import Environment, Policy, Reward, Task, load_environment, refuse_unknown, short_name
from streamrl.envs.loading import load_function, nearest
from streamrl.errors import ConfigError, EnvironmentFailed
from streamrl.schema import Config

RECENT = 64
"""Groups of a part whose rewards a curriculum sees."""

_INDICES = 1 << 32


@dataclass(frozen=True)
class PartStats:
    """What this process has played of one part."""

    weight: float
    """As it stands in the settings; all of them sum to 1."""
    groups: int
    mean: float | None
    """Mean reward over the last 64 groups; None before the first."""


Curriculum = Callable[[Mapping[str, PartStats]], Mapping[str, float]]


@dataclass
class _Part:
    environment: Environment
    weight: float
    recent: deque[float]
    groups: int = 0

    def stats(self) -> PartStats:
        mean = sum(self.recent) / len(self.recent) if self.recent else None
        return PartStats(self.weight, self.groups, mean)


class Mixture:
    """``parts``: environments ``{name: module:Name, args: {…}, weight: 1.0, label: …}``.

    ``label`` is the part's name in ``reward/<label>/mean``, where the environment's own would stand twice. Its reward,
    its metrics and its split are the part's own: what a part holds out never trains.
    """

    name = "mixture"

    def __init__(self, parts: Sequence[Mapping[str, Any]], curriculum: str | None = None) -> None:
        """``curriculum``: ``package.module:function`` from ``PartStats`` by label to weights by label."""
        if not isinstance(parts, Sequence) or isinstance(parts, str) or not parts:
            raise ConfigError(f"env.args.parts: expected a list of {{name, args, weight}}, got {parts!r:.80}")
        self._parts: dict[str, _Part] = {}
        for place, settings in enumerate(parts):
            label, part = _load(settings, f"env.args.parts[{place}]")
            if label in self._parts:
                raise ConfigError(f"env.args.parts[{place}]: a second part is called {label!r}; give each a label")
            self._parts[label] = part
        total = sum(part.weight for part in self._parts.values())
        for part in self._parts.values():
            part.weight /= total
        self._curriculum: Curriculum | None = (
            None if curriculum is None else load_function(curriculum, "env.args.curriculum")
        )

    def task(self, index: int) -> Task:
        """The part's task, with its label, its own index and its own metadata in ``metadata``."""
        return self._task(index, {label: part.weight for label, part in self._parts.items()}, training=False)

    def training_task(self, index: int) -> Task:
        """As ``task``, with the weights of the curriculum, and the part's own training task."""
        stats = {label: part.stats() for label, part in self._parts.items()}
        weights = {label: part.weight for label, part in self._parts.items()}
        if self._curriculum is not None:
            weights = _checked(self._curriculum(stats), stats)
        return self._task(index, weights, training=True)

    async def episode(self, task: Task, policy: Policy) -> float | Reward:
        part, own = self._own(task)
        returned = await part.environment.episode(own, policy)
        if self._curriculum is None:
            return returned
        reward = returned if isinstance(returned, Reward) else Reward(returned)
        chosen = {"part": task.metadata["part"], "index": task.metadata["index"]}
        return replace(reward, metadata={**reward.metadata, "task": chosen})

    def env_of(self, task: Task) -> str:
        return str(task.metadata["part"])

    def played(self, task: Task, rewards: Sequence[float]) -> None:
        """A training group of ``task`` was played here; the curriculum sees it, and so does the part."""
        part, own = self._own(task)
        part.groups += 1
        part.recent.append(sum(rewards) / len(rewards))
        part.environment.played(own, rewards)

    async def close(self) -> None:
        for part in self._parts.values():
            await part.environment.close()

    def _task(self, index: int, weights: Mapping[str, float], training: bool) -> Task:
        bounds = list(itertools.accumulate(weights.values()))
        place = bisect_right(bounds, _hash(index, 0) / 2**64 * bounds[-1], hi=len(bounds) - 1)
        label = list(weights)[place]
        environment = self._parts[label].environment
        own = _hash(index, 1) % (environment.size or _INDICES)
        task = environment.training_task(own) if training else environment.task(own)
        return replace(task, metadata={"part": label, "index": own, "metadata": task.metadata})

    def _own(self, task: Task) -> tuple[_Part, Task]:
        """The part that ``task`` was made by, and the task as that part made it."""
        known = task.metadata
        return self._parts[known["part"]], replace(task, index=known["index"], metadata=dict(known["metadata"]))


def _load(settings: Any, where: str) -> tuple[str, _Part]:
    if not isinstance(settings, Mapping) or not isinstance(settings.get("name"), str):
        raise ConfigError(f"{where}: expected {{name: module:Name, args: {{…}}, weight: 1.0}}, got {settings!r:.80}")
    weight = settings.get("weight", 1.0)
    if not isinstance(weight, int | float) or not math.isfinite(weight) or weight <= 0:
        raise ConfigError(f"{where}.weight={weight!r}: expected a number above 0; leave the part out instead of 0")
    config = Config()
    config.env.name = settings["name"]
    config.env.args = dict(settings.get("args") or {})
    try:
        refuse_unknown(settings, ("name", "args", "weight", "label"), "a part")
        environment = load_environment(config)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    label = short_name(settings.get("label", environment.name), f"{where}.label")
    return label, _Part(environment, float(weight), deque(maxlen=RECENT))


def _checked(chosen: Any, stats: Mapping[str, PartStats]) -> dict[str, float]:
    """The weights of a curriculum for the parts in their order; a part that it leaves out has 0."""
    if not isinstance(chosen, Mapping):
        raise EnvironmentFailed(f"the curriculum must return a dict of weights by part, got {chosen!r:.80}")
    for label, weight in chosen.items():
        if label not in stats:
            raise EnvironmentFailed(f"the curriculum gave a weight to {label!r}{nearest(str(label), stats)}")
        if not isinstance(weight, Real) or not math.isfinite(weight) or float(weight) < 0:
            raise EnvironmentFailed(f"the curriculum gave {label!r} the weight {weight!r}; expected at least 0")
    weights = {label: float(chosen.get(label, 0.0)) for label in stats}
    if not sum(weights.values()) > 0:
        raise EnvironmentFailed("the curriculum gave every part the weight 0; one must be above")
    return weights


def _hash(index: int, salt: int) -> int:
    return xxhash.xxh3_64_intdigest(struct.pack("<2Q", index, salt))


def learnable(parts: Mapping[str, PartStats]) -> dict[str, float]:
    """A curriculum for rewards in [0, 1]: a part's weight times p (1 − p), the variance of a reward that is 1 with
    probability p, and never less than a tenth of what it is at p = 1/2."""

    def spread(mean: float | None) -> float:
        p = 0.5 if mean is None else min(1.0, max(0.0, mean))
        return max(p * (1.0 - p), 0.025)

    return {label: part.weight * spread(part.mean) for label, part in parts.items()}
