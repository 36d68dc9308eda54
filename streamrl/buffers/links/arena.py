"""Which bytes of a bounded region are taken: first fit, freed neighbours merge, who finds no room waits in order.

Nothing here touches memory: ``link_nixl`` allocates parts of its registered region with it. An arena that is full makes
``allocate`` wait, which is how payloads by reference press back on those who produce them (C4).
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque

from streamrl.errors import ConfigError, StreamRLError

ALIGNMENT = 256
"""Bytes. Slots start at multiples of this and take multiples of it."""


def rounded(nbytes: int) -> int:
    """Bytes that a slot of ``nbytes`` takes; an empty one takes room too, so that its offset is its own."""
    return max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT


class Arena:
    """Slots in ``[0, size)``. Belongs to one event loop: every method is called on its thread.

    ``size``: bytes, rounded down to ``ALIGNMENT``. Raises ``ConfigError`` when not even one slot fits.
    """

    def __init__(self, size: int) -> None:
        self.size = size // ALIGNMENT * ALIGNMENT
        if self.size <= 0:
            raise ConfigError(f"queue.arena_bytes: expected at least {ALIGNMENT} bytes, got {size}")
        self._taken: dict[int, int] = {}
        # Holes in order of their start, no two of them adjacent.
        self._starts = [0]
        self._sizes = [self.size]
        self._free = self.size
        self._queue: deque[tuple[int, asyncio.Future[int]]] = deque()
        self._closed = False

    @property
    def free_bytes(self) -> int:
        """In all, in holes that may each be too small for the next slot."""
        return self._free

    @property
    def used_bytes(self) -> int:
        return self.size - self._free

    @property
    def waiting(self) -> int:
        """``allocate`` calls that wait for room."""
        return len(self._queue)

    async def allocate(self, nbytes: int) -> int:
        """Offset of a slot of at least ``nbytes`` bytes. Waits for ``free`` while there is no room.

        First come, first served: a small slot does not overtake a large one, which would then wait for ever. No time
        limit of its own: ended by ``free``, ``close`` or cancellation, and a cancelled call leaves nothing taken.
        Raises ``ConfigError`` when the slot is larger than the arena, ``StreamRLError`` when the arena is closed.
        """
        size = rounded(nbytes)
        if size > self.size:
            raise ConfigError(
                f"queue.arena_bytes: a payload takes {size} bytes, the whole arena has {self.size}; "
                f"set queue.arena_bytes to several times {size}, or use shorter or fewer trajectories"
            )
        if self._closed:
            raise StreamRLError("no room is given in an arena that is closed")
        if not self._queue:
            offset = self._take(size)
            if offset is not None:
                return offset
        granted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._queue.append((size, granted))
        try:
            return await granted
        except asyncio.CancelledError:
            if (size, granted) in self._queue:
                self._queue.remove((size, granted))
                self._serve()  # those behind may fit where this one did not
            elif not granted.cancelled() and not granted.exception():
                self.free(granted.result())  # room was given in the same turn of the loop
            raise

    def free(self, offset: int) -> None:
        """Give a slot back; whoever waits is served. ``AssertionError`` for an offset that holds no slot."""
        size = self._taken.pop(offset, None)
        assert size is not None, f"no slot at offset {offset}"
        self._free += size
        index = bisect_left(self._starts, offset)
        if index < len(self._starts) and self._starts[index] == offset + size:
            size += self._sizes[index]
            del self._starts[index], self._sizes[index]
        if index and self._starts[index - 1] + self._sizes[index - 1] == offset:
            self._sizes[index - 1] += size
        else:
            self._starts.insert(index, offset)
            self._sizes.insert(index, size)
        self._serve()

    def close(self) -> None:
        """Whoever waits gets ``StreamRLError``, and so does every later ``allocate``. Idempotent."""
        self._closed = True
        for _, granted in self._queue:
            if not granted.done():
                granted.set_exception(StreamRLError("the arena was closed while a payload waited for room in it"))
        self._queue.clear()

    def statistics(self) -> dict[str, float]:
        """Bytes in all and taken, slots, and calls that wait."""
        return {
            "arena/bytes": self.size,
            "arena/used_bytes": self.used_bytes,
            "arena/slots": len(self._taken),
            "arena/waiting": self.waiting,
        }

    def _take(self, size: int) -> int | None:
        # First fit keeps to the low end of the region, so that pages which were never needed are never touched.
        index = next((index for index, hole in enumerate(self._sizes) if hole >= size), None)
        if index is None:
            return None
        offset = self._starts[index]
        if self._sizes[index] == size:
            del self._starts[index], self._sizes[index]
        else:
            self._starts[index] += size
            self._sizes[index] -= size
        self._taken[offset] = size
        self._free -= size
        return offset

    def _serve(self) -> None:
        while self._queue:
            size, granted = self._queue[0]
            if not granted.done():  # else it is cancelled, and its caller has not run yet
                offset = self._take(size)
                if offset is None:
                    return
                granted.set_result(offset)
            self._queue.popleft()
