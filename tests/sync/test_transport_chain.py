"""Hosts that pass versions on to each other: the whole weight plane over ``nixl``, with several hosts on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import pytest
from chain_support import Reads, note_reads, on_hosts
from sync_support import Ring, equal, ring, small_model, weights
from transport_support import NIXL, bucket_id

from streamrl.errors import StreamRLError
from streamrl.sync.transports import nixl_memory, nixl_pull
from streamrl.sync.transports.nixl_memory import Pull

(pytestmark,) = NIXL.marks

MEMBERS = {"a", "b", "c"}
TIMEOUT_S = 60.0
ALL = list(range(4))
"""Buckets of the small model."""


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Each member on a host of its own."""
    on_hosts(monkeypatch, {member: member for member in MEMBERS})
    return note_reads(monkeypatch)


def join(it: Ring, *members: str) -> None:
    for member in members:
        it.join(member, timeout_s=TIMEOUT_S)
    it.publisher.set_members(set(it.subscribers), set())


async def publish(it: Ring, version: int, seed: int) -> None:
    it.write(version, small_model(seed))
    assert (await it.publisher.publish(version)).rollouters == len(it.subscribers)
    for member in it.subscribers:
        assert equal(it.engines[member].weights, weights(small_model(seed))), member


def order(it: Ring, version: int) -> list[str]:
    """Of the hosts in the chain of a version."""
    hub: Any = it.publisher._slab.sender
    return list(hub._chain._chains[version]._readers)


def receiver(it: Ring, member: str) -> Any:
    return it.subscribers[member]._link._receiver


class Gate:
    """Holds up the host at one place of the chain of a version, on its worker thread, from one bucket on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, it: Ring, version: int, place: int, index: int) -> None:
        self.held: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """The member, as soon as it is held up."""
        self._loop = asyncio.get_running_loop()
        self._open = threading.Event()
        self._member = ""
        fetch = Pull.fetch

        def gated(pull: Any, owner: Any, bucket: Any, *arguments: Any) -> None:
            member = pull.name.partition("#")[0]
            wanted = (bucket.version, bucket.index, bucket.attempt) == (version, index, 0)
            if wanted and not self._member and order(it, version).index(member) == place:
                self._member = member
                self._loop.call_soon_threadsafe(self.held.set_result, member)
                assert self._open.wait(60)
            fetch(pull, owner, bucket, *arguments)

        monkeypatch.setattr(Pull, "fetch", gated)

    def open(self) -> None:
        self._open.set()


async def told(it: Ring, member: str, version: int, count: int) -> None:
    """Until the trainer knows that the member has so many buckets."""
    hub: Any = it.publisher._slab.sender
    reader = hub._chain._chains[version]._readers[member]
    while reader.count < count:  # noqa: ASYNC110 the state has no event
        await asyncio.sleep(0)


async def staged(it: Ring, member: str, version: int) -> None:
    events: Any = it.subscribers[member]._on_event
    await events.wait("version_staged", version=version)


async def held_behind(it: Ring, reads: Reads, monkeypatch: pytest.MonkeyPatch, index: int) -> Any:
    """Of hosts a and b: (version 1 being published, the first, the second, which is held up before a bucket, gate).

    The first has all of it, verified.
    """
    join(it, "a", "b")
    await publish(it, 0, 1)
    reads.clear()
    gate = Gate(monkeypatch, it, version=1, place=1, index=index)
    it.write(1, small_model(2))
    publishing = asyncio.create_task(it.publisher.publish(1))
    second = await gate.held
    (first,) = {"a", "b"} - {second}
    await staged(it, first, 1)
    return publishing, first, second, gate


def test_each_version_is_read_once_from_the_trainer_and_passed_on_bit_for_bit(reads: Reads) -> None:
    async def scenario() -> None:
        async with ring(transport="nixl", timeout_s=TIMEOUT_S) as it:
            join(it, *MEMBERS)
            for version, seed in enumerate((1, 2, 1, 2)):
                reads.clear()
                await publish(it, version, seed)
                first, *others = order(it, version)
                assert reads == {(first, "trainer"): ALL} | {(other, "host"): ALL for other in others}

    asyncio.run(scenario())


def test_a_process_that_may_stay_connected_to_one_only_reads_from_others_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nixl_memory, "MOST_OWNERS", 1)
    on_hosts(monkeypatch, {"a": "elsewhere"})

    async def scenario() -> None:
        async with ring(transport="nixl", timeout_s=TIMEOUT_S) as it:
            join(it, "a")
            await publish(it, 0, 1)
            pull = receiver(it, "a")._pull
            before = pull._agent
            with contextlib.closing(nixl_memory.OpenMemory("another", receiver(it, "a")._staging)) as another:
                another.lacks(1, 7, 0)
                another.has(1, 0)
                out = receiver(it, "a").memory(0)[:1024]
                pull.fetch(nixl_memory.Owner(another.place, "another", 10), bucket_id(7, 1, 0), out, threading.Event())
                assert pull._connected == {"another"}
                assert pull._agent is not before
            await publish(it, 1, 2)

    asyncio.run(scenario())


def test_a_host_that_cannot_open_its_memory_reads_from_the_trainer_and_the_others_pass_on(
    reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = nixl_pull.OpenMemory

    def failing(name: str, slots: Any) -> Any:
        if name.startswith("b#"):
            raise StreamRLError("too much memory is locked")
        return make(name, slots)

    monkeypatch.setattr(nixl_pull, "OpenMemory", failing)

    async def scenario() -> None:
        async with ring(transport="nixl", timeout_s=TIMEOUT_S) as it:
            join(it, *MEMBERS)
            for version in range(2):
                reads.clear()
                await publish(it, version, version)
                first, second = order(it, version)
                assert reads == {("b", "trainer"): ALL, (first, "trainer"): ALL, (second, "host"): ALL}

    asyncio.run(scenario())


def test_memory_for_versions_is_taken_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    reserve = nixl_pull.NixlReceiver.reserve

    def noting(self: Any) -> None:
        threads.append(threading.current_thread())
        reserve(self)

    monkeypatch.setattr(nixl_pull.NixlReceiver, "reserve", noting)

    async def scenario() -> None:
        async with ring(transport="nixl", timeout_s=TIMEOUT_S) as it:
            join(it, "a")
            await publish(it, 0, 1)
            assert len(threads) == 1
            assert threading.current_thread() not in threads

    asyncio.run(scenario())


def test_of_two_receivers_on_a_host_one_takes_part_and_the_other_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_hosts(monkeypatch, {"a": "one", "b": "one", "c": "other", "d": "other"})
    reads = note_reads(monkeypatch)

    async def scenario() -> None:
        async with ring(transport="nixl", timeout_s=TIMEOUT_S) as it:
            join(it, "a", "b", "c", "d")
            await publish(it, 0, 1)
            assert len(order(it, 0)) == 2
            assert sorted(owner for _, owner in reads) == ["host", "trainer"]

    asyncio.run(scenario())


def test_who_shares_the_host_of_the_trainer_stays_out_of_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    on_hosts(monkeypatch, {"b": "elsewhere"})
    reads = note_reads(monkeypatch)

    async def scenario() -> None:
        async with ring(transport="nixl", timeout_s=TIMEOUT_S) as it:
            join(it, "a", "b")
            await publish(it, 0, 1)
            assert order(it, 0) == ["b"]
            assert receiver(it, "a")._open is None, "nobody reads in its memory"
            assert reads == {("a", "trainer"): ALL, ("b", "trainer"): ALL}

    asyncio.run(scenario())


def test_a_late_joiner_reads_from_the_trainer_and_takes_part_from_the_next_version_on(reads: Reads) -> None:
    async def scenario() -> None:
        async with ring(transport="nixl", timeout_s=TIMEOUT_S) as it:
            join(it, "a", "b")
            await publish(it, 0, 1)
            join(it, "c")
            async with asyncio.timeout(20):
                await it.subscribers["c"].wait_version(0)
            assert reads["c", "trainer"] == ALL
            assert "c" not in order(it, 0)
            await publish(it, 1, 2)
            assert set(order(it, 1)) == MEMBERS

    asyncio.run(scenario())


def test_when_a_host_leaves_in_mid_version_the_others_complete_it_and_the_next_chain_is_without_it(
    reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with ring(transport="nixl", timeout_s=TIMEOUT_S) as it:
            join(it, *MEMBERS)
            await publish(it, 0, 1)
            reads.clear()
            gate = Gate(monkeypatch, it, version=1, place=1, index=2)
            it.write(1, small_model(2))
            publishing = asyncio.create_task(it.publisher.publish(1))
            leaver = await gate.held
            first, _, last = order(it, 1)
            await told(it, last, 1, 2)
            it.publisher.set_members(MEMBERS - {leaver}, set())
            assert (await publishing).rollouters == 2
            for member in (first, last):
                assert equal(it.engines[member].weights, weights(small_model(2)))
            assert (reads[last, "host"], reads[last, "trainer"]) == ([0, 1], [2, 3])
            gate.open()
            await it.leave(leaver)
            del it.subscribers[leaver]
            reads.clear()
            await publish(it, 2, 3)
            first, second = order(it, 2)
            assert reads == {(first, "trainer"): ALL, (second, "host"): ALL}

    asyncio.run(scenario())


def test_behind_a_host_that_stands_still_the_others_complete_the_version(
    reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with ring(transport="nixl", timeout_s=TIMEOUT_S) as it:
            hub: Any = it.publisher._slab.sender
            join(it, *MEMBERS)
            await publish(it, 0, 1)
            reads.clear()
            gate = Gate(monkeypatch, it, version=1, place=1, index=2)
            it.write(1, small_model(2))
            publishing = asyncio.create_task(it.publisher.publish(1))
            slow = await gate.held
            first, _, last = order(it, 1)
            await told(it, first, 1, 4)
            await told(it, last, 1, 2)
            later = asyncio.get_running_loop().time() + TIMEOUT_S
            hub._chain._now = lambda: later
            hub._chain._expire()
            await staged(it, last, 1)
            assert (reads[last, "host"], reads[last, "trainer"]) == ([0, 1], [2, 3])
            assert not publishing.done()
            gate.open()
            assert (await publishing).rollouters == 3
            assert reads[slow, "host"] == ALL
            for member in MEMBERS:
                assert equal(it.engines[member].weights, weights(small_model(2)))

    asyncio.run(scenario())


def test_what_was_damaged_in_the_memory_of_another_host_is_refused_and_read_from_the_trainer(
    reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with ring(transport="nixl", timeout_s=TIMEOUT_S) as it:
            publishing, first, second, gate = await held_behind(it, reads, monkeypatch, index=1)
            content = it.publisher._slab.content(1)
            assert content is not None
            memory = receiver(it, first).memory(content.slot)
            damaged = it.publisher._slab.manifest.buckets[1].offset + 5
            memory[damaged] ^= 1
            gate.open()
            refusal = await it.events.wait("version_refused", member=second)
            memory[damaged] ^= 1
            assert (await publishing).rollouters == 2
            assert "bucket 1 of" in refusal["reason"]
            assert "is corrupted" in refusal["reason"]
            assert reads[second, "host"][:2] == [0, 1]
            assert reads[second, "trainer"] == ALL
            for member in ("a", "b"):
                assert equal(it.engines[member].weights, weights(small_model(2)))

    asyncio.run(scenario())


def test_a_host_that_cannot_be_read_is_read_no_more_for_that_version(
    reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says that it has the bucket, and its memory holds another version."""

    async def scenario() -> None:
        async with ring(transport="nixl", timeout_s=TIMEOUT_S) as it:
            publishing, first, second, gate = await held_behind(it, reads, monkeypatch, index=2)
            receiver(it, first)._open.withdraw(1)
            gate.open()
            assert (await publishing).rollouters == 2
            assert (reads[second, "host"], reads[second, "trainer"]) == ([0, 1, 2], [2, 3])
            assert it.events.named("version_refused") == []
            reads.clear()
            await publish(it, 2, 3)
            assert {owner for _, owner in reads} == {"trainer", "host"}

    asyncio.run(scenario())
