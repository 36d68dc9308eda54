"""The queue over real ipc sockets: batches for several ranks, acknowledgements, and the numbers they carry."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from buffer_support import Ring, group, over_sockets, ranks_wait, start, trained_in, trajectory

from streamrl import metrics
from streamrl.buffers.links.link_zmq import ClientLink
from streamrl.buffers.queue.clients import QueueProducer
from streamrl.buffers.queue.places import Found
from streamrl.buffers.queue.server import QueueServer
from streamrl.buffers.wire.messages import BatchGroup, GroupMeta, InArena
from streamrl.buffers.wire.payload import Payload, narrow
from streamrl.buffers.wire.reference import Reference
from streamrl.clock import ManualClock
from streamrl.errors import StreamRLError
from streamrl.types import Group


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
        assert trained_in(*parts) == sorted(lease.id for lease in leases) == [0, 1, 2, 3]
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
        with pytest.raises(StreamRLError, match="step 0 was acknowledged but is not handed out"):
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
        assert trained_in(*parts) == [0]

    over_sockets(conversation, per_step=1)


def test_closing_a_client_ends_its_waiters_with_what_they_waited_for() -> None:
    async def conversation(ring: Ring) -> None:
        consumer = ring.consumer()
        waiting = start(consumer.next_batch(4, 2))
        await ranks_wait(ring, [0])
        consumer.close()
        with pytest.raises(StreamRLError, match="trainer-0: .* closed while it waited for the batch of step 4"):
            await waiting
        with pytest.raises(StreamRLError, match="a queue client that is closed"):
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
        prefixes = ("queue/", "buffer/", "ledger/", "journal/", "reward/", "length/", "lag/")
        expected = {prefix + name for prefix in prefixes for name in metrics.GROUPS[prefix]}
        assert expected - {"queue/resent", "queue/reconnects"} <= set(stats)  # clients count those two
        metrics.complete_line(stats)
        assert stats["queue/bytes"] > 0
        assert stats["queue/latency_p50_s"] == 0  # the clock stood still between send and arrival

    over_sockets(conversation, clock=clock, journaled=True, per_step=1)


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
            trained += trained_in(*parts)
            await ranks[0].acknowledge(step, step)
            await ranks[0].published(step + 1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len(trained) == len(set(trained)) == 12 * 3
        assert ring.buffer.summary()["consumed"] == 12 * 3
        assert ring.buffer.ledger.lost == 0

    over_sockets(conversation, per_step=3, max_lag=1)


# Columns --------------------------------------------------------------------------------------------------------------


def with_columns(lease: int, prompt: int) -> Group:
    """Two trajectories; the first has expert indices, both have features, and metadata."""
    pair = [trajectory([(0, 2)], reward=reward, metadata={"source": "web"}) for reward in (0.0, 1.0)]
    pair[0].columns["router"] = np.arange(10, dtype=np.int16).reshape(5, 2)
    for number, each in enumerate(pair):
        each.columns["features"] = np.full((3, 1000), number, dtype=np.float32)
    return Group(lease, prompt, "sums", pair)


def test_only_the_columns_that_a_rank_asks_for_travel() -> None:
    async def conversation(ring: Ring) -> None:
        producer = ring.producer("rollouter-0")
        lease = (await producer.lease(1))[0]
        sent = with_columns(lease.id, lease.prompt)
        await producer.put(sent)
        bare = (await ring.consumer(0, 1).next_batch(0, 0)).micro_batches[0][0].trajectories
        assert [each.columns for each in bare] == [{}, {}]
        assert [each.metadata for each in bare] == [{}, {}]
        routed = (await ring.consumer(0, 1).next_batch(0, 0, ["router", "metadata"])).micro_batches[0][0].trajectories
        assert [sorted(each.columns) for each in routed] == [["router"], []]
        np.testing.assert_array_equal(routed[0].columns["router"], sent.trajectories[0].columns["router"])
        assert routed[0].metadata == {"source": "web"}

    over_sockets(conversation, per_step=1)


def test_columns_of_held_groups_can_be_fetched_alone() -> None:
    async def conversation(ring: Ring) -> None:
        producer, consumer = ring.producer("rollouter-0"), ring.consumer()
        leases = await producer.lease(2)
        for lease in leases:
            await producer.put(with_columns(lease.id, lease.prompt))
        rows = await consumer.fetch([lease.id for lease in leases] + [99], ["features"])
        assert list(rows) == [lease.id for lease in leases]
        assert [[list(row) for row in each] for each in rows.values()] == [[["features"]] * 2] * 2
        assert [row["features"][2, 999] for row in rows[leases[0].id]] == [0, 1]

    over_sockets(conversation, per_step=2)


# Payloads that a rank cannot read -------------------------------------------------------------------------------------


class Arena:
    """A place that keeps payloads, and a source that reads them, as a rollouter's memory would; it can be wiped."""

    def __init__(self) -> None:
        self.kept: dict[int, Payload] = {}

    def attach(self, link: ClientLink) -> None:
        pass

    async def write(self, group: GroupMeta, payload: Payload) -> InArena:
        self.kept[group.lease] = payload
        return InArena(Reference("arena", 0, payload.nbytes, group.lease), b"")

    async def read(self, groups: Sequence[BatchGroup], names: Sequence[str]) -> Found:
        found = Found()
        for each in groups:
            lease = each.group.lease
            if lease in self.kept:
                found.add(each.group, *narrow(each.group.columns, self.kept[lease], names))
            else:
                found.lost[lease] = "wiped"
        return found

    def statistics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


def test_a_rank_reports_what_it_cannot_read_and_trains_on_the_rest() -> None:
    async def conversation(ring: Ring) -> None:
        arena = Arena()
        producer, consumer = ring.producer("rollouter-0", place=arena), ring.consumer(source=arena)
        gone, kept = await producer.lease(2)
        for lease in (gone, kept):
            await producer.put(group(lease))
        del arena.kept[gone.id]
        batch = await consumer.next_batch(0, 0)
        assert trained_in(batch) == [kept.id]
        assert batch.micro_batches[0][0].token_weights.tolist() == [1 / 8, 1 / 8]  # of the full batch
        assert (await ring.event("payload_lost"))["lease"] == gone.id
        await consumer.acknowledge(0, 0)
        assert (ring.buffer.ledger.consumed, ring.buffer.ledger.refunded) == (1, 1)
        await consumer.published(1)
        again = (await producer.lease(1))[0]
        assert (again.prompt, again.attempt) == (gone.prompt, 1)

    over_sockets(conversation, per_step=2, max_lag=0, queue__backend="nixl")


def test_a_batch_that_no_rank_can_read_is_a_step_without_gradient() -> None:
    async def conversation(ring: Ring) -> None:
        arena = Arena()
        producer, consumer = ring.producer("rollouter-0", place=arena), ring.consumer(source=arena)
        for step in range(3):
            for lease in await producer.lease(2):
                await producer.put(group(lease, step))
            if step == 1:
                arena.kept.clear()
            batch = await consumer.next_batch(step, step)
            assert len(trained_in(batch)) == (0 if step == 1 else 2)
            await consumer.acknowledge(step, step)
            await consumer.published(step + 1)
        assert ring.buffer.summary() == {
            "issued": 6,
            "consumed": 4,
            "refunded": 2,
            "reissued": 2,
            "duplicates_trained": 0,
            "lost": 0,
        }

    over_sockets(conversation, per_step=2, max_lag=0, queue__backend="nixl")
