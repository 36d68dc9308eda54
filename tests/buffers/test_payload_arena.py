"""The allocator of payload slots: against a model, and the order and accounting of those who wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.buffers.links.arena import ALIGNMENT, Arena, rounded
from streamrl.errors import ConfigError, StreamRLError

UNIT = ALIGNMENT


async def turn() -> None:
    """Let everything that is ready run, and whatever that made ready."""
    for _ in range(3):
        await asyncio.sleep(0)


def with_arena(units: int, scenario: Callable[[Arena], Coroutine[None, None, None]]) -> None:
    async def run() -> None:
        await asyncio.wait_for(scenario(Arena(units * UNIT)), 30)

    asyncio.run(run())


def start(arena: Arena, units: int) -> asyncio.Task[int]:
    return asyncio.ensure_future(arena.allocate(units * UNIT))


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(0, 9 * UNIT)),
        st.tuples(st.just("free"), st.integers(0, 50)),
        st.tuples(st.just("cancel"), st.integers(0, 50)),
    ),
    max_size=60,
)


def largest_hole(arena: Arena, taken: dict[int, int]) -> int:
    edges = [0, *(edge for offset in sorted(taken) for edge in (offset, offset + taken[offset])), arena.size]
    return max(end - begin for begin, end in zip(edges[::2], edges[1::2], strict=True))


@given(OPERATIONS)
def test_slots_never_overlap_and_nobody_waits_longer_than_needed(operations: list[tuple[str, int]]) -> None:
    async def scenario(arena: Arena) -> None:
        calls: list[tuple[int, asyncio.Task[int]]] = []  # in the order of allocate, those freed or cancelled removed
        taken: dict[int, int] = {}
        for operation, number in operations:
            waiting = [call for call in calls if not call[1].done()]
            if operation == "allocate":
                calls.append((rounded(number), asyncio.ensure_future(arena.allocate(number))))
            elif operation == "free" and taken:
                offset = sorted(taken)[number % len(taken)]
                calls = [call for call in calls if not call[1].done() or call[1].result() != offset]
                del taken[offset]
                arena.free(offset)
            elif operation == "cancel" and waiting:
                call = waiting[number % len(waiting)]
                calls.remove(call)
                call[1].cancel()
            await turn()
            taken = {call.result(): size for size, call in calls if call.done()}
            waiting = [call for call in calls if not call[1].done()]
            # Granted exactly once each: distinct offsets, multiples of the alignment, disjoint, inside.
            assert len(taken) == sum(call.done() for _, call in calls)
            ends = 0
            for offset in sorted(taken):
                assert offset % ALIGNMENT == 0
                assert offset >= ends
                ends = offset + taken[offset]
            assert ends <= arena.size
            assert arena.used_bytes == sum(taken.values()) == arena.size - arena.free_bytes
            # In order: all that are granted came before all that wait, and the first of those does not fit.
            assert [call.done() for _, call in calls] == sorted((call.done() for _, call in calls), reverse=True)
            assert arena.waiting == len(waiting)
            if waiting:
                assert waiting[0][0] > largest_hole(arena, taken)
        for _, call in calls:
            call.cancel()
        await turn()
        for offset in [call.result() for _, call in calls if call.done() and not call.cancelled()]:
            arena.free(offset)
        # Every hole has merged with its neighbours again.
        assert await asyncio.wait_for(arena.allocate(arena.size), 1) == 0

    with_arena(16, scenario)


def test_a_small_slot_does_not_overtake_a_large_one_that_waits() -> None:
    async def scenario(arena: Arena) -> None:
        first = await arena.allocate(3 * UNIT)
        large, small = start(arena, 4), start(arena, 1)
        await turn()
        assert (large.done(), small.done(), arena.waiting) == (False, False, 2)
        arena.free(first)
        assert (await large, arena.waiting) == (0, 1)
        arena.free(0)
        assert await small == 0

    with_arena(4, scenario)


def test_those_behind_a_cancelled_call_get_the_room_it_waited_for() -> None:
    async def scenario(arena: Arena) -> None:
        await arena.allocate(3 * UNIT)
        large, small = start(arena, 2), start(arena, 1)
        await turn()
        large.cancel()
        assert await asyncio.wait_for(small, 1) == 3 * UNIT

    with_arena(4, scenario)


def test_a_call_that_is_cancelled_in_the_turn_that_served_it_leaves_nothing_taken() -> None:
    async def scenario(arena: Arena) -> None:
        offset = await arena.allocate(4 * UNIT)
        waiting = start(arena, 4)
        await turn()
        arena.free(offset)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (arena.used_bytes, arena.waiting) == (0, 0)

    with_arena(4, scenario)


def test_a_slot_larger_than_the_arena_names_the_setting_instead_of_waiting_for_ever() -> None:
    async def scenario(arena: Arena) -> None:
        with pytest.raises(
            ConfigError, match=r"queue\.arena_bytes: a payload takes 1280 bytes, the whole arena has 1024"
        ):
            await arena.allocate(1025)

    with_arena(4, scenario)


def test_an_arena_without_room_for_one_slot_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"queue\.arena_bytes: expected at least 256 bytes, got 255"):
        Arena(255)


def test_closing_ends_every_wait_and_refuses_new_ones() -> None:
    async def scenario(arena: Arena) -> None:
        await arena.allocate(4 * UNIT)
        waiting = [start(arena, 1), start(arena, 2)]
        await turn()
        arena.close()
        for call in waiting:
            with pytest.raises(StreamRLError, match="closed while a payload waited"):
                await call
        with pytest.raises(StreamRLError, match="closed"):
            await arena.allocate(1)

    with_arena(4, scenario)


def test_freeing_what_is_not_taken_is_our_bug() -> None:
    async def scenario(arena: Arena) -> None:
        offset = await arena.allocate(1)
        arena.free(offset)
        with pytest.raises(AssertionError, match="no slot at offset 0"):
            arena.free(offset)

    with_arena(4, scenario)


def test_statistics_count_bytes_slots_and_waits() -> None:
    async def scenario(arena: Arena) -> None:
        await arena.allocate(1)
        await arena.allocate(2 * UNIT)
        waiting = start(arena, 2)
        await turn()
        assert arena.statistics() == {
            "arena/bytes": 4 * UNIT,
            "arena/used_bytes": 3 * UNIT,
            "arena/slots": 2,
            "arena/waiting": 1,
        }
        waiting.cancel()

    with_arena(4, scenario)
