"""What ends the calls of an engine: its server's death, its end, its caller, an update that broke off."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Coroutine
from typing import Any

import pytest

from streamrl.engines.calls import Calls
from streamrl.engines.http_client import Refused
from streamrl.errors import ActorDied, StreamRLError


async def begun(calls: Calls, call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """``call`` under way: it has reached what it waits for."""
    task = asyncio.create_task(calls.run(call))
    for _ in range(3):  # the task, the call in a task of its own, and its first wait
        await asyncio.sleep(0)
    return task


async def held(calls: Calls) -> asyncio.Task[None]:
    """What waits for the resume, while paused."""
    calls.pause()
    task = asyncio.create_task(calls.going())
    for _ in range(3):
        await asyncio.sleep(0)
    return task


async def forever() -> None:
    await asyncio.Event().wait()


async def answered(value: int) -> int:
    return value


async def raised(error: Exception) -> None:
    raise error


def test_a_call_gives_what_it_returns_and_what_it_raises() -> None:
    async def run() -> None:
        calls = Calls("it")
        assert await calls.run(answered(3)) == 3
        with pytest.raises(Refused, match="no"):
            await calls.run(raised(Refused("it", "/x", 400, "no")))
        assert calls.serving, "a refusal is no failure of the engine"

    asyncio.run(run())


def test_the_servers_death_ends_every_call_with_its_reason_and_refuses_later_ones() -> None:
    async def run() -> None:
        calls = Calls("it")
        waiting = [await begun(calls, forever()) for _ in range(2)]
        calls.fail(ActorDied("gone"))
        calls.fail(ActorDied("said later"))
        for task in waiting:
            with pytest.raises(ActorDied, match="gone"):
                await task
        with pytest.raises(ActorDied, match="gone"):
            await calls.run(answered(1))
        with pytest.raises(ActorDied, match="gone"):
            calls.require_serving()

    asyncio.run(run())


def test_a_call_that_finds_the_server_dead_ends_the_others() -> None:
    async def run() -> None:
        calls = Calls("it")
        other = await begun(calls, forever())
        with pytest.raises(ActorDied, match="connection"):
            await calls.run(raised(ActorDied("no connection")))
        with pytest.raises(ActorDied, match="connection"):
            await other
        assert calls.failed

    asyncio.run(run())


def test_a_failure_is_said_as_it_was_and_holds_on_to_nothing_of_the_call_that_met_it() -> None:
    class Held:
        pass

    async def meet() -> weakref.ref[Held]:
        held = Held()
        with pytest.raises(Refused):
            await calls.run(use(held))
        return weakref.ref(held)

    async def use(held: Held) -> None:
        error = Refused("it", "/x", 500, "out of order")
        calls.fail(error)
        raise error

    async def run() -> None:
        met = await meet()
        await asyncio.sleep(0)
        gc.collect()
        assert met() is None
        with pytest.raises(Refused, match=r"it refused /x \(500\): out of order"):
            calls.require_serving()

    calls = Calls("it")
    asyncio.run(run())


def test_close_cancels_what_is_under_way_waits_for_its_end_and_happens_once() -> None:
    ended = []

    async def slow_to_end() -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    async def run() -> None:
        calls = Calls("it")
        task = await begun(calls, slow_to_end())
        assert await calls.close()
        assert ended == [True]
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not await calls.close()
        with pytest.raises(RuntimeError, match="it is closed"):
            await calls.run(answered(1))

    asyncio.run(run())


def test_a_caller_that_is_cancelled_cancels_its_call_and_no_other() -> None:
    async def run() -> None:
        calls = Calls("it")
        mine, other = await begun(calls, forever()), await begun(calls, forever())
        mine.cancel()
        with pytest.raises(asyncio.CancelledError):
            await mine
        assert calls.serving
        assert not other.done()
        await calls.close()

    asyncio.run(run())


def test_a_caller_that_is_cancelled_as_the_server_dies_is_cancelled() -> None:
    async def run() -> None:
        calls = Calls("it")
        task = await begun(calls, forever())
        task.cancel()
        calls.fail(ActorDied("gone"))
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


def test_what_waits_for_the_resume_waits_on_where_the_next_pause_follows_at_once() -> None:
    async def run() -> None:
        calls = Calls("it")
        task = await held(calls)
        calls.resume()
        calls.pause()
        for _ in range(5):  # more turns of the loop than it takes to hear of a resume
            await asyncio.sleep(0)
        assert not task.done()
        calls.resume()
        await task

    asyncio.run(run())


def test_what_waits_for_the_resume_ends_with_the_engine() -> None:
    async def run() -> None:
        calls = Calls("it")
        task = await held(calls)
        calls.fail(ActorDied("gone"))
        with pytest.raises(ActorDied, match="gone"):
            await task

    asyncio.run(run())


def test_a_load_that_is_done_changes_version_and_salt() -> None:
    calls = Calls("it")
    before = calls.salt
    with calls.loading(4):
        assert (calls.version, calls.salt) == (-1, before)
    assert calls.version == 4
    assert calls.salt != before


def test_a_load_that_breaks_off_ends_the_engine_with_what_happened() -> None:
    calls = Calls("it")
    with (
        pytest.raises(ActorDied, match=r"it: version 4 was half loaded .*no memory.*must be replaced"),
        calls.loading(4),
    ):
        raise OSError("no memory")
    assert calls.version == -1
    with pytest.raises(ActorDied, match="no memory"):
        calls.require_serving()


def test_a_load_that_is_cancelled_is_cancelled_and_ends_the_engine() -> None:
    async def run() -> None:
        calls = Calls("it")

        async def load() -> None:
            with calls.loading(4):
                await calls.run(forever())

        task = asyncio.create_task(load())
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(ActorDied, match="version 4 was half loaded.*CancelledError"):
            calls.require_serving()

    asyncio.run(run())


@pytest.mark.parametrize("error", [ActorDied("gone"), Refused("it", "/loads", 500, "gone")])
def test_a_call_aside_fails_the_next_call_and_not_its_own(error: StreamRLError) -> None:
    async def run() -> None:
        calls = Calls("it")
        await calls.aside(raised(error))
        with pytest.raises(StreamRLError, match="gone"):
            await calls.run(answered(1))

    asyncio.run(run())
