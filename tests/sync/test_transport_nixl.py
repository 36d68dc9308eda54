"""Transport ``nixl``: one pull for a host, publishers that end or hang, and what is left behind: nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from transport_support import (
    NIXL,
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

from streamrl.errors import ConfigError, WeightSyncError
from streamrl.sync.staging import bucket_of
from streamrl.sync.transports import nixl_pull

(needs_nixl,) = NIXL.marks


def pulls(receiver: Any) -> list[int]:
    """The buckets that it reads from the publisher from now on."""
    pulled: list[int] = []
    fetch = receiver._pull.fetch

    def noting(owner: Any, bucket: Any, *arguments: Any) -> None:
        pulled.append(bucket.index)
        fetch(owner, bucket, *arguments)

    receiver._pull.fetch = noting
    return pulled


def stop(sender: Child) -> None:
    """Returns when it stands still."""
    sender.stop()
    assert sender.process.pid is not None
    os.waitpid(sender.process.pid, os.WUNTRACED)


@needs_nixl
def test_of_the_receivers_on_one_host_only_the_first_reads_from_the_trainer(folder: Path) -> None:
    manifest = large(3, 1 << 20)

    async def scenario() -> None:
        async with sending("nixl", manifest, folder) as (sender, slab):
            with (
                receiving("nixl", sender.address, manifest, "one") as one,
                receiving("nixl", sender.address, manifest, "other") as other,
            ):
                first, second = pulls(one), pulls(other)
                for version in range(2):
                    await offer_version(sender, slab, version, version)
                    await asyncio.gather(*(fetch_version(each, manifest, version, version) for each in (one, other)))
                    assert other.memory(version) == one.memory(version) == content(manifest, version)
                assert (first, second) == ([0, 1, 2, 0, 1, 2], [])

    asyncio.run(asyncio.wait_for(scenario(), 120))


@needs_nixl
def test_when_the_first_receiver_is_killed_the_others_pull_and_the_next_version_is_shared_again(folder: Path) -> None:
    manifest = large(2, 1 << 20)

    async def scenario() -> None:
        async with sending("nixl", manifest, folder) as (sender, slab):
            await offer_version(sender, slab, 0, 0)
            killed = Child(receive, "nixl", sender.address, manifest, "killed")
            assert await asyncio.to_thread(killed.hear)
            with (
                receiving("nixl", sender.address, manifest, "one") as one,
                receiving("nixl", sender.address, manifest, "other") as other,
            ):
                for each in (one, other):
                    await each.fetch(bucket_id(0, 0, 0), bucket_of(manifest, each.memory(0), 0))
                await asyncio.to_thread(killed.kill)
                for each in (one, other):
                    await each.fetch(bucket_id(0, 0, 1), bucket_of(manifest, each.memory(0), 1))
                    assert each.memory(0) == content(manifest, 0)
                first, second = pulls(one), pulls(other)
                await offer_version(sender, slab, 1, 1)
                await asyncio.gather(*(fetch_version(each, manifest, 1, 1) for each in (one, other)))
                assert other.memory(1) == one.memory(1) == content(manifest, 1)
                assert sorted([first, second]) == [[], [0, 1]]

    asyncio.run(asyncio.wait_for(scenario(), 200))


@needs_nixl
def test_a_retry_is_read_from_the_trainer(folder: Path) -> None:
    manifest = mixed()

    async def scenario() -> None:
        async with sending("nixl", manifest, folder) as (sender, slab):
            await offer_version(sender, slab, 0, 0)
            with (
                receiving("nixl", sender.address, manifest, "one") as one,
                receiving("nixl", sender.address, manifest, "other") as other,
            ):
                await fetch_version(one, manifest, 0, 0)
                pulled = pulls(other)
                await fetch_version(other, manifest, 0, 0, attempt=1)
                assert pulled == list(range(len(manifest.buckets)))
                assert same_bits(fetched(other, manifest, 0), expected(manifest, 0))

    asyncio.run(asyncio.wait_for(scenario(), 120))


@needs_nixl
def test_what_is_not_on_offer_or_no_more_is_refused(folder: Path) -> None:
    manifest = mixed()

    async def scenario() -> None:
        async with sending("nixl", manifest, folder) as (sender, slab):
            await offer_version(sender, slab, 0, 0, buckets=1)
            with receiving("nixl", sender.address, manifest) as receiver:
                first, second = (bucket_of(manifest, receiver.memory(0), index) for index in range(2))
                await receiver.fetch(bucket_id(0, 0, 0), first)
                reason = await refused(receiver.fetch(bucket_id(0, 0, 1), second))
                assert reason == "bucket 1 of version 0 is not on offer"
                sender.withdraw(0)
                assert await refused(receiver.fetch(bucket_id(0, 0, 0), first)) == "version 0 is not on offer"
                reason = await refused(receiver.fetch(bucket_id(0, 0, 0), first[1:]))
                assert reason == f"bucket 0 takes {first.nbytes} bytes; asked for are {first.nbytes - 1}"

    asyncio.run(asyncio.wait_for(scenario(), 120))


@needs_nixl
def test_a_sender_that_is_killed_in_mid_bucket_fails_the_fetch_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")  # one that is stopped gives nothing any more
    manifest = large()
    sender = Child(send, "nixl", manifest, folder)

    async def scenario() -> str:
        with receiving("nixl", await asyncio.to_thread(sender.hear), manifest) as receiver:
            await asyncio.to_thread(sender.tell, "offer", 0, 0)
            first, second = (bucket_of(manifest, receiver.memory(0), index) for index in range(2))
            await receiver.fetch(bucket_id(0, 0, 0), first)
            stop(sender)
            fetching = asyncio.create_task(refused(receiver.fetch(bucket_id(0, 0, 1), second)))
            await asyncio.sleep(0)
            sender.kill()
            return await fetching

    try:
        assert asyncio.run(scenario()).startswith("bucket 1 of version 0: the publisher ")
    finally:
        sender.kill()


@needs_nixl
def test_a_sender_that_hangs_fails_the_fetch_after_the_time_limit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    manifest = mixed()
    sender = Child(send, "nixl", manifest, folder)

    async def scenario() -> str:
        with receiving("nixl", await asyncio.to_thread(sender.hear), manifest) as receiver:
            await asyncio.to_thread(sender.tell, "offer", 0, 0)
            await fetch_version(receiver, manifest, 0, 0)
            stop(sender)
            receiver._trainer = dataclasses.replace(receiver._trainer, timeout_s=0.2)
            return await refused(fetch_version(receiver, manifest, 0, 0))

    try:
        reason = asyncio.run(scenario())
    finally:
        sender.kill()
    assert reason == "bucket 0 of version 0: the publisher's memory gave no answer within 0.2 s"


@needs_nixl
def test_nothing_with_a_name_is_left_behind_by_a_sender_and_a_receiver_that_are_killed(folder: Path) -> None:
    manifest = mixed()
    before = set(os.listdir("/dev/shm"))
    sender = Child(send, "nixl", manifest, folder)
    address = sender.hear()
    sender.tell("offer", 0, 0)
    receiver = Child(receive, "nixl", address, manifest, "rollouter-0")
    assert receiver.hear()
    pids = {receiver.process.pid, sender.process.pid}
    receiver.kill()
    sender.kill()
    assert [name for name in set(os.listdir("/dev/shm")) - before if "ucx" in name or "streamrl" in name] == []
    segments = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    assert pids & {int(line.split()[4]) for line in segments} == set()
    assert [path.name for path in folder.iterdir()] == ["s-chain"], "a socket, which goes with the run's folder"


@needs_nixl
@pytest.mark.parametrize(
    ("host", "devices", "says"),
    [("boot/1/", None, True), ("boot/1/", "net", False), (None, None, False)],
    ids=["loopback", "named", "same host"],
)
def test_of_a_publisher_on_another_host_that_is_not_found_the_refusal_says_what_to_set(
    folder: Path, monkeypatch: pytest.MonkeyPatch, host: str | None, devices: str | None, says: bool
) -> None:
    manifest = mixed()

    async def scenario() -> str:
        async with sending("nixl", manifest, folder) as (sender, _):
            address = sender.address
        monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
        if host is not None:
            monkeypatch.setattr(nixl_pull, "this_host", lambda: host)
        if devices is not None:
            monkeypatch.setenv("UCX_NET_DEVICES", devices)
        with receiving("nixl", address, manifest) as receiver:
            monkeypatch.delenv("UCX_NET_DEVICES", raising=False)  # there is no such interface
            return await refused(receiver.fetch(bucket_id(0, 0, 0), bucket_of(manifest, receiver.memory(0), 0)))

    reason = asyncio.run(scenario())
    assert reason.startswith("bucket 0 of version 0: the publisher ")
    assert ("set UCX_NET_DEVICES, there and here" in reason) == says


@pytest.mark.parametrize("address", ["", "ipc:///somewhere", "AAAA"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with (
        pytest.raises(WeightSyncError, match="no address of a publisher's memory"),
        receiving("nixl", address, mixed()),
    ):
        pass


def test_without_the_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)

    async def scenario() -> None:
        async with sending("nixl", mixed(), folder):
            pass

    with pytest.raises(
        ConfigError, match=r"sync\.transport=nixl needs the nixl package: pip install 'streamrl\[nixl\]'"
    ):
        asyncio.run(scenario())
