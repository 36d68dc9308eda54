"""From settings to the rules of the batch plan: which groups go first, their advantages and token weights."""

from __future__ import annotations

import math
from functools import partial

from streamrl.buffers.offer import AdvantageFn, PriorityFn, WeightFn
from streamrl.buffers.wire.messages import GroupMeta
from streamrl.envs.failure import one_line
from streamrl.envs.loading import load_function
from streamrl.errors import ConfigError
from streamrl.loss.estimate import AdvantageEstimator
from streamrl.loss.reduce import token_weights
from streamrl.schema import Config


def priority_of(path: str) -> PriorityFn | None:
    """The function that ``buffer.priority`` names. Called with a group, it raises ``ConfigError`` of one line where
    user code raises or returns no finite number."""
    if not path:
        return None
    function = load_function(path, "buffer.priority")

    def priority(group: GroupMeta) -> float:
        where = f"buffer.priority={path}: the group of lease {group.lease}"
        try:
            value = float(function(group))
        except Exception as error:  # user code may raise anything; it is named
            raise ConfigError(f"{where} raised {one_line(error)}") from error
        if not math.isfinite(value):
            raise ConfigError(f"{where}: expected a finite number, got {value}")
        return value

    return priority


def estimators(config: Config) -> tuple[AdvantageFn, WeightFn]:
    """The rules of ``loss.advantage`` and ``loss.aggregation``; the buffer and a replay of its journal share them."""
    weights = partial(token_weights, name=config.loss.aggregation, length=config.sampling.max_tokens)
    return AdvantageEstimator(config), weights
