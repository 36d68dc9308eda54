"""User code that must never hold the ring: it is cancelled at its deadline, and given up where it does not end then.

A coroutine that swallows its cancellation is closed. What cannot be ended from outside (a thread that hangs, a task
that waits for another one that will not end) is left behind and counted; too many of those end the run.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Generator
from threading import Lock
from typing import Any, TypeVar

from streamrl.errors import EnvironmentFailed

_T = TypeVar("_T")

GRACE_S = 5.0
"""Seconds that cancelled user code has to clean up in before it is given up."""

MOST_LEFT = 64
"""Threads and tasks that may be left behind at once; each holds its memory, and a busy thread the interpreter too."""


class Expired(Exception):
    """User code took longer than it may; the cause is the exception that it was ended by."""


class LeftBehind:
    """What could not be ended, and for each its place in the user's code. Used from several threads."""

    def __init__(self) -> None:
        self._places: dict[int, str] = {}
        self._lock = Lock()

    def add(self, identity: int, place: str) -> None:
        with self._lock:
            self._places[identity] = place

    def remove(self, identity: int) -> None:
        """It ended after all."""
        with self._lock:
            self._places.pop(identity, None)

    def __len__(self) -> int:
        return len(self._places)

    def check(self) -> None:
        """Raise ``EnvironmentFailed`` where more than ``MOST_LEFT`` are there."""
        with self._lock:
            places = list(self._places.values())
        if len(places) > MOST_LEFT:
            raise EnvironmentFailed(
                f"{len(places)} episodes hang and cannot be ended, the last one{places[-1] or ' without a place'}; "
                "give what they wait for a timeout"
            )


left_behind = LeftBehind()
"""Of this process."""


async def bounded(coroutine: Coroutine[Any, Any, _T], timeout_s: float) -> _T:
    """The result of user code, or what it raised; ``Expired`` after ``timeout_s``.

    Cancelling the call cancels the code, which then has ``GRACE_S`` to end; it raises the ``CancelledError`` that the
    code ended with, whose traceback says where it was.
    """
    shell = _Shell(coroutine)
    work = asyncio.create_task(_awaited(shell))
    try:
        await asyncio.wait({work}, timeout=timeout_s)
    except asyncio.CancelledError:
        ended = await _end(shell, work)
        if isinstance(ended, asyncio.CancelledError):
            raise ended from None
        raise
    if not work.done():
        raise Expired from await _end(shell, work)
    result, left = work.result()
    if left is not None:
        raise left
    return result  # type: ignore[return-value]


async def _awaited(shell: Awaitable[_T]) -> tuple[_T | None, SystemExit | None]:
    try:
        return await shell, None
    except SystemExit as error:  # it would leave the event loop, not the task alone
        return None, error


async def _end(shell: _Shell[_T], work: asyncio.Task[Any]) -> BaseException | None:
    """Cancel ``work``, and wait until it has ended or can only be left; what it raised."""
    try:
        work.cancel()
        await asyncio.wait({work}, timeout=GRACE_S)
        if not work.done():
            shell.given_up = True
            work.cancel()
            await asyncio.wait({work}, timeout=GRACE_S)
    finally:
        if not work.done():
            shell.given_up = True
            left_behind.add(id(work), "")
            work.add_done_callback(_ended_after_all)
    if not work.done():
        return None
    try:
        work.result()
    except BaseException as error:  # noqa: BLE001 user code may raise anything, and was told to end
        return error
    return None


def _ended_after_all(work: asyncio.Task[Any]) -> None:
    left_behind.remove(id(work))
    if not work.cancelled():
        work.exception()  # nobody else will look at it


class _Shell(Awaitable[_T]):
    """Runs a coroutine, and closes it at its next step once it was given up."""

    def __init__(self, coroutine: Coroutine[Any, Any, _T]) -> None:
        self._coroutine = coroutine
        self.given_up = False

    def __await__(self) -> Generator[Any, Any, _T]:
        resume: Callable[[Any], Any] = self._coroutine.send
        value: Any = None
        while True:
            try:
                waits_for = resume(value)
            except StopIteration as end:
                result: _T = end.value
                return result
            try:
                value = yield waits_for
                resume = self._coroutine.send
            except BaseException as error:  # noqa: BLE001 it is handed on
                value, resume = error, self._coroutine.throw
            if self.given_up:
                self._close()
                raise asyncio.CancelledError

    def _close(self) -> None:
        with contextlib.suppress(BaseException):  # user code may raise anything, and was given up
            self._coroutine.close()
