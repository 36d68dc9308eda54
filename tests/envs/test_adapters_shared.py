"""A shared resource lives as long as somebody uses it, and no longer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from streamrl.envs.adapters.shared import Shared


class Made:
    """Resources by number; ``alive`` are those that were entered and not left."""

    def __init__(self) -> None:
        self.count = 0
        self.alive: set[int] = set()
        self.task_of: dict[int, asyncio.Task[object] | None] = {}

    @asynccontextmanager
    async def make(self) -> AsyncIterator[int]:
        self.count += 1
        number = self.count
        self.alive.add(number)
        self.task_of[number] = asyncio.current_task()
        try:
            yield number
        finally:
            await asyncio.sleep(0)  # closing takes a turn of the loop
            assert asyncio.current_task() is self.task_of[number]
            self.alive.discard(number)


def test_users_at_the_same_time_share_and_the_last_one_closes() -> None:
    async def run() -> None:
        made = Made()
        shared = Shared(made.make, max_uses=100)
        async with shared.use() as first:
            async with shared.use() as second:
                assert first == second == 1
            assert made.alive == {1}
        assert made.alive == set()
        async with shared.use() as third:
            assert third == 2
        assert made.alive == set()

    asyncio.run(run())


def test_after_max_uses_there_is_a_new_one_while_the_old_one_serves_its_users() -> None:
    async def run() -> None:
        made = Made()
        shared = Shared(made.make, max_uses=2)
        async with shared.use():
            async with shared.use() as second:
                assert second == 1
            async with shared.use() as third:
                assert third == 2
                assert made.alive == {1, 2}
            assert made.alive == {1}
        assert made.alive == set()

    asyncio.run(run())


def test_what_making_raises_every_user_raises_and_the_next_one_tries_again() -> None:
    async def run() -> None:
        attempts = 0

        @asynccontextmanager
        async def make() -> AsyncIterator[str]:
            nonlocal attempts
            attempts += 1
            if attempts == 1:
                raise OSError("no port")
            yield "made"

        shared = Shared(make, max_uses=100)

        async def use() -> str:
            async with shared.use() as value:
                return value

        outcomes = await asyncio.gather(use(), use(), return_exceptions=True)
        assert [str(each) for each in outcomes] == ["no port", "no port"]
        assert await use() == "made"

    asyncio.run(run())


def test_a_cancelled_user_leaves_nothing_behind() -> None:
    async def run() -> None:
        made = Made()
        shared = Shared(made.make, max_uses=100)
        using = asyncio.Event()

        async def use() -> None:
            async with shared.use():
                using.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(use())
        await using.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert made.alive == set()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_a_user_that_is_cancelled_while_it_is_made_leaves_nothing_behind() -> None:
    async def run() -> None:
        made = Made()
        begun, go_on = asyncio.Event(), asyncio.Event()

        @asynccontextmanager
        async def slow() -> AsyncIterator[int]:
            begun.set()
            await go_on.wait()
            async with made.make() as value:
                yield value

        async def use() -> None:
            async with Shared(slow, max_uses=100).use():
                raise AssertionError("it was cancelled before there was anything to use")

        task = asyncio.create_task(use())
        await begun.wait()
        task.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert made.count == 1
        assert made.alive == set()

    asyncio.run(run())
