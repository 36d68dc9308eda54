"""Time as a dependency: everything with a deadline takes a ``Clock``, so that tests move time by hand."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds, monotonic, from an arbitrary zero."""
        ...

    async def sleep_until(self, when: float) -> None:
        """Return once ``now() >= when``."""
        ...


class RealClock:
    """``time.monotonic``: one zero for all processes of a host."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep_until(self, when: float) -> None:
        while (left := when - time.monotonic()) > 0:  # noqa: ASYNC110 a timer may fire a little early
            await asyncio.sleep(left)


class ManualClock:
    """A clock that stands still until ``advance`` is called: for tests."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move time on and wake every sleeper whose time has come."""
        self._now += seconds
        due = [future for when, future in self._sleepers if when <= self._now]
        self._sleepers = [sleeper for sleeper in self._sleepers if sleeper[0] > self._now]
        for future in due:
            if not future.done():
                future.set_result(None)

    async def sleep_until(self, when: float) -> None:
        if when > self._now:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._sleepers.append((when, future))
            await future
