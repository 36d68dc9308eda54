"""The calls of an engine to the server or processes that it stands for, and what ends them.

======== ============================ ==================================================
state    entered by                   calls
======== ============================ ==================================================
serving  the beginning, ``resume``    all
paused   ``pause``                    whoever waits in ``going`` stays there
failed   the first ``fail``           those under way and all later ones raise that failure
closed   ``close``                    those under way end with ``CancelledError``; later ones raise ``RuntimeError``
======== ============================ ==================================================
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any, TypeVar

from streamrl.errors import ActorDied, StreamRLError

_T = TypeVar("_T")


class Calls:
    """Of one engine, which is ``name`` in messages. All methods are called on one event loop."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.version = -1
        """Of the weights that serve."""
        self.salt = uuid.uuid4().hex
        """Of a prefix cache: a new one with every load, and none that an engine before this one had."""
        self._failure: Exception | None = None
        self._closed = False
        self._under_way: set[asyncio.Task[Any]] = set()
        self._going = asyncio.Event()
        self._going.set()

    @property
    def serving(self) -> bool:
        """Neither failed nor closed; it may be paused."""
        return self._failure is None and not self._closed

    @property
    def failed(self) -> bool:
        return self._failure is not None

    @property
    def paused(self) -> bool:
        return not self._going.is_set()

    def require_serving(self) -> None:
        """Raises the failure, or ``RuntimeError`` once closed."""
        if self._failure is not None:
            raise copy(self._failure)
        if self._closed:
            raise RuntimeError(f"{self.name} is closed: build a new engine")

    async def run(self, call: Coroutine[Any, Any, _T]) -> _T:
        """``call``, ended by ``close`` and by a failure of the engine. Its own ``ActorDied`` is such a failure."""
        if not self.serving:
            call.close()
        self.require_serving()
        task = asyncio.create_task(call)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        try:
            return await task
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if self._failure is not None and own is not None and not own.cancelling():
                raise copy(self._failure) from None
            raise
        except ActorDied as error:
            self.fail(error)
            raise

    async def aside(self, call: Coroutine[Any, Any, None]) -> None:
        """``call``, whose failure is that of the next call: what has been answered already is not lost with it."""
        try:
            await self.run(call)
        except StreamRLError as error:
            self.fail(error)

    def pause(self) -> None:
        self._going.clear()

    def resume(self) -> None:
        self._going.set()

    async def going(self) -> None:
        """Wait while paused. What follows without another wait is in one stretch between two pauses."""
        while self.paused:  # the next pause may have begun by the time that this task runs again
            await self.run(self._going.wait())

    @contextmanager
    def loading(self, version: int) -> Iterator[None]:
        """Around the exchange of the weights for those of ``version``. Whatever ends it half way ends the engine."""
        try:
            yield
        except BaseException as error:  # a cancellation too leaves weights of two versions, which must never serve
            reason = f"version {version} was half loaded when this happened: {str(error) or type(error).__name__}"
            failure = ActorDied(f"{self.name}: {reason}; the engine must be replaced")
            self.fail(failure)
            if isinstance(error, Exception):
                raise failure from error
            raise
        self.version = version
        self.salt = uuid.uuid4().hex

    def fail(self, failure: Exception) -> None:
        """The first failure stays; every call under way ends with it."""
        if self._failure is None:
            # Everyone gets a copy: a traceback of its own, and here none, which would keep alive what its frames use.
            self._failure = copy(failure)
        for task in self._under_way:
            task.cancel()

    async def close(self) -> bool:
        """End every call under way and wait until it has ended; False where that was done before."""
        if self._closed:
            return False
        self._closed = True
        for task in self._under_way:
            task.cancel()
        if self._under_way:
            await asyncio.wait(set(self._under_way))
        return True
