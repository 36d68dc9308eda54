"""How many groups a rollouter has under way: as many as fit the engines' slots, fewer while their KV cache does not
hold them (pure)."""

from __future__ import annotations

from collections.abc import Callable

from streamrl.ports import EngineStatistics

ROOM = 0.9
"""Share of the KV cache below which there is room for one more group."""
SHRINK = 0.7
"""Factor on the limit after a preemption: what was computed for a preempted request is computed again."""


class Concurrency:
    """Additive growth, multiplicative decrease (as TCP does), between 1 and ``most`` groups.

    It begins at ``most``, so that engines whose KV cache holds every slot are never held back; with ``most=0`` it stays
    there. It grows by one group for as many as it allows, and one congestion counts once: after a decrease,
    preemptions are overlooked until as many groups have ended as were under way.

    ``recomputes`` (``engine.kv=recompute``): engines may count as preempted what they compute anew for an update, so
    preemptions do not count where the version changed meanwhile.
    """

    def __init__(self, most: int, statistics: Callable[[], EngineStatistics], *, recomputes: bool = False) -> None:
        self.limit = most
        """Groups that may be under way at once."""
        self._most = most
        self._statistics = statistics
        self._recomputes = recomputes
        self._preemptions = 0
        self._version = -1
        self._overlooked = 0
        """Groups that end before a preemption counts again."""
        self._calm = 0
        """Groups that ended with room since the last change."""

    def group_ended(self, others: int) -> None:
        """Adapt to what the engine says at the end of a group, with ``others`` under way."""
        engine = self._statistics()
        updated = self._recomputes and engine.version != self._version
        preempted = engine.preemptions > self._preemptions and not updated
        self._preemptions, self._version = engine.preemptions, engine.version  # a replaced engine counts from 0 again
        if self._overlooked:
            self._overlooked -= 1
        elif preempted:
            self.limit = max(1, int(min(self.limit, others + 1) * SHRINK))
            self._overlooked, self._calm = others, 0
        elif engine.kv_used < ROOM:
            self._calm += 1
            if self._calm >= self.limit:
                self.limit, self._calm = min(self._most, self.limit + 1), 0
