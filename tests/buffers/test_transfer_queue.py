"""The transfer queue over real ipc sockets: producers, ranks, and everything that may arrive at the wrong moment."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
import zmq
import zmq.asyncio
from buffer_support import Ring, group, replay_buffer, serving, trajectory

from streamrl import metrics
from streamrl.buffers import codec
from streamrl.buffers.messages import SCHEMA, LeaseRequest, Refusal
from streamrl.buffers.queue_clients import QueueConsumer, QueueProducer
from streamrl.buffers.replay_buffer import ReplayBuffer
from streamrl.buffers.transfer_queue import QueueServer
from streamrl.clock import ManualClock
from streamrl.errors import StreamRLError, WireError
from streamrl.types import Group

Conversation = Callable[[Ring], Awaitable[None]]


def over_sockets(conversation: Conversation, *, clock: ManualClock | None = None, **keys: Any) -> None:
    """Run one conversation against a served buffer that has version 0 published."""

    async def main() -> None:
        buffer = replay_buffer(**keys)
        buffer.ledger.publish(0)
        async with serving(buffer, clock) as ring:
            await conversation(ring)

    asyncio.run(main())


async def round_trip(ring: Ring) -> None:
    """One request that changes nothing, answered."""
    probe = QueueConsumer(ring.endpoint, 99, 100, clock=ring.clock)
    await probe.published(0)
    probe.close()


async def leases_wait(ring: Ring, requests: int) -> None:
    """Return once so many requests for leases wait at the server."""
    while ring.server.waiting_for_leases != requests:
        await round_trip(ring)


async def ranks_wait(ring: Ring, ranks: list[int]) -> None:
    """Return once these trainer ranks wait at the server."""
    while ring.server.waiting_for_batch != ranks:
        await round_trip(ring)


def start(call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.create_task(call)


def test_groups_of_two_producers_reach_both_ranks_once() -> None:
    async def conversation(ring: Ring) -> None:
        producers = [ring.producer("rollouter-0"), ring.producer("rollouter-1")]
        ranks = [ring.consumer(rank, 2) for rank in range(2)]
        requests = [start(rank.next_batch(0, 0)) for rank in ranks]
        leases = []
        for producer in producers:
            mine = await producer.lease(2)
            assert await asyncio.gather(*(producer.put(group(lease)) for lease in mine)) == ["accepted"] * 2
            leases += mine
        parts = await asyncio.gather(*requests)
        trained = [part.lease for rank in parts for batch in rank.micro_batches for part in batch]
        assert sorted(trained) == sorted(lease.id for lease in leases) == [0, 1, 2, 3]
        assert {len(rank.micro_batches) for rank in parts} == {1}
        assert parts[0].stats == parts[1].stats
        await ranks[0].acknowledge(0, 0)
        assert ring.buffer.summary() == {
            "issued": 4,
            "consumed": 4,
            "refunded": 0,
            "reissued": 0,
            "duplicates_trained": 0,
            "lost": 0,
        }

    over_sockets(conversation, per_step=4, max_lag=0)


def test_a_trajectory_arrives_as_it_was_sampled() -> None:
    async def conversation(ring: Ring) -> None:
        producer, consumer = ring.producer("rollouter-0"), ring.consumer()
        lease = (await producer.lease(1))[0]
        sent = [trajectory([(0, 2)], reward=reward, metrics={"hops": reward}) for reward in (0.0, 1.0)]
        await producer.put(Group(lease.id, lease.prompt, "sums", sent))
        part = (await consumer.next_batch(0, 0)).micro_batches[0][0]
        for a, b in zip(sent, part.trajectories, strict=True):
            assert (a.tokens.tolist(), a.sampled.tolist(), a.behaviour.tolist()) == (
                b.tokens.tolist(),
                b.sampled.tolist(),
                b.behaviour.tolist(),
            )
            assert (a.versions, a.reward, a.metrics) == (b.versions, b.reward, b.metrics)
        assert part.advantages.tolist() == [-0.5, 0.5]

    over_sockets(conversation, per_step=1)


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


def test_ranks_that_ask_for_different_batches_are_told_so() -> None:
    async def conversation(ring: Ring) -> None:
        producer = ring.producer("rollouter-0")
        wrong = start(ring.consumer(1, 2).next_batch(0, 7))
        await ranks_wait(ring, [1])
        right = start(ring.consumer(0, 2).next_batch(0, 0))
        await producer.put(group((await producer.lease(1))[0]))
        assert (await right).version == 0
        with pytest.raises(StreamRLError, match="trainer-1: .*rank 1 of 2 asked for step 0 at version 7, but step 0"):
            await wrong
        with pytest.raises(StreamRLError, match="rank 1 of 3 asked"):
            await ring.consumer(1, 3).next_batch(0, 0)
        assert (await ring.consumer(1, 2).next_batch(0, 0)).step == 0

    over_sockets(conversation, per_step=1)


def test_a_rank_may_ask_for_the_next_step_before_the_leader_acknowledged_this_one() -> None:
    async def conversation(ring: Ring) -> None:
        producer, leader, other = ring.producer("rollouter-0"), ring.consumer(0, 2), ring.consumer(1, 2)
        for lease in await producer.lease(2):
            await producer.put(group(lease))
        await asyncio.gather(leader.next_batch(0, 0), other.next_batch(0, 0))
        early = start(other.next_batch(1, 1))
        await ranks_wait(ring, [1])
        with pytest.raises(StreamRLError, match="step 0 at version 0 is handed out"):
            await leader.next_batch(1, 1)
        await leader.acknowledge(0, 0)
        parts = await asyncio.gather(leader.next_batch(1, 1), early)
        assert [part.step for part in parts] == [1, 1]

    over_sockets(conversation, per_step=1, max_lag=1)


def test_asking_again_before_the_acknowledgement_gives_the_same_part() -> None:
    async def conversation(ring: Ring) -> None:
        producer = ring.producer("rollouter-0")
        await producer.put(group((await producer.lease(1))[0]))
        first = await ring.consumer().next_batch(0, 0)
        second = await ring.consumer().next_batch(0, 0)
        assert [part.micro_batches[0][0].lease for part in (first, second)] == [0, 0]
        assert ring.buffer.ledger.ready == 1

    over_sockets(conversation, per_step=1)


def test_acknowledgements_count_once_and_must_name_the_batch() -> None:
    async def conversation(ring: Ring) -> None:
        producer, consumer = ring.producer("rollouter-0"), ring.consumer()
        await producer.put(group((await producer.lease(1))[0]))
        with pytest.raises(StreamRLError, match="step 0 was acknowledged but never handed out"):
            await consumer.acknowledge(0, 0)
        await consumer.next_batch(0, 0)
        with pytest.raises(StreamRLError, match="acknowledged at version 4, but handed out at 0"):
            await consumer.acknowledge(0, 4)
        await consumer.acknowledge(0, 0)
        await consumer.acknowledge(0, 0)
        assert ring.buffer.ledger.consumed == 1
        assert (await ring.event("request_refused"))["sender"] == "trainer-0"

    over_sockets(conversation, per_step=1)


def test_a_new_trainer_gets_what_the_dead_one_had_not_acknowledged() -> None:
    async def conversation(ring: Ring) -> None:
        producer = ring.producer("rollouter-0")
        await producer.put(group((await producer.lease(1))[0]))
        await ring.consumer(0, 1).next_batch(0, 0)
        assert ring.server.consumer_lost() == 1
        parts = await asyncio.gather(*(ring.consumer(rank, 2).next_batch(0, 0) for rank in range(2)))
        assert [part.lease for rank in parts for batch in rank.micro_batches for part in batch] == [0]

    over_sockets(conversation, per_step=1)


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


def test_failures_in_a_row_end_the_run_with_the_last_line_of_the_traceback() -> None:
    async def conversation(ring: Ring) -> None:
        producer = ring.producer("rollouter-0")

        async def fail() -> None:
            lease = (await producer.lease(1))[0]
            await producer.fail(lease.id, "the environment raised", "Traceback:\n  line\nKeyError: 'answer'")

        await fail()
        await fail()
        await producer.put(group((await producer.lease(1))[0]))
        await fail()
        await fail()
        assert ring.fatal == []
        await fail()
        await fail()
        assert ring.fatal == ["3 leases failed in a row (env.max_failures=3); last: KeyError: 'answer'"]
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


def test_closing_a_client_ends_its_waiters_with_what_they_waited_for() -> None:
    async def conversation(ring: Ring) -> None:
        consumer = ring.consumer()
        waiting = start(consumer.next_batch(4, 2))
        await ranks_wait(ring, [0])
        consumer.close()
        with pytest.raises(StreamRLError, match="trainer-0: .* closed while it waited for the batch of step 4"):
            await waiting
        with pytest.raises(StreamRLError, match="a transfer queue client that is closed"):
            await consumer.next_batch(4, 2)

    over_sockets(conversation)


def test_an_endpoint_that_cannot_be_bound_is_named() -> None:
    async def conversation(ring: Ring) -> None:
        endpoint = "ipc:///no/such/folder/queue"
        other = QueueServer(endpoint, ring.buffer, ring.clock, lambda *_: None, ring.fatal.append)
        with pytest.raises(StreamRLError, match="cannot bind ipc:///no/such/folder/queue"):
            await other.run()

    over_sockets(conversation)


def test_a_batch_carries_every_key_of_the_queues_groups() -> None:
    clock = ManualClock()

    async def conversation(ring: Ring) -> None:
        producer = ring.producer("rollouter-0")
        await producer.put(group((await producer.lease(1))[0]))
        stats = (await ring.consumer().next_batch(0, 0)).stats
        for prefix in ("queue/", "buffer/", "ledger/", "reward/", "length/", "lag/"):
            assert {prefix + name for name in metrics.GROUPS[prefix]} <= set(stats)
        metrics.complete_line(stats)
        assert stats["queue/bytes"] > 0
        assert stats["queue/latency_p50_s"] == 0  # the clock stood still between send and arrival

    over_sockets(conversation, clock=clock, per_step=1)


def test_latency_is_measured_from_send_to_arrival() -> None:
    clock = ManualClock()

    async def conversation(ring: Ring) -> None:
        leases = await ring.producer("rollouter-0").lease(3)
        for seconds, lease in zip((0.0, 1.0, 2.0), leases, strict=True):
            behind = ManualClock(clock.now() - seconds)
            producer = QueueProducer(ring.endpoint, "rollouter-1", clock=behind)
            await producer.put(group(lease))
            producer.close()
        stats = ring.server.statistics()
        assert stats["queue/latency_p50_s"] == 1.0
        assert stats["queue/latency_p99_s"] == pytest.approx(1.98)

    over_sockets(conversation, clock=clock, per_step=3)


def test_a_whole_run_on_two_ranks_trains_every_group_once() -> None:
    async def conversation(ring: Ring) -> None:
        producers = [ring.producer(f"rollouter-{index}") for index in range(2)]
        ranks = [ring.consumer(rank, 2) for rank in range(2)]

        async def generate(producer: QueueProducer) -> None:
            while True:
                for lease in await producer.lease(2):
                    await producer.put(group(lease, ring.buffer.ledger.published))

        tasks = [start(generate(producer)) for producer in producers]
        trained: list[int] = []
        for step in range(12):
            parts = await asyncio.gather(*(rank.next_batch(step, step) for rank in ranks))
            trained += [part.lease for rank in parts for batch in rank.micro_batches for part in batch]
            await ranks[0].acknowledge(step, step)
            await ranks[0].published(step + 1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len(trained) == len(set(trained)) == 12 * 3
        assert ring.buffer.summary()["consumed"] == 12 * 3
        assert ring.buffer.ledger.lost == 0

    over_sockets(conversation, per_step=3, max_lag=1)


def test_an_error_in_the_buffer_itself_ends_the_server() -> None:
    """Unexpected errors are ours: they propagate to the actor instead of being answered."""

    async def main() -> None:
        def broken(_: object) -> list:
            raise ZeroDivisionError

        buffer = replay_buffer(per_step=1)
        buffer = ReplayBuffer(buffer.config, broken, broken)
        buffer.ledger.publish(0)
        async with serving(buffer) as ring:
            producer = ring.producer("rollouter-0")
            put = start(producer.put(group((await producer.lease(1))[0])))
            batch = start(ring.consumer().next_batch(0, 0))
            try:
                await ring.task
            finally:
                ring.close_clients()
                await asyncio.gather(put, batch, return_exceptions=True)

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(main())
    assert caught.group_contains(ZeroDivisionError)
