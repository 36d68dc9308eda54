"""Something costly that lives as long as anybody uses it, and is made anew after a number of uses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Shared(Generic[_T]):
    """Users at the same time share one resource; its last user closes it.

    After ``max_uses`` uses the next user gets a new one, while the old one ends with its last user: what a use leaves
    behind in a resource is bounded.
    """

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[_T]], max_uses: int) -> None:
        self._make = make
        self._max_uses = max_uses
        self._current: _Generation[_T] | None = None

    @asynccontextmanager
    async def use(self) -> AsyncIterator[_T]:
        """The resource. Raises what making it raised."""
        generation = self._current
        if generation is None or generation.uses >= self._max_uses or generation.users == 0:
            generation = self._current = _Generation(self._make())
        generation.uses += 1
        generation.users += 1
        try:
            yield await asyncio.shield(generation.made)
        finally:
            generation.users -= 1
            if generation.users == 0:
                await generation.end()


class _Generation(Generic[_T]):
    """One resource, held open by a task of its own: what is entered in a task must be left in the same one."""

    def __init__(self, resource: AbstractAsyncContextManager[_T]) -> None:
        self.uses = 0
        self.users = 0
        self.made: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._unused = asyncio.Event()
        self._holder = asyncio.create_task(self._hold(resource))

    async def end(self) -> None:
        """Close the resource and wait until it is closed; a cancelled caller does not stop the closing."""
        self._unused.set()
        await asyncio.shield(self._holder)

    async def _hold(self, resource: AbstractAsyncContextManager[_T]) -> None:
        try:
            async with resource as value:
                self.made.set_result(value)
                await self._unused.wait()
        except Exception as error:
            if self.made.done():
                raise
            self.made.set_exception(error)  # its users raise it
            self.made.exception()  # somebody has seen it, also where every user was cancelled
