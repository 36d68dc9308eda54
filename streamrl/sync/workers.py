"""Threads for the work on buckets that the interpreter lock is released for: digests, codes, copies."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from typing import TypeVar

Result = TypeVar("Result")

MOST_WORKERS = 8
"""More do not help: xxh3 in so many threads is faster than memory is."""


def worker_count() -> int:
    """Half of the cores that this process may use, 1 to 8: the other half gathers, sends and generates."""
    return max(1, min(MOST_WORKERS, len(os.sched_getaffinity(0)) // 2))


async def in_thread(work: Callable[[], Result]) -> Result:
    """Run blocking work; a cancellation waits for its end, so that nobody writes to memory that has another use."""
    return await finished(asyncio.to_thread(work))


async def finished(work: Awaitable[Result]) -> Result:
    """``work``; cancellations take effect at its end, however many there are: an update that is discarded while the run
    ends is cancelled twice."""
    working = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        while not working.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({working})
        raise


class Crew:
    """Blocking work in up to ``worker_count()`` threads, beside the task that gives it out.

    ::

        async with Crew() as crew:
            await crew.give(work)       returns when a thread is free for it
                                        the end waits for all of it

    What one piece of work raises ends the block at once, is raised from it, and the rest is waited for; of several
    the first. A cancellation waits as well: after the block, no thread works any more.
    """

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(worker_count())
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Crew:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *raised: object) -> None:
        try:
            await self._tasks.__aexit__(*raised)  # type: ignore[arg-type]
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def give(self, work: Callable[[], None]) -> None:
        await self._free.acquire()
        self._tasks.create_task(self._do(work), name="weights-work")

    async def _do(self, work: Callable[[], None]) -> None:
        try:
            await in_thread(work)
        finally:
            self._free.release()
