"""Builders that the buffer tests share."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from streamrl.buffers.queue_clients import QueueConsumer, QueueProducer
from streamrl.buffers.replay_buffer import ReplayBuffer
from streamrl.buffers.transfer_queue import QueueServer
from streamrl.clock import Clock, ManualClock
from streamrl.schema import Config
from streamrl.types import Group, Lease, Trajectory, VersionSpans


def centred(rewards: list[np.ndarray]) -> list[np.ndarray]:
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


class Ring:
    """A served buffer on an ipc socket, its clients, and what it reported."""

    def __init__(self, buffer: ReplayBuffer, clock: Clock, endpoint: str) -> None:
        self.buffer = buffer
        self.clock = clock
        self.endpoint = endpoint
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.fatal: list[str] = []
        self.server = QueueServer(endpoint, buffer, clock, self._event, self.fatal.append)
        self.task: asyncio.Task[None] | None = None
        self._seen = asyncio.Event()
        self._clients: list[QueueProducer | QueueConsumer] = []

    def _event(self, name: str, fields: dict[str, Any]) -> None:
        self.events.append((name, fields))
        self._seen.set()

    async def event(self, name: str) -> dict[str, Any]:
        """The fields of the first event of that name, now or later."""
        while True:
            for seen, fields in self.events:
                if seen == name:
                    return fields
            self._seen.clear()
            await self._seen.wait()

    def producer(self, name: str) -> QueueProducer:
        self._clients.append(QueueProducer(self.endpoint, name, clock=self.clock))
        return self._clients[-1]  # type: ignore[return-value]

    def consumer(self, rank: int = 0, ranks: int = 1) -> QueueConsumer:
        self._clients.append(QueueConsumer(self.endpoint, rank, ranks, clock=self.clock))
        return self._clients[-1]  # type: ignore[return-value]

    def close_clients(self) -> None:
        for client in self._clients:
            client.close()


@contextlib.asynccontextmanager
async def serving(buffer: ReplayBuffer, clock: Clock | None = None) -> AsyncIterator[Ring]:
    """A running server; everything is closed at the end. A test that hangs fails after ten seconds."""
    with tempfile.TemporaryDirectory() as folder:
        ring = Ring(buffer, clock or ManualClock(), f"ipc://{folder}/queue")
        ring.task = task = asyncio.create_task(ring.server.run())
        try:
            async with asyncio.timeout(10):
                yield ring
        finally:
            ring.close_clients()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


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
