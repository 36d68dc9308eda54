"""A store actor: payloads of its share of the leases, in one process without torch (``buffer.shards`` over 1).

Consumes payloads from rollouters; produces columns for trainer ranks; waits for requests.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from streamrl.actors.queue_wiring import bind_address, link_keys
from streamrl.buffers.queue.store_server import StoreServer
from streamrl.clock import RealClock
from streamrl.runtime.actor import Actor


class Store(Actor):
    _server: StoreServer | None = None

    async def setup(self) -> dict[str, Any]:
        self._fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        folder = Path(self.spec.run_dir, "journal", self.spec.name) if self.config.buffer.journal else None
        self._server = StoreServer(
            bind_address(self.spec, self.spec.name), self.config.buffer, RealClock(), self.emit,
            self._fatal.set_exception, folder=folder, keys=link_keys(self.spec),
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

    def gauges(self) -> dict[str, float]:
        return self._server.statistics() if self._server is not None else {}
