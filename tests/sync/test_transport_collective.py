"""Transport ``collective``: one broadcast for all, a group that lasts, and nobody who fails for another's sake."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from transport_support import (
    Child,
    bucket_id,
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

from streamrl.errors import WeightSyncError
from streamrl.sync.staging import bucket_of
from streamrl.sync.transports import collective


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group comes together on a slow machine too, so that nobody pulls for want of time."""
    monkeypatch.setattr(collective, "PATIENCE_S", 60.0)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch, patient: None) -> None:
    """An operation that waits in vain ends after this, in the processes that are not spawned."""
    monkeypatch.setattr(collective, "PATIENCE_S", 3.0)


def without_pulling(receiver: Any) -> Any:
    async def pull(bucket: Any, out: memoryview) -> None:
        raise AssertionError(f"{bucket} was pulled")

    receiver._pull.fetch = pull
    return receiver


async def bring(sender: Any, slab: Any, receivers: list[Any], version: int) -> None:
    await offer_version(sender, slab, version, version % 2)
    await asyncio.gather(*(fetch_version(each, slab.manifest, version, version % 2) for each in receivers))
    for each in receivers:
        assert same_bits(fetched(each, slab.manifest, version % 2), expected(slab.manifest, version))


def test_all_members_get_one_broadcast_and_the_group_lasts_until_others_take_part(folder: Path) -> None:
    manifest = mixed()

    async def scenario() -> None:
        async with sending("collective", manifest, folder) as (sender, slab):
            with ExitStack() as stack:
                members = []
                for name, generation in (("a", 1), ("b", 2), ("c", 3)):
                    receiver = stack.enter_context(receiving("collective", sender.address, manifest, name))
                    members.append(without_pulling(receiver))
                    sender.set_members({"a", "b", "c"})  # who has not registered is not waited for
                    for version in (2 * generation, 2 * generation + 1):
                        await bring(sender, slab, members, version)
                        assert {each._group.plan.generation for each in [sender, *members]} == {generation}
                sender.set_members({"a", "c"})
                await bring(sender, slab, [members[0], members[2]], 8)
                assert sender._group.plan.generation == 4

    asyncio.run(asyncio.wait_for(scenario(), 90))


def test_a_process_that_came_back_under_its_name_is_another_member(folder: Path) -> None:
    manifest = mixed()

    async def scenario() -> None:
        async with sending("collective", manifest, folder) as (sender, slab):
            sender.set_members({"a"})
            for version, generation in ((0, 1), (1, 2)):
                with receiving("collective", sender.address, manifest, "a") as receiver:
                    await bring(sender, slab, [without_pulling(receiver)], version)
                    assert sender._group.plan.generation == generation

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.usefixtures("impatient")
def test_when_a_member_leaves_in_mid_version_the_others_pull_the_rest_and_the_next_version_is_broadcast(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = mixed()

    async def scenario() -> None:
        async with sending("collective", manifest, folder) as (sender, slab):
            with receiving("collective", sender.address, manifest, "a") as stays:
                leaves = receiving("collective", sender.address, manifest, "b")
                gone = leaves.__enter__()
                sender.set_members({"a", "b"})
                await bring(sender, slab, [stays, gone], 0)
                await offer_version(sender, slab, 1, 1)
                outs = [bucket_of(manifest, each.memory(1), 0) for each in (stays, gone)]
                await asyncio.gather(
                    *(each.fetch(bucket_id(1, 1, 0), out) for each, out in zip((stays, gone), outs, strict=True))
                )
                await asyncio.to_thread(leaves.__exit__, None, None, None)
                for index in range(1, len(manifest.buckets)):
                    await stays.fetch(bucket_id(1, 1, index), bucket_of(manifest, stays.memory(1), index))
                assert same_bits(fetched(stays, manifest, 1), expected(manifest, 1))
                monkeypatch.setattr(collective, "PATIENCE_S", 60.0)
                sender.set_members({"a"})
                await bring(sender, slab, [without_pulling(stays)], 2)

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.usefixtures("impatient")
def test_closing_waits_for_no_broadcast_and_the_thread_ends_with_it(folder: Path) -> None:
    manifest = mixed()

    async def scenario() -> None:
        async with sending("collective", manifest, folder) as (sender, slab):
            with receiving("collective", sender.address, manifest, "a"):  # which never joins
                sender.set_members({"a"})
                await sender.begin(bucket_id(0, 0, -1))
                broadcast = sender._group.broadcast(slab.bucket(0, 0), lambda: True)
                (thread,) = sender._group._worker._threads
                sender.close()
                assert not broadcast.done()
                assert await asyncio.to_thread(broadcast.result, 60) is False
                await asyncio.to_thread(thread.join, 60)
                assert not thread.is_alive()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_who_is_in_a_broadcast_pulls_as_soon_as_the_sender_regroups(folder: Path) -> None:
    manifest = mixed()

    async def scenario() -> None:
        async with sending("collective", manifest, folder) as (sender, slab):
            with receiving("collective", sender.address, manifest, "a") as receiver:
                sender.set_members({"a"})
                await bring(sender, slab, [receiver], 0)
                group = receiver._group
                await sender.begin(bucket_id(1, 1, -1))
                waiting = group.broadcast(bucket_of(manifest, receiver.memory(1), 0), lambda: True)
                sender._group.close()  # the patience of both is a minute
                assert await asyncio.wait_for(asyncio.wrap_future(waiting), 30) is False

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.usefixtures("impatient")
def test_a_fetch_that_is_cancelled_in_mid_broadcast_lets_the_others_pull(folder: Path) -> None:
    manifest = mixed()

    async def scenario() -> None:
        async with sending("collective", manifest, folder) as (sender, slab):
            with (
                receiving("collective", sender.address, manifest, "a") as stays,
                receiving("collective", sender.address, manifest, "b") as gives_up,
            ):
                sender.set_members({"a", "b"})
                await bring(sender, slab, [stays, gives_up], 0)
                await sender.begin(bucket_id(1, 1, -1))  # nothing is offered yet: the broadcast waits for the sender
                out = bucket_of(manifest, gives_up.memory(1), 0)
                fetching = asyncio.create_task(gives_up.fetch(bucket_id(1, 1, 0), out))
                while gives_up._planned != (bucket_id(1, 1, 0).session, 1):  # noqa: ASYNC110 no event for it
                    await asyncio.sleep(0)
                fetching.cancel()
                await asyncio.gather(fetching, return_exceptions=True)
                assert fetching.cancelled()
                await bring(sender, slab, [stays], 1)

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.usefixtures("impatient")
def test_a_member_that_is_killed_in_mid_transfer_leaves_the_others_alone(folder: Path) -> None:
    manifest = large(1)

    async def scenario() -> None:
        async with sending("collective", manifest, folder) as (sender, slab):
            sender.set_members({"a", "b"})
            with receiving("collective", sender.address, manifest, "a") as stays:
                other = Child(receive, "collective", sender.address, manifest, "b")
                try:
                    while not sender._store.check(["receiver/b"]):  # noqa: ASYNC110 a file has no event
                        await asyncio.sleep(0.01)
                    await offer_version(sender, slab, 0, 0)  # b joins, and then waits for a's first bucket
                    fetching = asyncio.create_task(fetch_version(stays, manifest, 0, 0))
                    await asyncio.to_thread(other.kill)
                    await fetching
                finally:
                    other.kill()
                assert same_bits(fetched(stays, manifest, 0), expected(manifest, 0))

    asyncio.run(asyncio.wait_for(scenario(), 90))


@pytest.mark.usefixtures("impatient")
def test_a_sender_that_is_killed_in_mid_bucket_fails_the_fetch(folder: Path) -> None:
    manifest = large()
    sender = Child(send, "collective", manifest, folder)

    async def scenario() -> str:
        with receiving("collective", sender.hear(), manifest, "a") as receiver:
            await asyncio.to_thread(sender.tell, "members", "a")
            await asyncio.to_thread(sender.tell, "offer", 0, 0)
            first, second = (bucket_of(manifest, receiver.memory(0), index) for index in range(2))
            await receiver.fetch(bucket_id(0, 0, 0), first)
            sender.stop()
            fetching = asyncio.create_task(refused(receiver.fetch(bucket_id(0, 0, 1), second)))
            await asyncio.to_thread(sender.kill)
            return await fetching

    assert asyncio.run(scenario()) == "bucket 1 of version 0: the publisher went away"


def test_a_receiver_on_another_host_is_told_so(folder: Path) -> None:
    async def scenario() -> None:
        async with sending("collective", mixed(), folder) as (sender, _):
            address = sender.address.replace("-group-", "-elsewhere-")
            with (
                pytest.raises(WeightSyncError, match="is missing: the publisher is gone, or on another host"),
                receiving("collective", address, mixed()),
            ):
                pass

    asyncio.run(scenario())
