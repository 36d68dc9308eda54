"""Watches an event loop for user code that holds it."""

from __future__ import annotations

import asyncio
import math
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Collection
from pathlib import Path
from types import TracebackType

_BEAT_S = 0.01
"""Between two signs of life of the loop."""

_LATE_S = 0.05
"""Without a sign of life, from which on the loop's thread is looked at."""

_SCHEDULED = Path("/proc/self/task")
"""Where Linux says how long each thread waited for a processor."""

_NOT_USERS = (str(Path(__file__).parents[2]), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))


class LoopWatch:
    """An async context manager around what the loop does; afterwards the longest stall that user code caused.

    A thread looks where the loop's thread is while it gives no sign of life, so a busy machine alone is no stall; nor
    does the time count for which the loop's thread waited for a processor that others had.
    """

    def __init__(self, files: Collection[str] = ()) -> None:
        """``files`` count as user code wherever they lie."""
        self.longest_s = 0.0
        self.place = ""
        """``file:line`` of the user's last line in it."""
        self._files = files
        self._beat = (math.inf, 0.0)
        self._ended = threading.Event()
        self._loop_thread = threading.get_ident()
        self._native_id = threading.get_native_id()
        self._thread = threading.Thread(target=self._watch, name="loop-watch", daemon=True)

    async def __aenter__(self) -> LoopWatch:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._sign()
        return self

    async def __aexit__(self, kind: object, error: object, frames: TracebackType | None) -> None:
        self._timer.cancel()
        self._ended.set()
        self._thread.join()

    def _sign(self) -> None:
        self._beat = (time.monotonic(), queued_s(self._native_id))
        self._timer = self._loop.call_later(_BEAT_S, self._sign)

    def _watch(self) -> None:
        place, beat = "", self._beat
        while not self._ended.wait(_BEAT_S):
            if self._beat != beat:
                place, beat = "", self._beat
            signed, queued = beat
            late_s = time.monotonic() - signed
            if late_s > _LATE_S:
                late_s -= queued_s(self._native_id) - queued
            if late_s > _LATE_S:
                place = place or self._users_place()
                if place and late_s > self.longest_s:
                    self.longest_s, self.place = late_s, place

    def _users_place(self) -> str:
        """Where the loop's thread is in the user's code; nothing where it is not."""
        frames = traceback.extract_stack(sys._current_frames()[self._loop_thread])
        called = [place for place, frame in enumerate(frames) if frame.filename == asyncio.events.__file__]
        if not called:
            return ""  # the loop itself is at work
        for frame in reversed(frames[called[-1] :]):
            if frame.filename in self._files or not frame.filename.startswith((*_NOT_USERS, "<")):
                return f"{Path(frame.filename).name}:{frame.lineno}"
        return ""


def queued_s(native_id: int) -> float:
    """Seconds for which a thread of this process was ready to run and had no processor; 0 where Linux does not say."""
    try:
        return int((_SCHEDULED / str(native_id) / "schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0
