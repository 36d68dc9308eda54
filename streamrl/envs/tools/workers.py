"""Plain functions of users on daemon threads that are used again; a function that hangs keeps its thread.

``threads.UserThread`` gives an episode one thread; here the calls of an episode run at the same time, and each may be
given up alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from streamrl.envs.failure import stack_of
from streamrl.envs.guard import left_behind

_T = TypeVar("_T")

_MOST_IDLE = 32


async def on_thread(function: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
    """The result of ``function(*args, **kwargs)``, run on a thread with the caller's context variables.

    A cancelled call returns at once. The function runs on, its result is dropped, and until it ends its thread counts
    as left behind (``guard.py``).
    """
    caller: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
    worker = _idle.pop() if _idle else _Worker()
    worker.begin(partial(contextvars.copy_context().run, function, *args, **kwargs), caller)
    try:
        return await caller
    except asyncio.CancelledError:
        worker.give_up(caller)
        raise


class _Worker(threading.Thread):
    """One thread that waits for calls, in ``_idle`` while it has none."""

    def __init__(self) -> None:
        super().__init__(name="tools", daemon=True)
        self._work: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._caller: asyncio.Future[Any] | None = None
        self.start()

    def begin(self, call: Callable[[], Any], caller: asyncio.Future[Any]) -> None:
        self._caller = caller
        self._work.put(call)

    def give_up(self, caller: asyncio.Future[Any]) -> None:
        """``caller`` waits no longer: where its call still runs, this thread is left behind."""
        with self._lock:
            if self._caller is caller:
                left_behind.add(id(self), stack_of(self.ident)[0])

    def run(self) -> None:
        self._run_one()
        while len(_idle) < _MOST_IDLE:
            _idle.append(self)
            self._run_one()

    def _run_one(self) -> None:
        call = self._work.get()
        outcome, error = None, None
        try:
            outcome = call()
        except BaseException as raised:  # noqa: BLE001 it belongs to the caller, which gets it
            error = raised
        with self._lock:
            caller, self._caller = self._caller, None
            left_behind.remove(id(self))
        assert caller is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            caller.get_loop().call_soon_threadsafe(_settle, caller, outcome, error)


_idle: deque[_Worker] = deque()


def _settle(caller: asyncio.Future[Any], outcome: Any, error: BaseException | None) -> None:
    if caller.done():
        return  # it was given up
    if isinstance(error, StopIteration):
        error = RuntimeError("StopIteration was raised")  # a future takes none
    if error is not None:
        caller.set_exception(error)
    else:
        caller.set_result(outcome)
