"""Every transport that moves bytes: between processes, bit for bit, and what happens when one of them ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transport_support import (
    MOVING,
    Child,
    bucket_id,
    content,
    expected,
    fetch_version,
    fetched,
    large,
    mixed,
    offer_version,
    receive,
    receiving,
    refused,
    same_bits,
    send,
    sending,
)

from streamrl.sync.staging import bucket_of

pytestmark = pytest.mark.parametrize("name", MOVING)


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    """Starts processes; at the end they are dead."""
    children: list[Child] = []

    def begin(*arguments: Any) -> Child:
        children.append(Child(*arguments))
        return children[-1]

    yield begin
    for child in children:
        child.kill()


def test_versions_in_turn_arrive_bit_for_bit_in_several_processes(name: str, folder: Path, start) -> None:
    manifest = mixed()
    sender = start(send, name, manifest, folder)
    address = sender.hear()

    async def scenario() -> None:
        with receiving(name, address, manifest) as one, receiving(name, address, manifest, "rollouter-1") as other:
            for version, slot in ((0, 0), (1, 1), (2, 0), (3, 1)):
                sender.tell("withdraw", version - 2)
                sender.tell("offer", version, slot)
                await asyncio.gather(*(fetch_version(each, manifest, version, slot) for each in (one, other)))
                for each in (one, other):
                    assert same_bits(fetched(each, manifest, slot), expected(manifest, version))
                    assert version == 0 or same_bits(fetched(each, manifest, 1 - slot), expected(manifest, version - 1))

    asyncio.run(scenario())
    sender.tell("end")
    sender.process.join(30)
    assert sender.process.exitcode == 0


def test_a_bucket_of_many_parts_arrives_as_a_whole(name: str, folder: Path) -> None:
    manifest = large()

    async def scenario() -> None:
        async with sending(name, manifest, folder) as (sender, slab):
            await offer_version(sender, slab, 0, 0)
            with receiving(name, sender.address, manifest) as receiver:
                await fetch_version(receiver, manifest, 0, 0)
                assert receiver.memory(0) == content(manifest, 0)

    asyncio.run(scenario())


def test_a_late_joiner_and_a_retry_get_what_is_on_offer(name: str, folder: Path) -> None:
    manifest = mixed()

    async def scenario() -> None:
        async with sending(name, manifest, folder) as (sender, slab):
            await offer_version(sender, slab, 4, 0)
            await offer_version(sender, slab, 5, 1)
            for fields in ({"private": True}, {"attempt": 1}):
                with receiving(name, sender.address, manifest, "late") as late:
                    await fetch_version(late, manifest, 4, 0, **fields)
                    assert same_bits(fetched(late, manifest, 0), expected(manifest, 4))

    asyncio.run(scenario())


def test_a_version_that_was_never_begun_is_refused(name: str, folder: Path) -> None:
    manifest = mixed()

    async def scenario() -> None:
        async with sending(name, manifest, folder) as (sender, slab):
            await offer_version(sender, slab, 0, 0)
            with receiving(name, sender.address, manifest) as receiver:
                out = bucket_of(manifest, receiver.memory(1), 0)
                assert "version 9" in await refused(receiver.fetch(bucket_id(9, 1, 0), out))
                await fetch_version(receiver, manifest, 0, 0)  # and the receiver goes on

    asyncio.run(scenario())


def test_a_receiver_that_is_killed_leaves_the_others_alone(name: str, folder: Path, start) -> None:
    manifest = large(1)

    async def scenario() -> None:
        async with sending(name, manifest, folder) as (sender, slab):
            await offer_version(sender, slab, 0, 0)
            one, other = (start(receive, name, sender.address, manifest, f"r{index}") for index in range(2))
            assert await asyncio.to_thread(one.hear)
            await asyncio.to_thread(one.kill)  # in the middle of one of its next fetches
            for _ in range(3):
                assert await asyncio.to_thread(other.hear)

    asyncio.run(asyncio.wait_for(scenario(), 90))


def test_a_fetch_that_was_cancelled_writes_no_more_and_the_next_one_is_right(name: str, folder: Path) -> None:
    manifest = large(2)

    async def scenario() -> None:
        async with sending(name, manifest, folder) as (sender, slab):
            await offer_version(sender, slab, 0, 0)
            with receiving(name, sender.address, manifest) as receiver:
                first, second = (bucket_of(manifest, receiver.memory(0), index) for index in range(2))
                fetching = asyncio.create_task(receiver.fetch(bucket_id(0, 0, 0), first))
                while not any(first[-1:]) and not any(first[:1]):  # noqa: ASYNC110 the first bytes have no event
                    await asyncio.sleep(0)
                fetching.cancel()
                await asyncio.gather(fetching, return_exceptions=True)
                first[:] = bytes(first.nbytes)
                await receiver.fetch(bucket_id(0, 0, 1), second)
                assert not any(first)
                assert second == bucket_of(manifest, content(manifest, 0), 1)

    asyncio.run(asyncio.wait_for(scenario(), 60))
