"""Engines behind sockets, as engine hosts serve them, in one process; and an engine that samples when it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from streamrl.clock import RealClock
from streamrl.engines.pool import EnginePool
from streamrl.engines.remote import RemoteEngine
from streamrl.engines.serving import EngineServer, hosted
from streamrl.errors import StreamRLError
from streamrl.ports import Engine, EngineFacts, EngineStatistics
from streamrl.types import Generation, SamplingParams


class Scripted:
    """``ports.Engine`` whose requests end when ``finish`` is called, with tokens that name the engine."""

    def __init__(self, name: int = 0) -> None:
        self.version = 0
        self.paused = False
        self.preemptions = 0
        self.under_way: dict[asyncio.Future[None], list[int]] = {}
        """Prompts that are being sampled for."""
        self.arrived = asyncio.Event()
        self._name = name

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        if not prompt_ids:
            raise ValueError("sampling: the prompt is empty")
        ends: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.under_way[ends] = list(prompt_ids)
        self.arrived.set()
        try:
            await ends
        finally:
            del self.under_way[ends]
        tokens = np.full(2, self._name, dtype=np.int32)
        return Generation(tokens, np.zeros(2, dtype=np.float32), [(self.version, 2)], "length")

    def finish(self) -> None:
        """Whatever is under way ends."""
        for ends in self.under_way:
            if not ends.done():
                ends.set_result(None)

    async def holds(self, count: int) -> None:
        """Return once so many requests are under way."""
        while len(self.under_way) < count:
            self.arrived.clear()
            await self.arrived.wait()

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        return np.full(len(token_ids), temperature, dtype=np.float32)

    async def pause(self) -> None:
        self.paused = True

    async def resume(self) -> None:
        self.paused = False

    async def load(self, version: int, tensors: Mapping[str, object]) -> None:
        self.version = version

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(len(self.under_way), 0, 0, 0, 0.0, self.version, preemptions=self.preemptions)

    def facts(self) -> EngineFacts:
        return EngineFacts("scripted 1", "float32", "float32", True, "processed")

    async def close(self) -> None:
        self.finish()


class Host:
    """One engine on a socket; ``die`` ends it as the kernel would, ``begin`` puts a successor in its place."""

    def __init__(self, endpoint: str, engine: Engine, slots: int) -> None:
        self.endpoint = endpoint
        self.engine = hosted(engine)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.require_intact: Callable[[], None] = lambda: None
        self.server: EngineServer
        self._slots = slots
        self._task: asyncio.Task[None]

    def begin(self, *, serve: bool = True) -> None:
        """``serve``: the engine has its weights; else it waits for ``server.open``."""
        self.server = EngineServer(
            self.endpoint, self.engine, self._slots, RealClock(), self._event, self._fatal,
            require_intact=lambda: self.require_intact(),
        )  # fmt: skip
        self.server.bind()
        self._task = asyncio.create_task(self.server.run())
        if serve:
            self.server.open()

    async def die(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def ended(self) -> None:
        """Return or raise what the server's ``run`` does."""
        await self._task

    def _event(self, name: str, fields: dict[str, Any]) -> None:
        self.events.append((name, fields))

    @staticmethod
    def _fatal(error: StreamRLError) -> None:
        raise AssertionError(error)


class Shared:
    """Engines that a pool samples from. As ``ports.Engine`` itself, over the first: weights by its host, the rest by
    its socket."""

    def __init__(self, engines: Sequence[Engine], slots: int) -> None:
        self._folder = tempfile.mkdtemp()
        self.hosts = [Host(f"ipc://{self._folder}/engine-{i}", engine, slots) for i, engine in enumerate(engines)]
        self.remotes = self._connect("rollouter-0.0")
        self.pool = EnginePool(self.remotes)
        self._following: list[asyncio.Task[None]] = []

    def _connect(self, holder: str) -> list[RemoteEngine]:
        return [RemoteEngine(host.endpoint, f"engine-{i}", holder) for i, host in enumerate(self.hosts)]

    def rollouter(self, holder: str) -> EnginePool:
        """A further rollouter that shares the engines."""
        pool = EnginePool(self._connect(holder))
        self._following.append(asyncio.create_task(pool.follow()))
        return pool

    async def begin(self) -> None:
        """Start the hosts; return once the first rollouter has heard of each."""
        connected = [asyncio.Event() for _ in self.hosts]
        for host, remote, event in zip(self.hosts, self.remotes, connected, strict=True):
            host.begin()
            remote.changed = _also(remote.changed, event.set)
        self._following.append(asyncio.create_task(self.pool.follow()))
        for event in connected:
            await event.wait()

    @property
    def version(self) -> int:
        return self.hosts[0].engine.version

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        return await self.pool.generate(prompt_ids, params)

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        return await self.hosts[0].engine.score(token_ids, temperature)

    async def pause(self) -> None:
        await self.hosts[0].engine.pause()

    async def resume(self) -> None:
        await self.hosts[0].engine.resume()

    async def load(self, version: int, tensors: Mapping[str, object]) -> None:
        await self.hosts[0].engine.load(version, tensors)

    def statistics(self) -> EngineStatistics:
        return self.pool.statistics()

    def facts(self) -> EngineFacts:
        return self.hosts[0].engine.facts()

    async def close(self) -> None:
        for task in self._following:
            task.cancel()
        await asyncio.gather(*self._following, return_exceptions=True)
        await self.pool.close()
        for host in self.hosts:
            await host.die()
            await host.engine.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _also(first: Callable[[], None], then: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        first()
        then()

    return both


@contextlib.asynccontextmanager
async def sharing(*engines: Engine, slots: int = 8) -> AsyncIterator[Shared]:
    """Bounded: a test that hangs fails."""
    async with asyncio.timeout(30):
        shared = Shared(engines, slots)
        try:
            await shared.begin()
            yield shared
        finally:
            await shared.close()
