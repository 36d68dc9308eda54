"""A gateway on loopback before a scripted engine, and processes that attach to it, all in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiohttp import ClientSession
from scripted import CharTokenizer, lease, settings

from streamrl.envs.attach.agent import Agent
from streamrl.envs.attach.client import Attachment, Played
from streamrl.envs.attach.desk import AttachDesk
from streamrl.envs.attach.protocol import Bye, Closed, Welcome
from streamrl.envs.environment import load_environment
from streamrl.envs.gateway import Gateway, run_token
from streamrl.envs.group import GroupResult, GroupRunner
from streamrl.envs.split import Split
from streamrl.schema import Config

DEADLINE_S = 90.0


async def until(condition: Callable[[], bool]) -> None:
    """Let everything else run until ``condition`` holds; the scene's deadline ends one that never does."""
    while not condition():  # noqa: ASYNC110 counters of a scripted engine have no event
        await asyncio.sleep(0)


class Server:
    """What a rollouter has, without the ring."""

    def __init__(self, run_dir: Path, config: Config, engine: Any, tokenizer: Any) -> None:
        self.config = config
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.token = run_token(run_dir)
        self.changed = asyncio.Event()
        self._leases = itertools.count()
        self._gateway = Gateway(config.gateway, 0)
        self._tokenizer = tokenizer
        self._engine = engine
        split = Split(load_environment(config), config.seed, held_out=0.0)
        self.native = self._runner(split)
        welcome = Welcome(
            run="test", rollouter="rollouter-0", environment=split.environment.name, group_size=config.group.size,
            timeout_s=config.env.timeout_s, restart_s=5.0, seed=config.seed, held_out=0.1,
        )  # fmt: skip
        self.desk = AttachDesk(split, self._runner, welcome, self._emit)
        self.desk.changed = self.changed.set
        self._gateway.add_attach(self.token, self.desk.serve)

    @property
    def url(self) -> str:
        return self._gateway.url

    def _runner(self, split: Split) -> GroupRunner:
        return GroupRunner(split, self._engine, self._tokenizer, self.config, self._gateway)

    def _emit(self, event: str, fields: dict[str, Any]) -> None:
        self.events.append((event, fields))

    async def agent(self) -> Agent:
        """A worker, as soon as one is free."""
        while (agent := self.desk.take()) is None:
            self.changed.clear()
            await self.changed.wait()
        return agent

    async def play(self, size: int = 2, prompt: int = 0) -> GroupResult:
        """What an attached process makes of a lease."""
        agent = await self.agent()
        try:
            return await agent.run_group(replace(lease(size, prompt), id=next(self._leases)))
        finally:
            agent.release()

    async def start(self) -> None:
        await self._gateway.start()

    async def stop(self) -> None:
        await self.desk.close(ended=True)
        await self._gateway.stop()


class Process:
    """An attached process."""

    def __init__(self, server: Server, played: Played, workers: int, token: str | None = None) -> None:
        self.closed: list[Closed] = []
        self.attachment = Attachment(
            server.url, server.token if token is None else token, played, workers,
            on_welcome=lambda _: None, on_closed=self.closed.append,
        )  # fmt: skip
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> Bye:
        async with ClientSession() as http:
            return await self.attachment.run(http)


class Stage:
    """A server and what attaches to it."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._processes: list[Process] = []

    def attach(self, name: str, workers: int = 1, own_tasks: bool = False, token: str | None = None) -> Process:
        """Attach a process that plays ``name``, such as ``user_episodes:plain``."""
        played = Played(load_environment(settings(name)), own_tasks)
        process = Process(self.server, played, workers, token)
        self._processes.append(process)
        return process

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Stage]:
        await self.server.start()
        try:
            yield self
        finally:
            await self.server.stop()
            for process in self._processes:
                process.task.cancel()
            await asyncio.gather(*(each.task for each in self._processes), return_exceptions=True)


def on_stage(
    run_dir: Path,
    config: Config,
    engine: Callable[[], Any],
    scene: Callable[[Stage], Awaitable[None]],
    tokenizer: Any = None,
) -> Server:
    """Run ``scene`` with a server whose engine ``engine`` makes; nothing of it may take long."""

    async def main() -> Server:
        stage = Stage(Server(run_dir, config, engine(), tokenizer or CharTokenizer()))
        async with asyncio.timeout(DEADLINE_S), stage.running():
            await scene(stage)
        return stage.server

    return asyncio.run(main())
