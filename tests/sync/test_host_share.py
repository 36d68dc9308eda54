"""Receivers of one host: who pulls, who copies, and what happens when the one who pulls ends, fails or hangs."""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from transport_support import bucket_id, content, mixed

from streamrl.sync.arena import Arena
from streamrl.sync.transports.host_share import HostShare

MANIFEST = mixed()


@contextmanager
def part(name: str, patience_s: float = 30.0) -> Iterator[tuple[HostShare, Arena]]:
    arena = Arena(MANIFEST)
    share = HostShare(name, arena, patience_s)
    try:
        yield share, arena
    finally:
        share.close()
        arena.close()


def fill(one: tuple[HostShare, Arena], version: int, slot: int, index: int) -> None:
    share, arena = one
    share.lacks(bucket_id(version, slot, index))
    arena.slot(slot)[:] = content(MANIFEST, version)
    share.has(bucket_id(version, slot, index))


def play(scenario: Any, parts: int = 2, patience_s: float = 30.0) -> None:
    """``scenario`` gets the name and so many parts, of which the first has asked first."""

    async def limited() -> None:
        name = uuid.uuid4().hex
        with ExitStack() as stack:
            all_parts = [stack.enter_context(part(name, patience_s)) for _ in range(parts)]
            for share, _ in all_parts:
                if not share._take_name():
                    share._connect()
            async with asyncio.timeout(60):
                await scenario(name, *all_parts)

    asyncio.run(limited())


def test_what_the_first_has_is_read_in_its_memory() -> None:
    async def scenario(name: str, first: Any, other: Any) -> None:
        fill(first, 3, 1, 0)
        assert await other[0].find(bucket_id(3, 1, 0)) == first[1].bucket(1, 0)
        assert await first[0].find(bucket_id(3, 1, 0)) is None

    play(scenario)


def test_a_bucket_that_is_on_its_way_to_the_first_is_waited_for() -> None:
    async def scenario(name: str, first: Any, other: Any) -> None:
        finding = asyncio.create_task(other[0].find(bucket_id(3, 1, 1)))
        fill(first, 3, 1, 0)
        while not any(first[0]._guests.values()):  # noqa: ASYNC110 the question is on its way
            await asyncio.sleep(0)
        assert not finding.done()
        fill(first, 3, 1, 1)
        assert await finding == first[1].bucket(1, 1)

    play(scenario)


@pytest.mark.parametrize(
    "fields", [{"attempt": 1}, {"private": True}, {"version": 2}], ids=["retry", "joiner", "older version"]
)
def test_what_the_first_will_not_bring_is_pulled_at_once(fields: dict[str, Any]) -> None:
    async def scenario(name: str, first: Any, other: Any) -> None:
        fill(first, 3, 1, 0)
        assert await other[0].find(bucket_id(**({"version": 3, "slot": 1, "index": 1} | fields))) is None

    play(scenario)


def test_who_gets_all_in_private_does_not_become_the_first() -> None:
    async def scenario(name: str, first: Any) -> None:
        fill(first, 3, 1, 0)
        first[0].close()
        with part(name) as (observer, _), part(name) as (other, _):
            assert await observer.find(bucket_id(3, 1, 0, private=True)) is None
            assert await other.find(bucket_id(3, 1, 0)) is None
            assert (observer.first, other.first) == (False, True)

    play(scenario, parts=1)


def test_a_first_that_fails_tells_who_waits_and_is_asked_for_the_next_version() -> None:
    async def scenario(name: str, first: Any, other: Any) -> None:
        first[0].lacks(bucket_id(3, 1, 0))
        finding = asyncio.create_task(other[0].find(bucket_id(3, 1, 0)))
        while not any(first[0]._guests.values()):  # noqa: ASYNC110 the question is on its way
            await asyncio.sleep(0)
        first[0].fails(bucket_id(3, 1, 0))
        assert await finding is None
        fill(first, 3, 1, 1)
        assert await other[0].find(bucket_id(3, 1, 1)) is None, "the rest of that version is pulled"
        fill(first, 4, 0, 0)
        assert await other[0].find(bucket_id(4, 0, 0)) == first[1].bucket(0, 0)

    play(scenario)


def test_a_first_that_does_not_answer_costs_its_patience_once_for_each_version() -> None:
    async def scenario(name: str, first: Any, other: Any) -> None:
        assert await other[0].find(bucket_id(3, 1, 0)) is None
        fill(first, 3, 1, 1)
        assert await other[0].find(bucket_id(3, 1, 1)) is None
        fill(first, 4, 0, 0)  # the late answer to the first question is not taken for one to this
        assert await other[0].find(bucket_id(4, 0, 0)) == first[1].bucket(0, 0)

    play(scenario, patience_s=0.2)


def test_when_the_first_ends_the_next_who_asks_takes_its_place() -> None:
    async def scenario(name: str, first: Any, second: Any, third: Any) -> None:
        finding = asyncio.create_task(second[0].find(bucket_id(3, 1, 0)))
        while not any(first[0]._guests.values()):  # noqa: ASYNC110 the question is on its way
            await asyncio.sleep(0)
        first[0].close()
        assert await finding is None
        assert await second[0].find(bucket_id(3, 1, 1)) is None
        fill(second, 4, 0, 0)
        assert await third[0].find(bucket_id(4, 0, 0)) is None, "it hears now that its first has ended"
        fill(second, 5, 1, 0)
        assert await third[0].find(bucket_id(5, 1, 0)) == second[1].bucket(1, 0)

    play(scenario, parts=3)


@pytest.mark.parametrize("frame", [b"", b"\xff", b"no question", bytes(100_000)], ids=["end", "byte", "text", "long"])
def test_who_asks_nothing_that_is_a_question_is_dropped(frame: bytes) -> None:
    async def scenario(name: str, first: Any, other: Any) -> None:
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.setblocking(False)
        with stranger:
            stranger.connect(f"\0streamrl-{name}")
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(stranger, frame)
            assert await loop.sock_recv(stranger, 10) == b""
        fill(first, 3, 1, 0)
        assert await other[0].find(bucket_id(3, 1, 0)) == first[1].bucket(1, 0)

    play(scenario)


def test_processes_of_other_users_are_not_spoken_to(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(name: str, first: Any) -> None:
        with part(name) as (stranger, _):
            monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
            fill(first, 3, 1, 0)
            assert await stranger.find(bucket_id(3, 1, 0)) is None
            assert stranger._first is None

    play(scenario, parts=1)
