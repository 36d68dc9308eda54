"""The buffer actor: ledger, queue and replay buffer in one process without torch.

Consumes groups from rollouters; produces leases for them and micro-batches for trainer ranks; waits for requests. With
its journal it comes back from any death with every group that it had acknowledged.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from streamrl.actors.planning import estimators, priority_of
from streamrl.actors.queue_wiring import bind_address, link_keys, store_links
from streamrl.buffers.journaling import open_journal
from streamrl.buffers.queue.server import QueueServer
from streamrl.buffers.queue.stores import StoreJanitor
from streamrl.buffers.replay_buffer import ReplayBuffer
from streamrl.clock import RealClock
from streamrl.errors import StreamRLError
from streamrl.runtime.actor import Actor
from streamrl.runtime.messages import HolderLost, Message, Statistics
from streamrl.schema import Config


def make_replay_buffer(config: Config) -> ReplayBuffer:
    """An empty replay buffer that plans as the settings say."""
    return ReplayBuffer(
        config,
        *estimators(config),
        priority_of(config.buffer.priority),
    )


class Buffer(Actor):
    _server: QueueServer | None = None

    async def setup(self) -> dict[str, Any]:
        clock = RealClock()
        self._buffer = make_replay_buffer(self.config)
        self._fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        journal = None
        if self.config.buffer.journal:
            journal = open_journal(Path(self.spec.run_dir, "journal", "buffer"), self._buffer, clock.now(), self.emit)
            self.cleanup.callback(journal.close)
        janitor = None
        if links := store_links(self.spec):
            janitor = StoreJanitor(links, self._buffer.ledger)
            self.cleanup.callback(janitor.close)
        self._server = QueueServer(
            bind_address(self.spec, "queue"), self._buffer, clock, self.emit, self._end,
            journal=journal, janitor=janitor, keys=link_keys(self.spec),
        )  # fmt: skip
        self.cleanup.callback(self._server.close)
        self._server.bind()
        return {"endpoint": self._server.endpoint}

    async def run(self) -> dict[str, Any]:
        assert self._server is not None
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._server.run())
            await self._fatal
        return {}

    def _end(self, error: StreamRLError) -> None:
        self._fatal.set_exception(error)

    def receive(self, message: Message) -> None:
        match message:
            case HolderLost() if self._server is not None:
                self._server.holder_lost(message.holder)
            case _:
                super().receive(message)

    def gauges(self) -> dict[str, float]:
        if self._server is None:
            return {}
        return {key: float(value) for key, value in self._buffer.summary().items()}

    async def close(self) -> None:
        self.send(Statistics(values=self.gauges()))
        await super().close()
