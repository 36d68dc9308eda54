"""Several rewards as one: their weighted sum, and the value of each part in the metrics."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamrl.envs.environment import Reward, Task
from streamrl.envs.failure import one_line
from streamrl.envs.returned import checked_reward
from streamrl.envs.rewards.loading import load_reward
from streamrl.envs.rewards.protocol import Answer, RewardFn
from streamrl.errors import ConfigError, EnvironmentFailed

_REASON = 300
"""Characters of why a part is missing that travel with the trajectory; metadata is small (``returned.py``)."""


@dataclass(frozen=True)
class Part:
    """One reward of a mixture."""

    name: str
    """In the metrics: ``reward/<name>`` is its value, ``reward/<name>/<metric>`` one of its own metrics."""
    reward: RewardFn
    weight: float = 1.0
    optional: bool = False
    """Where it fails, the others count without it, and ``reward/<name>/failed`` is 1."""


class MixtureReward:
    """Sum of weight × value over its parts, which are scored at the same time.

    Raises ``EnvironmentFailed`` that names the part where one fails that is not optional, or all of them. Columns and
    metadata of the parts travel with the trajectory; two parts must not give the same name.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts

    async def __call__(self, task: Task, answer: Answer) -> Reward:
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._score(part, task, answer)) for part in self._parts]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        scores = [(part, each.result()) for part, each in zip(self._parts, running, strict=True)]
        failed = [score for _, score in scores if isinstance(score, str)]
        if len(failed) == len(scores):
            raise EnvironmentFailed(f"every part of the reward failed: {failed[0]}")
        return _sum(scores)

    async def close(self) -> None:
        """Of every part."""
        for part in self._parts:
            await part.reward.close()

    async def _score(self, part: Part, task: Task, answer: Answer) -> Reward | str:
        """The part's reward; why there is none, where it may be missing."""
        try:
            return checked_reward(await part.reward(task, answer))
        except (Exception, SystemExit) as error:  # a SystemExit would leave the event loop
            reason = f"reward {part.name!r}: {error if isinstance(error, EnvironmentFailed) else one_line(error)}"
            if part.optional:
                return reason
            raise EnvironmentFailed(reason) from error


def _sum(scores: Sequence[tuple[Part, Reward | str]]) -> Reward:
    value = 0.0
    metrics: dict[str, float] = {}
    columns: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    for part, score in scores:
        name = f"reward/{part.name}"
        if part.optional:
            metrics[f"{name}/failed"] = float(isinstance(score, str))
        if isinstance(score, str):
            metadata[f"{name}/reason"] = score[:_REASON]
            continue
        value += part.weight * score.value
        metrics[name] = score.value
        metrics |= {f"{name}/{key}": each for key, each in score.metrics.items()}
        for mine, whole in ((score.columns, columns), (score.metadata, metadata)):
            if twice := mine.keys() & whole.keys():
                raise EnvironmentFailed(f"reward {part.name!r}: {sorted(twice)[0]!r} is also given by another part")
            whole |= mine
    return Reward(value, metrics, columns, metadata)


def load_mixture(specs: Sequence[Any], where: str) -> MixtureReward:
    """The mixture of a list of ``load_reward`` specs. Raises ``ConfigError`` that names the place in the list."""
    parts = [_part(spec, f"{where}[{place}]") for place, spec in enumerate(specs)]
    names = [part.name for part in parts]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{where}: two parts are called {name!r}; give one another `metric`")
    return MixtureReward(parts)


def _part(spec: Any, where: str) -> Part:
    if isinstance(spec, str):
        spec = {"name": spec}
    if not isinstance(spec, Mapping):
        raise ConfigError(f"{where}: expected a name or a mapping with a name, got {spec!r:.80}")
    options = dict(spec)
    weight, optional = options.pop("weight", 1.0), options.pop("optional", False)
    metric = options.pop("metric", str(options.get("name")).rpartition(":")[2])
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ConfigError(f"{where}: weight={weight!r} must be a finite number")
    if not isinstance(optional, bool):
        raise ConfigError(f"{where}: optional={optional!r} must be true or false")
    return Part(str(metric), load_reward(options, where), float(weight), optional)
