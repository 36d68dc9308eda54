"""The transfer queue over real ipc sockets: leases, groups, failures, and what may arrive at the wrong moment."""

from __future__ import annotations

import asyncio
import uuid

import pytest
import zmq
import zmq.asyncio
from buffer_support import (
    Ring,
    group,
    leases_wait,
    over_sockets,
    round_trip,
    start,
    trajectory,
)

from streamrl.buffers import codec
from streamrl.buffers.messages import SCHEMA, LeaseRequest, Refusal
from streamrl.clock import ManualClock
from streamrl.errors import WireError
from streamrl.types import Group


def test_a_request_for_leases_waits_until_a_publication_frees_credits() -> None:
    async def conversation(ring: Ring) -> None:
        producer, consumer = ring.producer("rollouter-0"), ring.consumer()
        assert [lease.prompt for lease in await producer.lease(9)] == [0, 1]
        waiting = start(producer.lease(9))
        await leases_wait(ring, 1)
        assert not waiting.done()
        await consumer.published(1)
        assert [lease.prompt for lease in await waiting] == [2, 3]

    over_sockets(conversation, per_step=2, max_lag=0)


def test_credits_are_shared_evenly_between_waiting_producers() -> None:
    async def conversation(ring: Ring) -> None:
        await ring.producer("rollouter-9").lease(6)
        waiting = [start(ring.producer(f"rollouter-{index}").lease(6)) for index in range(3)]
        await leases_wait(ring, 3)
        await ring.consumer().published(1)
        assert [len(leases) for leases in await asyncio.gather(*waiting)] == [2, 2, 2]

    over_sockets(conversation, per_step=6, max_lag=0)


def test_a_double_put_is_acknowledged_dropped_and_reported() -> None:
    async def conversation(ring: Ring) -> None:
        producer = ring.producer("rollouter-0")
        lease = (await producer.lease(1))[0]
        assert [await producer.put(group(lease)) for _ in range(2)] == ["accepted", "duplicate"]
        assert await ring.event("group_refused") == {
            "sender": "rollouter-0",
            "lease": lease.id,
            "prompt": lease.prompt,
            "status": "duplicate",
        }
        assert ring.buffer.statistics()["buffer/ready_groups"] == 1

    over_sockets(conversation)


def test_an_unknown_lease_is_acknowledged_and_dropped() -> None:
    async def conversation(ring: Ring) -> None:
        assert await ring.producer("rollouter-0").put(Group(77, 0, "sums", [trajectory([(0, 1)])])) == "unknown"
        assert ring.buffer.bytes == 0

    over_sockets(conversation)


def test_a_lease_expires_at_its_deadline_and_its_prompt_goes_to_whoever_waits() -> None:
    clock = ManualClock()

    async def conversation(ring: Ring) -> None:
        slow, quick = ring.producer("slow"), ring.producer("quick")
        lease = (await slow.lease(1))[0]
        waiting = start(quick.lease(1))
        await leases_wait(ring, 1)
        clock.advance(9.9)
        await round_trip(ring)
        assert not waiting.done()
        clock.advance(0.1)
        again = (await waiting)[0]
        assert (again.prompt, again.attempt) == (lease.prompt, 1)
        assert (await ring.event("lease_expired"))["lease"] == lease.id
        assert (await ring.event("lease_reissued"))["holder"] == "quick"
        assert await slow.put(group(lease)) == "late"
        assert await quick.put(group(again)) == "accepted"

    over_sockets(conversation, clock=clock, per_step=1, max_lag=0, buffer__lease_timeout_s=10.0)


def test_a_later_lease_has_its_own_deadline() -> None:
    clock = ManualClock()

    async def conversation(ring: Ring) -> None:
        producer = ring.producer("rollouter-0")
        await producer.lease(1)
        clock.advance(6.0)
        await producer.lease(1)
        clock.advance(4.0)
        await ring.event("lease_expired")
        assert ring.buffer.ledger.in_flight == 1
        ring.events.clear()
        clock.advance(6.0)
        assert (await ring.event("lease_expired"))["lease"] == 1

    over_sockets(conversation, clock=clock, per_step=2, max_lag=0, buffer__lease_timeout_s=10.0)


def test_a_lost_holders_leases_go_to_the_others_and_its_waiting_request_is_dropped() -> None:
    async def conversation(ring: Ring) -> None:
        dead, alive = ring.producer("dead"), ring.producer("alive")
        lost = await dead.lease(2)
        forgotten = start(dead.lease(2))
        await leases_wait(ring, 1)
        waiting = start(alive.lease(2))
        await leases_wait(ring, 2)
        assert ring.server.holder_lost("dead") == 2
        assert [lease.prompt for lease in await waiting] == [lease.prompt for lease in lost]
        assert ring.server.waiting_for_leases == 0
        assert not forgotten.done()
        assert (await ring.event("lease_lost"))["holder"] == "dead"
        forgotten.cancel()

    over_sockets(conversation, per_step=2, max_lag=0)


def test_leases_for_a_producer_that_disconnected_go_to_the_next_in_line() -> None:
    async def conversation(ring: Ring) -> None:
        first, alive = ring.producer("first"), ring.producer("alive")
        lease = (await first.lease(1))[0]
        ring.server._handle(b"gone#1", 0, LeaseRequest(1), {})  # its socket has closed since it asked
        waiting = start(alive.lease(1))
        await leases_wait(ring, 2)
        await first.fail(lease.id, "no answer", "")
        again = (await waiting)[0]
        assert (again.prompt, again.attempt) == (lease.prompt, 2)
        assert (await ring.event("lease_lost"))["holder"] == "gone"
        assert ring.buffer.ledger.in_flight == 1

    over_sockets(conversation, per_step=1, max_lag=0)


def test_a_cancelled_request_for_leases_takes_no_credit() -> None:
    async def conversation(ring: Ring) -> None:
        producer = ring.producer("rollouter-0")
        held = await producer.lease(2)
        cancelled = start(producer.lease(2))
        await leases_wait(ring, 1)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        for lease in held:
            await producer.fail(lease.id, "no answer", "")
        assert ring.buffer.ledger.in_flight == 0
        assert len(await producer.lease(2)) == 2

    over_sockets(conversation, per_step=2, max_lag=0)


def test_leases_that_cross_a_cancellation_are_returned_by_the_next_call() -> None:
    async def conversation(ring: Ring) -> None:
        producer = ring.producer("rollouter-0")
        crossing = start(producer.lease(1))
        await asyncio.sleep(0)  # the request is sent, its answer is not read yet
        crossing.cancel()
        await asyncio.gather(crossing, return_exceptions=True)
        await producer.fail(99, "a round trip", "")
        assert ring.buffer.ledger.in_flight == 1
        assert [lease.id for lease in await producer.lease(1)] == [0]

    over_sockets(conversation, per_step=1, max_lag=0)


def _raw_dealer(ring: Ring, name: bytes) -> zmq.asyncio.Socket:
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.linger = 0
    socket.setsockopt(zmq.IDENTITY, name + b"#" + uuid.uuid4().hex[:6].encode())
    socket.connect(ring.endpoint)
    return socket


GOOD_HEADER = codec.encode(LeaseRequest(1), 3, 0.0)[0]


@pytest.mark.parametrize(
    ("frames", "request_id", "expected"),
    [
        ([b"\xff\x00garbage"], -1, "header"),
        ([b""], -1, "header"),
        ([GOOD_HEADER, b"extra"], 3, "expected 0 tensor frames"),
        ([GOOD_HEADER] + [b""] * 40, 3, "expected 1 to 17 frames"),
        ([codec.encoder.encode([SCHEMA + 1, 8])], 8, "expected schema"),
        (codec.encode(Refusal("x", True), 5, 0.0), 5, "expected a request"),
    ],
    ids=["garbage", "empty", "extra frame", "too many frames", "other schema", "an answer"],
)
def test_a_malformed_message_is_counted_named_and_answered_and_service_goes_on(
    frames: list[bytes], request_id: int, expected: str
) -> None:
    async def conversation(ring: Ring) -> None:
        socket = _raw_dealer(ring, b"rollouter-6")
        try:
            await socket.send_multipart(frames)
            header, _ = codec.decode(await socket.recv_multipart())
            assert header.request == request_id
            assert isinstance(header.body, Refusal)
            assert header.body.malformed
            assert expected in header.body.error
        finally:
            socket.close()
        assert ring.server.malformed == 1
        event = await ring.event("malformed_frame")
        assert event["sender"] == "rollouter-6"
        assert expected in event["error"]
        assert len(await ring.producer("rollouter-0").lease(1)) == 1

    over_sockets(conversation)


def test_a_group_that_does_not_fit_its_lease_is_an_error_at_its_producer() -> None:
    async def conversation(ring: Ring) -> None:
        producer = ring.producer("rollouter-0")
        lease = (await producer.lease(1))[0]
        with pytest.raises(WireError, match="rollouter-0: put of lease 0: .*expected prompt 0, got 5"):
            await producer.put(Group(lease.id, 5, "sums", [trajectory([(0, 1)])]))
        assert await producer.put(group(lease)) == "accepted"

    over_sockets(conversation)


def test_a_stopped_consumer_stops_the_leases_and_bounds_the_bytes() -> None:
    async def conversation(ring: Ring) -> None:
        producer = ring.producer("rollouter-0")
        delivered = 0

        async def generate() -> None:
            nonlocal delivered
            while True:
                for lease in await producer.lease(3):
                    await producer.put(group(lease))
                    delivered += 1

        task = start(generate())
        await leases_wait(ring, 1)
        task.cancel()
        assert delivered == (2 + 1) * 2
        assert ring.buffer.bytes <= ring.buffer.config.buffer.max_bytes

    over_sockets(conversation, per_step=2, max_lag=2)


def test_draining_grants_nothing_more_but_still_takes_groups() -> None:
    async def conversation(ring: Ring) -> None:
        producer = ring.producer("rollouter-0")
        lease = (await producer.lease(1))[0]
        ring.server.drain()
        waiting = start(producer.lease(1))
        await leases_wait(ring, 1)
        assert await producer.put(group(lease)) == "accepted"
        assert not waiting.done()
        waiting.cancel()

    over_sockets(conversation)


def test_failures_in_a_row_end_the_run_with_the_last_reason() -> None:
    async def conversation(ring: Ring) -> None:
        producer = ring.producer("rollouter-0")

        async def fail() -> None:
            lease = (await producer.lease(1))[0]
            await producer.fail(lease.id, "KeyError: 'answer' (my_env.py:7)", "Traceback: ...")

        await fail()
        await fail()
        await producer.put(group((await producer.lease(1))[0]))
        await fail()
        await fail()
        assert ring.fatal == []
        await fail()
        await fail()
        assert ring.fatal == ["3 leases failed in a row (env.max_failures=3); last: KeyError: 'answer' (my_env.py:7)"]
        assert (await ring.event("lease_failed"))["traceback"].startswith("Traceback")

    over_sockets(conversation, env__max_failures=3, buffer__max_attempts=99)


def test_a_prompt_that_used_up_its_attempts_ends_the_run() -> None:
    async def conversation(ring: Ring) -> None:
        producer = ring.producer("rollouter-0")
        for _ in range(2):
            await producer.fail((await producer.lease(1))[0].id, "no answer", "")
        assert len(ring.fatal) == 1
        assert "prompt 0" in ring.fatal[0]
        assert "buffer.max_attempts=2" in ring.fatal[0]

    over_sockets(conversation, buffer__max_attempts=2)


def test_a_long_traceback_is_cut_at_its_beginning() -> None:
    async def conversation(ring: Ring) -> None:
        producer = ring.producer("rollouter-0")
        lease = (await producer.lease(1))[0]
        await producer.fail(lease.id, "the environment raised", "x" * 100_000 + "\nKeyError: 1")
        assert (await ring.event("lease_failed"))["traceback"].endswith("x\nKeyError: 1")

    over_sockets(conversation)
