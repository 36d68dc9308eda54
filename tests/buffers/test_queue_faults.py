"""Bad input and faults at the queue: each is counted, named in an event, answered, and the ledger's sums stay true."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from buffer_support import (
    Ring,
    balance,
    group,
    over_sockets,
    raw_client,
    replay_buffer,
    round_trip,
    start,
    trained_in,
    trajectory,
    with_column,
)

from streamrl.buffers.journal.writer import JournalError
from streamrl.buffers.lease import Refund
from streamrl.buffers.links.link_zmq import ClientLink
from streamrl.buffers.wire import codec
from streamrl.buffers.wire.codec import Frame
from streamrl.buffers.wire.groups import pack_group
from streamrl.buffers.wire.messages import (
    SCHEMA,
    GroupMeta,
    Header,
    LeaseRequest,
    PutRequest,
    Refusal,
    ReserveRequest,
    Status,
)
from streamrl.clock import ManualClock
from streamrl.errors import StreamRLError
from streamrl.types import Group, Lease

# Messages that break the schema ---------------------------------------------------------------------------------------

LEASE = Lease(0, 0, 2, 0, 120.0, 1344)
"""The first lease of every conversation."""


def message(change: Callable[[GroupMeta], object] = lambda meta: None) -> list[Frame]:
    """A put of the first lease, its description changed."""
    meta, payload = pack_group(group(LEASE))
    change(meta)
    return codec.encode(PutRequest(meta), 7, 0.0, payload.frames, checksum=True)


def set_column(meta: GroupMeta, index: int, **fields: Any) -> None:
    meta.columns[index] = msgspec.structs.replace(meta.columns[index], **fields)


def of_schema(version: int) -> list[Frame]:
    header = msgspec.msgpack.encode(Header(version, 7, 0.0, LeaseRequest(1)))
    return [header]


def truncated(frames: Sequence[Frame], index: int) -> list[Frame]:
    return [*frames[:index], bytes(frames[index])[:-1], *frames[index + 1 :]]


def flipped(frames: Sequence[Frame]) -> list[Frame]:
    changed = bytearray(frames[1])
    changed[3] ^= 1
    return [frames[0], bytes(changed)]


MALFORMED: dict[str, tuple[Callable[[], list[Frame]], int, str]] = {
    "garbage": (lambda: [b"\xff\x00garbage"], -1, "header"),
    "an empty frame": (lambda: [b""], -1, "header"),
    "another schema version": (lambda: of_schema(SCHEMA + 1), 7, f"expected schema {SCHEMA}, got {SCHEMA + 1}"),
    "an answer": (lambda: codec.encode(Status("x"), 7, 0.0), 7, "expected a request, got Status"),
    "a number out of range": (lambda: [msgspec.msgpack.encode(Header(SCHEMA, 7, 0.0, LeaseRequest(0)))], 7, "count"),
    "a truncated header": (lambda: truncated(message(), 0), -1, "header: Input data was truncated"),
    "a truncated payload": (lambda: truncated(message(), 1), 7, "payload frame 0: expected"),
    "a missing payload": (lambda: message()[:1], 7, "expected 1 payload frames as its header says, got 0"),
    "changed bytes": (lambda: flipped(message()), 7, "expected the checksum of its header"),
    "tokens of another dtype": (
        lambda: message(lambda meta: set_column(meta, 0, dtype="float32")),
        7,
        "column tokens: expected int32, got float32",
    ),
    "a dtype that nobody knows": (lambda: message(lambda meta: set_column(meta, 0, dtype="object")), 7, "dtype"),
    "shapes over the payload": (
        lambda: message(lambda meta: set_column(meta, 0, shapes=[[5], [1 << 40]])),
        7,
        "expected",
    ),
    "no column of log-probs": (lambda: message(lambda meta: set_column(meta, 2, name="other")), 7, "got no behaviour"),
    "another size": (lambda: message(lambda meta: setattr(meta, "nbytes", 1)), 7, "payload of 1 bytes"),
    "spans of other tokens": (
        lambda: message(lambda meta: setattr(meta.trajectories[0], "spans", [(0, 3)])),
        7,
        "trajectory 0: expected spans of 2 tokens",
    ),
    "a reward that is not a number": (
        lambda: message(lambda meta: setattr(meta.trajectories[0], "reward", float("nan"))),
        7,
        "finite reward",
    ),
    "another prompt": (lambda: message(lambda meta: setattr(meta, "prompt", 9)), 7, "expected prompt 0, got 9"),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_message_is_counted_named_and_answered_and_service_goes_on(what: str) -> None:
    make, request, expected = MALFORMED[what]

    async def conversation(ring: Ring) -> None:
        producer = ring.producer("rollouter-0")
        (lease,) = await producer.lease(1)
        assert lease.id == LEASE.id
        bad = raw_client(ring, "rollouter-6")
        try:
            await bad.send_multipart(make())
            header, _ = codec.decode(await bad.recv_multipart())
        finally:
            bad.close()
        assert header.request == request
        assert isinstance(header.body, Refusal)
        assert header.body.malformed
        assert expected in header.body.error
        assert ring.server.statistics()["queue/malformed"] == 1
        event = await ring.event("malformed_frame")
        assert (event["sender"], event["error"]) == ("rollouter-6", header.body.error)
        assert "\n" not in event["error"]
        assert ring.buffer.ledger.is_in_flight(lease.id)
        assert balance(ring.buffer.ledger) == 0
        assert await producer.put(group(lease)) == "accepted"

    over_sockets(conversation)


def test_a_frame_over_the_limit_is_counted_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def conversation(ring: Ring) -> None:
        monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 1000)
        bad = raw_client(ring, "rollouter-6")
        try:
            await bad.send_multipart([codec.encode(LeaseRequest(1), 7, 0.0)[0], bytes(1001)])
            header, _ = codec.decode(await bad.recv_multipart())
        finally:
            bad.close()
        assert isinstance(header.body, Refusal)
        assert "largest frame: expected at most 1000 bytes, got 1001" in header.body.error
        assert (await ring.event("malformed_frame"))["error"] == header.body.error
        assert ring.server.malformed == 1
        assert len(await ring.producer("rollouter-0").lease(1)) == 1

    over_sockets(conversation)


def test_a_frame_that_the_transport_does_not_take_ends_its_connection_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 10_000)

    async def conversation(ring: Ring) -> None:
        bad = raw_client(ring, "rollouter-6")
        monitor = bad.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            await bad.send_multipart([bytes(100_000)])
            await monitor.recv_multipart()
        finally:
            bad.disable_monitor()
            monitor.close()
            bad.close()
        assert len(await ring.producer("rollouter-0").lease(1)) == 1
        assert ring.server.statistics()["queue/messages"] == 1

    over_sockets(conversation)


def test_one_malformed_message_of_a_bundle_harms_no_other() -> None:
    async def conversation(ring: Ring) -> None:
        bundle = [*codec.encode(LeaseRequest(1), 1, 0.0), *flipped(message()), *codec.encode(LeaseRequest(1), 3, 0.0)]
        client = raw_client(ring, "rollouter-6")
        try:
            await client.send_multipart(bundle)
            answers: dict[int, str] = {}
            while len(answers) < 3:
                for frames in codec.split(await client.recv_multipart()):
                    header, _ = codec.decode(frames)
                    answers[header.request] = type(header.body).__name__
        finally:
            client.close()
        assert answers == {1: "Leases", 7: "Refusal", 3: "Leases"}
        assert ring.server.malformed == 1

    over_sockets(conversation)


# Puts at the wrong moment ---------------------------------------------------------------------------------------------


async def refused(ring: Ring, lease: Lease, status: str) -> None:
    """The event and the counter of one refused put."""
    assert ring.named("group_refused") == [
        {"sender": "rollouter-0", "lease": lease.id, "prompt": lease.prompt, "status": status}
    ]
    assert ring.server.statistics()["queue/refused"] == 1
    assert balance(ring.buffer.ledger) == 0


def test_a_double_put_is_acknowledged_dropped_and_named() -> None:
    async def conversation(ring: Ring) -> None:
        producer = ring.producer("rollouter-0")
        lease = (await producer.lease(1))[0]
        assert [await producer.put(group(lease)) for _ in range(2)] == ["accepted", "duplicate"]
        await refused(ring, lease, "duplicate")
        assert ring.buffer.statistics()["buffer/ready_groups"] == 1

    over_sockets(conversation)


def test_a_put_of_an_unknown_lease_is_acknowledged_dropped_and_named() -> None:
    async def conversation(ring: Ring) -> None:
        unknown = Lease(77, 5, 2, 0, 120.0)
        assert await ring.producer("rollouter-0").put(group(unknown)) == "unknown"
        await refused(ring, unknown, "unknown")
        assert ring.buffer.room.held == 0

    over_sockets(conversation)


def test_a_late_put_after_expiry_is_acknowledged_dropped_and_named() -> None:
    clock = ManualClock()

    async def conversation(ring: Ring) -> None:
        producer = ring.producer("rollouter-0")
        lease = (await producer.lease(1))[0]
        clock.advance(10.0)
        assert (await ring.event("lease_expired"))["lease"] == lease.id
        assert await producer.put(group(lease)) == "late"
        await refused(ring, lease, "late")
        assert ring.buffer.ledger.refunded == 1
        assert (await producer.lease(1))[0].prompt == lease.prompt

    over_sockets(conversation, clock=clock, buffer__lease_timeout_s=10.0)


def test_a_stale_put_is_acknowledged_evicted_and_named() -> None:
    async def conversation(ring: Ring) -> None:
        producer = ring.producer("rollouter-0")
        await ring.consumer().published(3)
        lease = (await producer.lease(1))[0]
        assert await producer.put(group(lease, version=2)) == "stale"
        await refused(ring, lease, "stale")
        again = (await producer.lease(1))[0]
        assert (again.prompt, again.attempt) == (lease.prompt, 1)

    over_sockets(conversation, on_stale="wait")


def test_a_failure_that_is_told_twice_counts_once() -> None:
    async def conversation(ring: Ring) -> None:
        producer = ring.producer("rollouter-0")
        lease = (await producer.lease(1))[0]
        assert [await producer.fail(lease.id, "no answer", "") for _ in range(2)] == ["failed", "late"]
        assert ring.buffer.ledger.refunded == 1
        assert ring.fatal == []

    over_sockets(conversation, env__max_failures=2)


# Clients that go away -------------------------------------------------------------------------------------------------


def test_a_producer_killed_between_the_header_and_the_payload_delivered_nothing() -> None:
    async def conversation(ring: Ring) -> None:
        producer = ring.producer("rollouter-0")
        (lease,) = await producer.lease(1)
        half = zmq.Context.instance().socket(zmq.DEALER)
        half.connect(ring.endpoint)
        half.send(message()[0], zmq.SNDMORE)
        half.close(linger=0)
        await round_trip(ring)
        assert ring.server.statistics()["queue/messages"] == 2
        assert ring.server.malformed == 0
        assert ring.buffer.ledger.is_in_flight(lease.id)
        assert ring.server.holder_lost("rollouter-0") == 1
        assert (await ring.event("lease_lost"))["lease"] == lease.id

    over_sockets(conversation)


def test_a_producer_gone_between_two_groups_loses_the_second_alone() -> None:
    async def conversation(ring: Ring) -> None:
        dying = ring.producer("rollouter-0")
        first, second = await dying.lease(2)
        assert await dying.put(group(first)) == "accepted"
        dying.close()
        assert ring.server.holder_lost("rollouter-0") == 1
        assert [event["lease"] for event in ring.named("lease_lost")] == [second.id]
        again = (await ring.producer("rollouter-1").lease(1))[0]
        assert (again.prompt, again.attempt) == (second.prompt, 1)
        assert trained_in(await ring.consumer().next_batch(0, 0)) == [first.id]

    over_sockets(conversation, per_step=1)


def test_a_consumer_that_never_acknowledges_loses_its_batch_to_the_next_that_asks() -> None:
    clock = ManualClock()

    async def conversation(ring: Ring) -> None:
        producer, silent = ring.producer("rollouter-0"), ring.consumer()
        lease = (await producer.lease(1))[0]
        await producer.put(group(lease))
        assert trained_in(await silent.next_batch(0, 0)) == [lease.id]
        clock.advance(29.9)
        await round_trip(ring)
        assert ring.buffer.offer is not None
        clock.advance(0.1)
        assert await ring.event("batch_reoffered") == {"step": 0, "version": 0, "offer": 1, "groups": 1}
        with pytest.raises(StreamRLError, match="step 0 was acknowledged but is not handed out"):
            await silent.acknowledge(0, 0)
        other = ring.consumer()
        assert trained_in(await other.next_batch(0, 0)) == [lease.id]
        with pytest.raises(StreamRLError, match="for offer 1, .* offered again as 2: buffer.acknowledge_timeout_s"):
            await silent.acknowledge(0, 0)
        assert (ring.buffer.ledger.consumed, ring.buffer.ledger.ready) == (0, 1)
        assert ring.server.statistics()["queue/refused"] == 2
        await other.acknowledge(0, 0)
        assert ring.buffer.summary()["duplicates_trained"] == 0
        clock.advance(60.0)
        await round_trip(ring)
        assert len(ring.named("batch_reoffered")) == 1

    over_sockets(
        conversation, clock=clock, per_step=1, buffer__acknowledge_timeout_s=30.0, buffer__lease_timeout_s=999.0
    )


def test_the_deadline_of_a_batch_starts_anew_when_the_server_does() -> None:
    clock = ManualClock()

    async def conversation(ring: Ring) -> None:
        producer = ring.producer("rollouter-0")
        await producer.put(group((await producer.lease(1))[0]))
        await ring.consumer().next_batch(0, 0)
        clock.advance(29.0)
        await ring.restart()
        clock.advance(29.0)
        await round_trip(ring)
        assert ring.buffer.offer is not None
        clock.advance(1.0)
        assert (await ring.event("batch_reoffered"))["groups"] == 1

    over_sockets(
        conversation,
        clock=clock,
        journaled=True,
        per_step=1,
        buffer__acknowledge_timeout_s=30.0,
        buffer__lease_timeout_s=999.0,
    )


# A disk that fails ----------------------------------------------------------------------------------------------------

FULL = "/run/journal/0000000001.journal: cannot write a record of 128 bytes: No space left on device (errno 28)"


def fill_disk(ring: Ring) -> None:
    def append(body: bytes, payload: Sequence[Frame] = ()) -> None:
        raise JournalError(FULL)

    assert ring.journal is not None
    ring.journal.append = append  # type: ignore[method-assign, assignment]


def test_a_full_disk_ends_the_run_with_one_line_and_acknowledges_nothing() -> None:
    async def conversation(ring: Ring) -> None:
        producer = ring.producer("rollouter-0")
        (lease,) = await producer.lease(1)
        fill_disk(ring)
        put = start(producer.put(group(lease)))
        assert await ring.event("journal_failed") == {"sender": "rollouter-0", "error": FULL}
        assert ring.fatal == [FULL]
        assert await producer.fail(99, "", "") == "late"  # what changes nothing is answered still
        assert not put.done()
        assert ring.buffer.ledger.is_in_flight(lease.id)
        assert balance(ring.buffer.ledger) == 0
        await ring.restart()  # with room on the disk
        assert await put == "accepted"
        assert ring.buffer.ledger.ready == 1

    over_sockets(conversation, journaled=True)


def test_a_full_disk_is_told_once_whatever_needs_the_journal() -> None:
    clock = ManualClock()

    async def conversation(ring: Ring) -> None:
        producer, consumer = ring.producer("rollouter-0"), ring.consumer()
        (lease, flying) = await producer.lease(2)
        await producer.put(group(lease))
        await consumer.next_batch(0, 0)
        fill_disk(ring)
        failures = 0

        async def failed() -> None:
            nonlocal failures
            failures += 1
            while len(ring.named("journal_failed")) < failures:
                await round_trip_of_no_change(ring)

        assert ring.server.holder_lost("rollouter-0") == 0
        await failed()
        assert ring.server.consumer_lost() == 0
        await failed()
        waiting = [
            start(consumer.acknowledge(0, 0)),
            start(consumer.published(1)),
            start(producer.fail(flying.id, "", "")),
        ]
        for _ in waiting:
            await failed()
        clock.advance(1e6)
        await round_trip_of_no_change(ring)
        assert ring.fatal == [FULL]
        assert not any(each.done() for each in waiting)
        assert (ring.buffer.ledger.in_flight, ring.buffer.ledger.ready) == (1, 1)
        assert ring.task is not None
        assert not ring.task.done()
        for each in waiting:
            each.cancel()

    over_sockets(conversation, clock=clock, journaled=True, per_step=1)


async def round_trip_of_no_change(ring: Ring) -> None:
    await ring.probe.fetch([], [])


def test_deadlines_that_pass_on_a_full_disk_end_the_run_with_one_line() -> None:
    clock = ManualClock()

    async def conversation(ring: Ring) -> None:
        await ring.producer("rollouter-0").lease(2)
        fill_disk(ring)
        clock.advance(1e6)
        assert (await ring.event("journal_failed"))["error"] == FULL
        for _ in range(3):
            await round_trip_of_no_change(ring)
        assert (len(ring.named("journal_failed")), ring.fatal) == (1, [FULL])
        assert ring.buffer.ledger.in_flight == 2

    over_sockets(conversation, clock=clock, journaled=True)


def test_a_disk_that_cannot_be_synced_ends_the_run_with_one_line_and_acknowledges_nothing() -> None:
    async def conversation(ring: Ring) -> None:
        async def durable(position: object) -> None:
            raise JournalError("fsync failed")

        producer = ring.producer("rollouter-0")
        (lease,) = await producer.lease(1)
        assert ring.journal is not None
        ring.journal.durable = durable  # type: ignore[method-assign, assignment]
        put = start(producer.put(group(lease)))
        assert (await ring.event("journal_failed"))["error"] == "fsync failed"
        assert ring.fatal == ["fsync failed"]
        await round_trip_of_no_change(ring)
        assert not put.done()
        assert balance(ring.buffer.ledger) == 0
        put.cancel()

    over_sockets(conversation, journaled=True, buffer__fsync="always")


def test_groups_that_the_buffer_could_never_hold_end_the_run_with_the_way_out() -> None:
    async def conversation(ring: Ring) -> None:
        producer = ring.producer("rollouter-0")
        (lease,) = await producer.lease(1)
        large = Group(lease.id, lease.prompt, "sums", [trajectory([(0, 2)], columns={"image": np.zeros(1 << 20)})])
        put = start(producer.put(large))
        while not ring.fatal:
            await round_trip(ring)
        assert "set buffer.max_bytes=" in ring.fatal[0]
        assert not put.done()
        put.cancel()

    over_sockets(conversation, per_step=1, buffer__max_bytes=1 << 20)


def test_a_payload_over_its_promise_without_a_reservation_is_malformed() -> None:
    async def conversation(ring: Ring) -> None:
        producer = ring.producer("rollouter-0")
        (lease,) = await producer.lease(1)
        large = group(lease)
        large.trajectories[0].columns["image"] = np.zeros(lease.nbytes, np.uint8)
        meta, payload = pack_group(large)
        client = raw_client(ring, "rollouter-6")
        try:
            await client.send_multipart(codec.encode(PutRequest(meta), 7, 0.0, payload.frames))
            header, _ = codec.decode(await client.recv_multipart())
        finally:
            client.close()
        assert isinstance(header.body, Refusal)
        assert "reserve the room first" in header.body.error
        assert ring.buffer.room.held + ring.buffer.room.promised <= ring.buffer.room.limit
        assert await producer.put(large) == "accepted"

    over_sockets(conversation)


def test_large_groups_whose_small_promises_fill_the_room_do_not_wait_for_each_other() -> None:
    """Eight leases fill the room, and every group turns out larger than its promise: the newest give way."""

    async def conversation(ring: Ring) -> None:
        producer, consumer = ring.producer("rollouter-0"), ring.consumer()
        leases = await producer.lease(99)
        assert len(leases) == 8
        column_bytes = 4000
        needed = pack_group(with_column(leases[0], column_bytes))[0].nbytes

        async def deliver(lease: Lease) -> str:
            return await producer.put(with_column(lease, column_bytes))

        async def train() -> None:
            for step in range(100):
                await consumer.next_batch(step, 0)
                await consumer.acknowledge(step, 0)

        training = start(train())
        statuses = await asyncio.gather(*(deliver(lease) for lease in leases))
        assert set(statuses) == {"accepted", "late"}
        assert "lease_evicted" in [name for name, _ in ring.events]
        assert (await producer.lease(1))[0].nbytes == needed > leases[0].nbytes
        training.cancel()
        assert ring.buffer.ledger.lost == 0

    limit = 8 * (2 * 64 * 9 + 3 * 64 + 2 * 1024)
    over_sockets(conversation, per_step=1, size=2, max_lag=20, buffer__max_bytes=limit)


def test_a_reservation_for_an_invented_lease_is_late_and_harms_nobody() -> None:
    async def conversation(ring: Ring) -> None:
        producer = ring.producer("rollouter-0")
        leases = await producer.lease(99)
        link = ClientLink(ring.endpoint, "stranger", lambda: 0.0)
        for lease in (10_000, 10_000, 10_001):
            header, _ = await link.request(ReserveRequest(lease, 10_000))
            assert header.body == Status("late")
        assert ring.buffer.ledger.in_flight == len(leases)
        link.close()

    over_sockets(conversation, per_step=1, size=2, max_lag=20, buffer__max_bytes=1 << 16)


def test_a_lease_that_nobody_could_be_told_of_is_not_held_against_its_prompt() -> None:
    ledger = replay_buffer(per_step=1, max_lag=0, buffer__max_attempts=2)
    ledger.publish(0)
    for _ in range(5):
        (lease,) = ledger.lease("gone", 1, 0.0)
        ledger.lose([lease.id], Refund.UNDELIVERED)
    assert ledger.ledger.fatal == ""
    assert ledger.lease("there", 1, 0.0)[0].prompt == 0
