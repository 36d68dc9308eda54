"""An engine that several rollouters share (``rollouters_per_engine``, ``engine.urls``), in a process of its own.

Consumes weights and requests; produces continuations; waits for requests. It is the member of the weight plane in place
of the rollouters that sample from it. When it dies, what it was sampling is sampled by another host, or by its
successor once that has the newest weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from streamrl.actors.engine_loading import load_engine
from streamrl.actors.holding import Holding
from streamrl.actors.queue_wiring import bind_address, link_keys
from streamrl.clock import RealClock
from streamrl.engines.pool import EnginePool
from streamrl.engines.remote import RemoteEngine
from streamrl.engines.serving import EngineServer, hosted
from streamrl.runtime.actor import Actor, ActorSpec, State
from streamrl.runtime.messages import HolderLost, Message
from streamrl.sharing import engine_hosts


class EngineHost(Actor):
    async def setup(self) -> dict[str, Any]:
        self._fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        urls = self.config.engine.urls
        url = urls[self.spec.index] if urls else ""
        engine = hosted(await load_engine(self.config, self.spec.model, url, self.spec.ipc_dir))
        self.cleanup.push_async_callback(engine.close)
        self._holding = Holding(self, engine)
        self._server = EngineServer(
            bind_address(self.spec, self.spec.name), engine, self.config.engine.slots, RealClock(), self.emit,
            self._fatal.set_exception, require_intact=self._holding.require_intact, keys=link_keys(self.spec),
        )  # fmt: skip
        self.cleanup.callback(self._server.close)
        self._server.bind()
        info = {"endpoint": self._server.endpoint, "engine": self.config.engine.name, "slots": self.config.engine.slots}
        return info | ({"url": url} if url else {})

    async def run(self) -> dict[str, Any]:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._server.run())
            await self._holding.begin(tasks)
            self._server.open()
            await self._fatal
        return {}

    def receive(self, message: Message) -> None:
        if not isinstance(message, HolderLost):
            super().receive(message)
        elif self.state is not State.STARTING:  # before, nobody has a request here
            self._server.forget(message.holder)

    def gauges(self) -> dict[str, float]:
        return self._holding.gauges()


def make_pool(spec: ActorSpec, waiting: Callable[[str], AbstractContextManager[None]]) -> EnginePool | None:
    """A rollouter's end of the engines that it shares; None where it holds its own."""
    names = [f"engine-{index}" for index in range(engine_hosts(spec.config))]
    if not names:
        return None
    keys = link_keys(spec)
    return EnginePool([RemoteEngine(spec.endpoint(name), name, spec.holder, keys) for name in names], waiting)
