"""Builders that the buffer tests share."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from streamrl.buffers.held import PutStatus
from streamrl.buffers.journal.writer import Journal
from streamrl.buffers.journaling import open_journal
from streamrl.buffers.ledger import Ledger
from streamrl.buffers.links.link_keys import LinkKeys
from streamrl.buffers.queue.clients import QueueConsumer, QueueProducer
from streamrl.buffers.queue.server import QueueServer
from streamrl.buffers.replay_buffer import ReplayBuffer
from streamrl.buffers.wire.groups import pack_group
from streamrl.buffers.wire.messages import GroupMeta, MicroBatches
from streamrl.clock import Clock, ManualClock
from streamrl.schema import Config
from streamrl.types import Group, Lease, RankBatch, Trajectory, VersionSpans

HANG_S = 20.0
"""After which a test is taken to hang."""


def centred(rewards: list[np.ndarray], *_: list[np.ndarray]) -> list[np.ndarray]:
    return [r - r.mean() for r in rewards]


def token_mean(counts: list[np.ndarray]) -> list[np.ndarray]:
    total = sum(int(c.sum()) for c in counts)
    return [np.full(len(c), 1.0 / total) for c in counts]


def settings(*, per_step: int = 2, size: int = 2, max_lag: int = 1, on_stale: str = "mask", **others: Any) -> Config:
    """A small run; ``others`` are dotted keys with ``__`` for the dot."""
    config = Config(max_lag=max_lag, on_stale=on_stale)
    config.group.per_step, config.group.size = per_step, size
    config.model.max_length = 64
    for key, value in others.items():
        section, name = key.split("__")
        setattr(getattr(config, section), name, value)
    return config


def replay_buffer(**keys: Any) -> ReplayBuffer:
    return ReplayBuffer(settings(**keys), centred, token_mean)


def trajectory(
    versions: VersionSpans, *, prompt: Sequence[int] = (1, 2, 3), reward: float = 0.0, token: int = 7, **others: Any
) -> Trajectory:
    """A prompt, then as many sampled tokens as ``versions`` counts."""
    count = sum(n for _, n in versions)
    return Trajectory(
        tokens=np.array([*prompt, *[token] * count], dtype=np.int32),
        sampled=np.array([False] * len(prompt) + [True] * count),
        behaviour=np.array([0.0] * len(prompt) + [-0.5] * count, dtype=np.float32),
        versions=versions,
        reward=reward,
        **others,
    )


def group(lease: Lease, version: int = 0, *, rewards: Sequence[float] = (0.0, 1.0), env: str = "sums") -> Group:
    """The group of a lease, two tokens of ``version`` per trajectory."""
    return Group(lease.id, lease.prompt, env, [trajectory([(version, 2)], reward=reward) for reward in rewards])


def describe(group: Group) -> GroupMeta:
    return pack_group(group)[0]


def put(buffer: ReplayBuffer, group: Group) -> PutStatus:
    """Deliver a group by value."""
    return buffer.put(*pack_group(group))


def leases_in(parts: Sequence[MicroBatches]) -> list[int]:
    """Leases of the groups in the micro-batches of all ranks, one entry per part."""
    return sorted(part.lease for micro_batches in parts for batch in micro_batches for part in batch)


def trained_in(*ranks: RankBatch) -> list[int]:
    """The same of what the ranks received."""
    return sorted(part.lease for rank in ranks for batch in rank.micro_batches for part in batch)


def balance(ledger: Ledger) -> int:
    """0, or the ledger's invariant is broken."""
    return ledger.issued - ledger.consumed - ledger.in_flight - ledger.ready - ledger.refunded


def durable_state(buffer: ReplayBuffer) -> Any:
    """What a restart must bring back. Deadlines start anew, and refusals that changed nothing were not written down."""
    state = msgspec.to_builtins(buffer.snapshot(), order="sorted")
    return _without(_without(state, "expires_at"), "refused")


def _without(state: Any, key: str) -> Any:
    if isinstance(state, dict):
        return {name: _without(value, key) for name, value in state.items() if name != key}
    return [_without(value, key) for value in state] if isinstance(state, list | tuple) else state


def with_column(lease: Lease, nbytes: int) -> Group:
    """A group whose first trajectory has so many bytes of a user column."""
    made = group(lease)
    made.trajectories[0].columns["router"] = np.zeros(nbytes, dtype=np.uint8)
    return made


class Ring:
    """A served buffer on a socket, its clients, and what it reported; it can die and come back."""

    def __init__(
        self, config: Config, clock: Clock, endpoint: str, journal: Path | None = None, keys: LinkKeys | None = None
    ) -> None:
        self.clock = clock
        self.endpoint = endpoint
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.fatal: list[str] = []
        self.buffer: ReplayBuffer
        self.server: QueueServer
        self.journal: Journal | None = None
        self.task: asyncio.Task[None] | None = None
        self.conversation: asyncio.Task[None] | None = None
        """Cancelled when the server ends by an error: nobody would answer it."""
        self._config = config
        self._folder = journal
        self._keys = keys
        self._context: zmq.Context[zmq.Socket[Any]]
        self._seen = asyncio.Event()
        self._clients: list[QueueProducer | QueueConsumer] = []

    def start(self, buffer: ReplayBuffer | None = None) -> None:
        """Serve a new buffer: empty, or what the journal holds."""
        self.buffer = buffer or ReplayBuffer(self._config, centred, token_mean)
        if self._folder is not None:
            self.journal = open_journal(self._folder, self.buffer, self.clock.now(), self._event)
        if self.buffer.ledger.published < 0:
            self.buffer.publish(0)
        self._context = zmq.Context()
        self.server = QueueServer(
            self.endpoint, self.buffer, self.clock, self._event, lambda error: self.fatal.append(str(error)),
            journal=self.journal, keys=self._keys, context=self._context,
        )  # fmt: skip
        self.server.bind()
        self.endpoint = self.server.endpoint
        self.task = asyncio.create_task(self.server.run())
        self.task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None and self.conversation is not None:
            self.conversation.cancel()

    async def stop(self) -> None:
        """The server is gone, and with it all that was not in the journal."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait([self.task])
            self.server.close()  # it may not have begun to run
            self._context.destroy(linger=0)  # waits until the endpoint is free
        if self.journal is not None:
            self.journal.close()
            self.journal = None

    async def restart(self) -> None:
        await self.stop()
        self.start()

    def _event(self, name: str, fields: dict[str, Any]) -> None:
        self.events.append((name, fields))
        self._seen.set()

    def named(self, name: str) -> list[dict[str, Any]]:
        """The fields of every event of that name so far."""
        return [fields for seen, fields in self.events if seen == name]

    async def event(self, name: str) -> dict[str, Any]:
        """The fields of the first event of that name, now or later."""
        while not (found := self.named(name)):
            self._seen.clear()
            await self._seen.wait()
        return found[0]

    def producer(self, name: str, **others: Any) -> QueueProducer:
        producer = QueueProducer(self.endpoint, name, clock=self.clock, **{"keys": self._keys} | others)
        self._clients.append(producer)
        return producer

    def consumer(self, rank: int = 0, ranks: int = 1, **others: Any) -> QueueConsumer:
        consumer = QueueConsumer(self.endpoint, rank, ranks, clock=self.clock, **{"keys": self._keys} | others)
        self._clients.append(consumer)
        return consumer

    @functools.cached_property
    def probe(self) -> QueueConsumer:
        """A client that nobody knows."""
        return self.consumer(99, 100)

    def close_clients(self) -> None:
        for client in self._clients:
            client.close()


@contextlib.asynccontextmanager
async def serving(
    config: Config,
    clock: Clock | None = None,
    *,
    buffer: ReplayBuffer | None = None,
    transport: str = "ipc",
    journaled: bool = False,
    keys: LinkKeys | None = None,
) -> AsyncIterator[Ring]:
    """A running server with version 0 published; everything is closed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/queue" if transport == "ipc" else "tcp://127.0.0.1:*"
        journal = Path(folder) / "journal" if journaled else None
        ring = Ring(config, clock or ManualClock(), endpoint, journal, keys)
        ring.start(buffer)
        try:
            async with asyncio.timeout(HANG_S):
                yield ring
        finally:
            ring.close_clients()
            await ring.stop()


Conversation = Callable[[Ring], Coroutine[Any, Any, None]]


def over_sockets(
    conversation: Conversation,
    *,
    clock: ManualClock | None = None,
    transport: str = "ipc",
    journaled: bool = False,
    keys: LinkKeys | None = None,
    **others: Any,
) -> None:
    """Run one conversation against a served buffer; the ledger's invariant holds at its end."""

    async def main() -> None:
        async with serving(settings(**others), clock, transport=transport, journaled=journaled, keys=keys) as ring:
            ring.conversation = asyncio.create_task(conversation(ring))
            try:
                await ring.conversation
            except asyncio.CancelledError:
                if ring.task is not None and ring.task.done():
                    await ring.task
                raise
            assert balance(ring.buffer.ledger) == 0

    asyncio.run(main())


async def round_trip(ring: Ring) -> None:
    """One request that changes nothing, answered."""
    await ring.probe.published(0)


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


def raw_client(ring: Ring, name: str) -> zmq.asyncio.Socket:
    """A bare socket of that name, for messages that no client would send; close it."""
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.linger = 0
    socket.setsockopt(zmq.IDENTITY, f"{name}#{uuid.uuid4().hex[:6]}".encode())
    socket.connect(ring.endpoint)
    return socket
