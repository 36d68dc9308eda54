"""The queue over real sockets while connections break and the server dies: every request is answered, nothing twice.

Run as a program, this file is the server process that one of the tests kills.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from buffer_support import (
    HANG_S,
    Ring,
    balance,
    centred,
    group,
    leases_wait,
    over_sockets,
    ranks_wait,
    settings,
    start,
    token_mean,
    trained_in,
)

from streamrl.buffers.journaling import open_journal
from streamrl.buffers.links.link_keys import LinkKeys
from streamrl.buffers.queue.clients import QueueConsumer, QueueProducer
from streamrl.buffers.queue.server import QueueServer
from streamrl.buffers.replay_buffer import ReplayBuffer
from streamrl.buffers.wire import codec
from streamrl.buffers.wire.codec import Frame
from streamrl.buffers.wire.messages import Body
from streamrl.clock import RealClock

PER_STEP, MAX_LAG = 8, 2

transports = pytest.mark.parametrize(
    ("transport", "keys"), [("ipc", None), ("tcp", LinkKeys.new())], ids=["ipc", "tcp with keys"]
)


@transports
def test_what_waits_when_the_server_dies_and_what_is_asked_while_it_is_away_is_answered_by_the_next(
    transport: str, keys: LinkKeys | None
) -> None:
    async def conversation(ring: Ring) -> None:
        producer, consumer = ring.producer("rollouter-0"), ring.consumer()
        first, second = await producer.lease(2)
        waiting_batch = start(consumer.next_batch(0, 0))
        waiting_leases = start(producer.lease(9))
        await ranks_wait(ring, [0])
        await leases_wait(ring, 1)
        await ring.stop()
        puts = [start(producer.put(group(lease))) for lease in (first, second)]
        published = start(ring.consumer().published(1))
        ring.start()
        assert await asyncio.gather(*puts) == ["accepted"] * 2
        assert trained_in(await waiting_batch) == [first.id]
        await published
        assert [lease.prompt for lease in await waiting_leases] == [2]
        await ring.stop()
        acknowledged = start(consumer.acknowledge(0, 0))
        failed = start(producer.fail(2, "no answer", ""))
        ring.start()
        await acknowledged
        assert await failed == "failed"
        assert trained_in(await consumer.next_batch(1, 1)) == [second.id]
        assert ring.buffer.summary() == {
            "issued": 3,
            "consumed": 1,
            "refunded": 1,
            "reissued": 0,
            "duplicates_trained": 0,
            "lost": 0,
        }
        assert len(ring.named("buffer_restored")) == 2

    over_sockets(conversation, transport=transport, keys=keys, journaled=True, per_step=1, max_lag=1)


class Silence:
    """From now on the server's answers are lost on the way; ``get`` waits for the next one."""

    def __init__(self, ring: Ring) -> None:
        self._lost: asyncio.Queue[Body] = asyncio.Queue()
        assert ring.server._link is not None
        ring.server._link.send = ring.server._link.send_soon = self._send  # type: ignore[method-assign]

    def _send(self, identity: bytes, frames: Sequence[Frame]) -> bool:
        self._lost.put_nowait(codec.decode(frames)[0].body)
        return True

    async def get(self) -> str:
        return type(await self._lost.get()).__name__


@transports
@pytest.mark.parametrize("fsync", ["always", "never"])
def test_what_was_done_before_the_death_but_not_answered_is_answered_and_not_done_again(
    transport: str, keys: LinkKeys | None, fsync: str
) -> None:
    async def conversation(ring: Ring) -> None:
        producer, consumer = ring.producer("rollouter-0"), ring.consumer()

        silence = Silence(ring)
        asked = start(producer.lease(1))
        assert await silence.get() == "Leases"
        granted = list(ring.buffer.ledger.records)
        await ring.restart()
        (lease,) = await asked
        assert [lease.id] == granted == list(ring.buffer.ledger.records)

        silence = Silence(ring)
        put = start(producer.put(group(lease)))
        assert await silence.get() == "Status"
        await ring.restart()
        assert await put == "duplicate"
        assert ring.buffer.statistics()["buffer/ready_groups"] == 1

        silence = Silence(ring)
        batch = start(consumer.next_batch(0, 0))
        assert await silence.get() == "Batch"
        offer = ring.buffer.offer
        await ring.restart()
        assert trained_in(await batch) == [lease.id]
        assert offer is not None
        assert ring.buffer.offer is not None
        assert ring.buffer.offer.attempt == offer.attempt

        silence = Silence(ring)
        acknowledged = start(consumer.acknowledge(0, 0))
        assert await silence.get() == "Status"
        await ring.restart()
        await acknowledged
        assert (ring.buffer.ledger.consumed, ring.buffer.ledger.ready) == (1, 0)
        assert producer.statistics()["queue/resent"] >= 2

    over_sockets(
        conversation, transport=transport, keys=keys, journaled=True, per_step=1, max_lag=0, buffer__fsync=fsync
    )


def test_a_request_whose_waiter_is_gone_takes_no_leases_from_the_next_server() -> None:
    async def conversation(ring: Ring) -> None:
        producer, other = ring.producer("rollouter-0"), ring.producer("rollouter-1")
        await producer.lease(2)
        gone = start(producer.lease(2))
        await leases_wait(ring, 1)
        await ring.stop()
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        ring.start()
        assert await producer.fail(99, "", "") == "late"  # what was sent again was taken before this
        await leases_wait(ring, 0)
        await ring.consumer().published(1)
        assert len(await other.lease(9)) == 2

    over_sockets(conversation, journaled=True, per_step=2, max_lag=0)


def test_a_large_group_keeps_the_room_that_it_reserved() -> None:
    async def conversation(ring: Ring) -> None:
        producer = ring.producer("rollouter-0")
        lease = (await producer.lease(1))[0]
        nbytes = ring.buffer.room.limit // 4
        assert ring.buffer.reserve(lease.id, nbytes)
        promised, promise = ring.buffer.room.promised, ring.buffer.room.promise
        for _ in range(2):
            await ring.restart()
            assert (ring.buffer.room.promised, ring.buffer.room.promise) == (promised, promise)
        other, *_ = await producer.lease(9)
        assert other.nbytes == nbytes

    over_sockets(conversation, journaled=True, per_step=1, max_lag=9, buffer__max_bytes=1 << 20)


# Whole runs -----------------------------------------------------------------------------------------------------------


class Run:
    """Producers that deliver whatever they may, and a trainer; they know nothing of the server's deaths.

    With ``on_stale: wait`` no group is too old, however long its connection is broken: all that is accepted is trained.
    """

    def __init__(self, producers: list[QueueProducer], consumer: QueueConsumer) -> None:
        self.accepted: set[int] = set()
        """Leases whose group the buffer took, as its producer was told."""
        self.trained: Counter[int] = Counter()
        self.version = 0
        self._published = 0
        self._put = asyncio.Condition()
        self._producers = producers
        self._consumer = consumer
        self._tasks = [start(self._generate(producer)) for producer in producers]

    async def _generate(self, producer: QueueProducer) -> None:
        while True:
            leases = await producer.lease(4)
            statuses = await asyncio.gather(*(producer.put(group(lease, self._published)) for lease in leases))
            assert set(statuses) <= {"accepted", "duplicate"}
            async with self._put:
                self.accepted.update(lease.id for lease in leases)
                self._put.notify_all()

    async def accepts(self, count: int) -> None:
        async with self._put:
            await self._put.wait_for(lambda: len(self.accepted) >= count)

    async def _step(self) -> None:
        batch = await self._consumer.next_batch(self.version, self.version)
        self.trained.update(trained_in(batch))
        await self._consumer.acknowledge(self.version, self.version)
        self.version += 1

    async def train(self, steps: int) -> None:
        for _ in range(steps):
            await self._step()
            self._published = self.version  # rollouters commit a version before it is published
            await self._consumer.published(self.version)

    async def finish(self) -> None:
        """Train on all that was granted: without publication nothing more is."""
        while self.version <= self._published + MAX_LAG:
            await self._step()
        await self.accepts(len(self.trained))  # the last producer may hear of it after the trainer

    @property
    def resent(self) -> float:
        return sum(producer.statistics()["queue/resent"] for producer in self._producers)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for client in (*self._producers, self._consumer):
            client.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)


# Connections that break -----------------------------------------------------------------------------------------------


class BreakingWire:
    """A relay before the server that cuts every connection after some random number of bytes, until it is mended."""

    def __init__(self, target: str, seed: int) -> None:
        self._port = int(target.rpartition(":")[2])
        self._random = random.Random(seed)
        self._relays: list[asyncio.Task[None]] = []
        self.cuts = 0
        self.broken = True

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(
            lambda reader, writer: self._relays.append(start(self._relay(reader, writer))), "127.0.0.1", 0
        )
        try:
            yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for relay in self._relays:
                relay.cancel()
            await asyncio.gather(*self._relays, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        left = self._random.randrange(6_000)  # a handshake, a few groups, or less

        async def forward(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            nonlocal left
            while data := await source.read(1 << 16):
                if self.broken and len(data) > left:
                    self.cuts += 1
                    target.write(data[:left])  # in the middle of a frame, mostly
                    return
                left -= len(data)
                target.write(data)
                await target.drain()

        both = [start(forward(reader, back)), start(forward(there, writer))]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            for each in (writer, back):
                each.close()


@pytest.mark.parametrize("seed", range(3))
def test_connections_that_break_at_any_byte_lose_nothing_and_repeat_nothing(seed: int) -> None:
    async def conversation(ring: Ring) -> None:
        wire = BreakingWire(ring.endpoint, seed)
        async with wire.listening() as endpoint:
            run = Run([QueueProducer(endpoint, f"rollouter-{n}") for n in range(2)], QueueConsumer(endpoint, 0, 1))
            try:
                await run.train(8)
                wire.broken = False
                await run.finish()
            finally:
                await run.close()
        assert wire.cuts > 3
        assert run.resent > 0
        assert run.trained == Counter(dict.fromkeys(run.accepted, 1))
        assert ring.buffer.summary()["duplicates_trained"] == 0

    over_sockets(conversation, transport="tcp", per_step=4, max_lag=MAX_LAG, on_stale="wait")


# A server that is killed ----------------------------------------------------------------------------------------------


class ServerProcess:
    """The server in a process of its own, which can be killed."""

    def __init__(self, folder: Path, fsync: str) -> None:
        self.endpoint = f"ipc://{folder}/queue"
        self.journal = folder / "journal"
        self._arguments = (sys.executable, __file__, self.endpoint, str(self.journal), fsync)
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(*self._arguments, cwd=Path(__file__).parent)

    async def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            assert await self._process.wait() == -signal.SIGKILL
            self._process = None


@pytest.mark.parametrize("fsync", ["always", "interval"])
def test_a_server_killed_in_the_middle_of_many_puts_trains_every_accepted_group_exactly_once(fsync: str) -> None:
    async def main(folder: Path) -> ReplayBuffer:
        server = ServerProcess(folder, fsync)
        await server.start()
        producers = [QueueProducer(server.endpoint, f"rollouter-{n}") for n in range(3)]
        run = Run(producers, QueueConsumer(server.endpoint, 0, 1))

        async def killer() -> None:
            for puts in (5, 40, 70, 110):
                await run.accepts(puts)
                await server.kill()
                await server.start()

        try:
            async with asyncio.timeout(HANG_S):
                killing = start(killer())
                await run.train(14)
                await killing
                await run.finish()
        finally:
            await run.close()
            await server.kill()
        assert run.resent > 0
        assert run.trained == Counter(dict.fromkeys(run.accepted, 1))
        assert sum(run.trained.values()) == (14 + MAX_LAG + 1) * PER_STEP
        buffer = make_buffer(fsync)
        open_journal(server.journal, buffer, 0.0, lambda *_: None).close()
        return buffer

    with tempfile.TemporaryDirectory() as folder:
        buffer = asyncio.run(main(Path(folder)))
    assert balance(buffer.ledger) == 0
    assert buffer.summary() == {
        "issued": 17 * PER_STEP,
        "consumed": 17 * PER_STEP,
        "refunded": 0,
        "reissued": 0,
        "duplicates_trained": 0,
        "lost": 0,
    }


def make_buffer(fsync: str) -> ReplayBuffer:
    keys = {"buffer__fsync": fsync, "buffer__segment_bytes": 1 << 15}
    config = settings(per_step=PER_STEP, max_lag=MAX_LAG, on_stale="wait", **keys)
    return ReplayBuffer(config, centred, token_mean)


async def serve(endpoint: str, folder: str, fsync: str) -> None:
    buffer, clock = make_buffer(fsync), RealClock()
    journal = open_journal(Path(folder), buffer, clock.now(), lambda *_: None)
    if buffer.ledger.published < 0:
        buffer.publish(0)
    server = QueueServer(endpoint, buffer, clock, lambda *_: None, lambda error: sys.exit(str(error)), journal=journal)
    await server.run()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
