"""The queue over real ipc sockets: leases, groups, failures, and many requests at once."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from buffer_support import (
    HANG_S,
    Ring,
    group,
    leases_wait,
    over_sockets,
    round_trip,
    serving,
    settings,
    start,
    trajectory,
)

from streamrl.buffers.links import link_zmq
from streamrl.buffers.queue.clients import QueueProducer
from streamrl.buffers.queue.server import Asker
from streamrl.buffers.replay_buffer import ReplayBuffer
from streamrl.buffers.wire.groups import pack_group
from streamrl.buffers.wire.messages import LeaseRequest
from streamrl.clock import ManualClock
from streamrl.errors import StreamRLError, WireError
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
        ring.server._leases.ask(Asker(b"gone#1", 0), LeaseRequest(1))  # its socket has closed since it asked
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
        while not ring.buffer.ledger.in_flight:  # noqa: ASYNC110 until they are granted: the answer is not read yet
            await asyncio.sleep(0)
        crossing.cancel()
        await asyncio.gather(crossing, return_exceptions=True)
        await producer.fail(99, "a round trip", "")
        assert ring.buffer.ledger.in_flight == 1
        assert [lease.id for lease in await producer.lease(1)] == [0]

    over_sockets(conversation, per_step=1, max_lag=0)


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
        assert ring.buffer.room.held <= ring.buffer.config.buffer.max_bytes

    over_sockets(conversation, per_step=2, max_lag=2)


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
        assert ring.fatal[0].endswith("buffer.max_attempts=2; last: no answer")

    over_sockets(conversation, buffer__max_attempts=2)


def test_a_long_traceback_is_cut_at_its_beginning() -> None:
    async def conversation(ring: Ring) -> None:
        producer = ring.producer("rollouter-0")
        lease = (await producer.lease(1))[0]
        await producer.fail(lease.id, "the environment raised", "x" * 100_000 + "\nKeyError: 1")
        assert (await ring.event("lease_failed"))["traceback"].endswith("x\nKeyError: 1")

    over_sockets(conversation)


# Many at once ---------------------------------------------------------------------------------------------------------


def test_a_thousand_requests_of_one_client_are_all_answered() -> None:
    """Far more than a socket queues by default: an answer that found it full would be lost, its waiter hang."""

    async def conversation(ring: Ring) -> None:
        other, producer = ring.producer("rollouter-1"), ring.producer("rollouter-0")
        await other.lease(1000)
        waiting = [start(producer.lease(1)) for _ in range(1000)]
        await leases_wait(ring, 1000)
        await ring.consumer().published(1)
        leases = [lease for granted in await asyncio.gather(*waiting) for lease in granted]
        assert len({lease.id for lease in leases}) == 1000
        assert await asyncio.gather(*(producer.put(group(lease)) for lease in leases)) == ["accepted"] * 1000
        assert ring.named("lease_lost") == []

    over_sockets(conversation, per_step=1000, max_lag=0)


def test_more_waiting_requests_than_a_client_may_have_are_refused_and_the_others_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("streamrl.buffers.queue.lease_desk.REQUESTS_PER_CLIENT", 3)

    async def conversation(ring: Ring) -> None:
        producer = ring.producer("rollouter-0")
        await producer.lease(4)
        waiting = [start(producer.lease(1)) for _ in range(3)]
        await leases_wait(ring, 3)
        with pytest.raises(StreamRLError, match="3 requests for leases wait already"):
            await producer.lease(1)
        waiting.append(start(ring.producer("rollouter-1").lease(1)))
        await leases_wait(ring, 4)
        await ring.consumer().published(1)
        assert [len(leases) for leases in await asyncio.gather(*waiting)] == [1] * 4

    over_sockets(conversation, per_step=4, max_lag=0)


def test_more_unanswered_requests_than_a_client_may_have_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_zmq, "UNANSWERED", 2)

    async def conversation(ring: Ring) -> None:
        producer = ring.producer("rollouter-0")
        await producer.lease(2)
        waiting = [start(producer.lease(1)) for _ in range(2)]
        await leases_wait(ring, 2)
        with pytest.raises(StreamRLError, match="rollouter-0: 2 requests wait for answers already"):
            await producer.lease(1)
        for each in waiting:
            each.cancel()

    over_sockets(conversation, per_step=2, max_lag=0)


def test_a_client_without_a_server_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than its socket queues waits in the client; it must not look again and again whether there is room."""
    looks = 0
    look = link_zmq._Reader.look

    def counted(reader: link_zmq._Reader) -> None:
        nonlocal looks
        looks += 1
        look(reader)

    async def main() -> None:
        monkeypatch.setattr(link_zmq._Reader, "look", counted)
        producer = QueueProducer("ipc:///tmp/streamrl-nobody-is-here", "rollouter-0", clock=ManualClock())
        waiting = [start(producer.fail(number, "x" * 100, "")) for number in range(5000)]
        for _ in range(10):
            await asyncio.sleep(0)
        before = looks
        for _ in range(1000):
            await asyncio.sleep(0)
        assert looks - before < 100
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        producer.close()

    asyncio.run(main())


def test_a_group_larger_than_its_lease_promised_waits_for_room() -> None:
    async def conversation(ring: Ring) -> None:
        producer, consumer = ring.producer("rollouter-0"), ring.consumer()
        first, second = await producer.lease(2)
        large = [group(first), group(second)]
        for each in large:
            each.trajectories[0].columns["image"] = np.zeros(ring.buffer.room.limit // 2, np.uint8)
        assert await producer.put(large[0]) == "accepted"
        waiting = start(producer.put(large[1]))
        await consumer.next_batch(0, 0)
        assert not waiting.done()
        assert ring.buffer.room.free < pack_group(large[1])[1].nbytes
        await consumer.acknowledge(0, 0)
        assert await waiting == "accepted"

    over_sockets(conversation, per_step=1, buffer__max_bytes=1 << 20)


def test_an_error_in_the_buffer_itself_ends_the_server() -> None:
    """Unexpected errors are ours: they propagate to the actor instead of being answered."""

    def broken(*_: object) -> list[np.ndarray]:
        raise ZeroDivisionError

    async def main() -> None:
        config = settings(per_step=1)
        async with serving(config, buffer=ReplayBuffer(config, broken, broken)) as ring:
            producer = ring.producer("rollouter-0")
            put = start(producer.put(group((await producer.lease(1))[0])))
            batch = start(ring.consumer().next_batch(0, 0))
            assert ring.task is not None
            try:
                await asyncio.wait_for(asyncio.shield(ring.task), HANG_S)
            finally:
                ring.task = None
                ring.close_clients()
                await asyncio.gather(put, batch, return_exceptions=True)

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(main())
    assert caught.group_contains(ZeroDivisionError)
