"""The buffer actor: ledger, queue and replay buffer in one process without torch.

Consumes groups from rollouters; produces leases for them and micro-batches for trainer ranks; waits for requests.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from streamrl.buffers.replay_buffer import ReplayBuffer
from streamrl.buffers.transfer_queue import QueueServer
from streamrl.clock import RealClock
from streamrl.errors import EnvironmentFailed
from streamrl.loss.advantages import advantages
from streamrl.loss.reduce import token_weights
from streamrl.runtime.actor import Actor, State
from streamrl.runtime.messages import HolderLost, Message, Statistics


class Buffer(Actor):
    async def setup(self) -> dict[str, Any]:
        loss = self.config.loss
        self._buffer = ReplayBuffer(
            self.config,
            partial(advantages, name=loss.advantage),
            partial(token_weights, name=loss.aggregation),
        )
        self._fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._server = QueueServer(self.spec.endpoint("queue"), self._buffer, RealClock(), self.emit, self._end)
        return {}

    async def run(self) -> dict[str, Any]:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._server.run())
            await self._fatal
        return {}

    def _end(self, reason: str) -> None:
        self._fatal.set_exception(EnvironmentFailed(reason))

    def receive(self, message: Message) -> None:
        match message:
            case HolderLost():
                self._server.holder_lost(message.holder)
            case _:
                super().receive(message)

    def gauges(self) -> dict[str, float]:
        if self.state is State.STARTING:
            return {}
        return {key: float(value) for key, value in self._buffer.summary().items()}

    async def close(self) -> None:
        self.send(Statistics(values=self.gauges()))
        await super().close()
