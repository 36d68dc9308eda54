"""A batch that is handed out, and how it follows from its groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from streamrl import staleness
from streamrl.buffers.batcher import plan
from streamrl.buffers.wire.messages import GroupMeta, MicroBatches
from streamrl.schema import Config

AdvantageFn = Callable[[list[np.ndarray], list[np.ndarray], list[np.ndarray]], list[np.ndarray]]
"""Rewards, sampled-token counts and episodes ``[G]`` of each group → advantages ``[G]`` of each group."""

WeightFn = Callable[[list[np.ndarray]], list[np.ndarray]]
"""Sampled-token counts ``[G]`` of each group → weight of one token of each trajectory, ``[G]`` per group."""


PriorityFn = Callable[[GroupMeta], float]
"""A group's description → its priority; higher trains first."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Handed out and not acknowledged; a rank may ask for its part at any time."""

    step: int
    version: int
    attempt: int
    """Number of this hand-out in the life of the run: an acknowledgement names it."""
    oldest_allowed: int
    groups: list[GroupMeta]
    parts: list[MicroBatches]
    """Per rank."""
    stats: dict[str, float]

    @property
    def ranks(self) -> int:
        return len(self.parts)


class Planner:
    """Groups in their order and the trainer's version → micro-batches of every rank. Pure, so a replay repeats it."""

    def __init__(self, config: Config, advantage_fn: AdvantageFn, weight_fn: WeightFn) -> None:
        self._config = config
        self._advantages = advantage_fn
        self._weights = weight_fn

    def parts(self, groups: Sequence[GroupMeta], version: int, ranks: int) -> list[MicroBatches]:
        """Advantages and token weights are over all ``groups``, whoever trains on them."""
        counts = [np.asarray([t.sampled for t in group.trajectories], dtype=np.int64) for group in groups]
        rewards = [np.asarray([t.reward for t in group.trajectories], dtype=np.float64) for group in groups]
        episodes = [np.asarray([t.episode for t in group.trajectories], dtype=np.int64) for group in groups]
        return plan(
            groups,
            self._advantages(rewards, counts, episodes),
            self._weights(counts),
            ranks=ranks,
            token_budget=self._config.trainer.token_budget,
            oldest_allowed=staleness.oldest_allowed(version, self._config.max_lag),
        )
