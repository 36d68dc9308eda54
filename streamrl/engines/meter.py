"""What went through one engine, counted on our side of the wire."""

from __future__ import annotations

import time

from streamrl.ports import EngineStatistics


class Meter:
    """Requests under way, tokens, and the seconds in which there was something to compute."""

    def __init__(self) -> None:
        self.kv_used = 0.0
        """As the server said last, while anything was under way."""
        self._under_way = self._generated = self._prefilled = self._preemptions = 0
        self._paused = False
        self._busy_s = 0.0
        self._since: float | None = None
        """When the server last got something to compute; None while it has nothing, or is paused."""
        self._asked = float("-inf")

    def begin(self) -> None:
        self._under_way += 1
        self._turn()

    def end(self) -> None:
        self._under_way -= 1
        self._turn()

    def pause(self) -> None:
        self._paused = True
        self._turn()

    def resume(self) -> None:
        self._paused = False
        self._turn()

    def count(self, generated: int, prefilled: int, preemptions: int = 0) -> None:
        """What one answer of the server took, in tokens and in preemptions."""
        self._generated += generated
        self._prefilled += prefilled
        self._preemptions += preemptions

    def due(self, every_s: float) -> bool:
        """Whether it is time to ask the server again how full it is; if so, that counts as asked."""
        now = time.monotonic()
        if now - self._asked < every_s:
            return False
        self._asked = now
        return True

    def statistics(self, slots: int, version: int) -> EngineStatistics:
        running = min(self._under_way, slots)
        return EngineStatistics(
            running=running,
            waiting=self._under_way - running,
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            busy_s=self._busy_s + (time.monotonic() - self._since if self._since is not None else 0.0),
            version=version,
            kv_used=self.kv_used if self._under_way else 0.0,
            preemptions=self._preemptions,
        )

    def _turn(self) -> None:
        now = time.monotonic()
        if self._since is not None:
            self._busy_s += now - self._since
        self._since = now if self._under_way and not self._paused else None
