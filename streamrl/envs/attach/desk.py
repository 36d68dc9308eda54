"""Which processes are attached to a rollouter, and which of them plays the next lease."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from aiohttp import WSMsgType, web

from streamrl.envs.attach.agent import Agent, own_environment, play_elsewhere
from streamrl.envs.attach.protocol import (
    HEARTBEAT_S,
    MAX_CALLS,
    MESSAGE_BYTES,
    PROTOCOL,
    Bye,
    Hello,
    Welcome,
    decode_from_process,
    encode,
)
from streamrl.envs.group import GroupRunner
from streamrl.envs.split import Split
from streamrl.errors import WireError

HELLO_S = 10.0
"""Seconds that a process has for its first message."""

GOODBYE_S = 2.0
"""Seconds that processes have to hang up once the rollouter said good-bye."""

MAX_AGENTS = 256
"""Attached to one rollouter at once (C4)."""


class AttachDesk:
    """Attached processes of one rollouter. ``emit(event, fields)`` gets ``agent_attached``, ``agent_detached``,
    ``agent_lost`` and ``malformed_frame``."""

    def __init__(
        self,
        split: Split,
        make_runner: Callable[[Split], GroupRunner],
        welcome: Welcome,
        emit: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self._split = split
        self._make_runner = make_runner
        self._welcome = welcome
        self._emit = emit
        self.changed: Callable[[], None] = lambda: None
        """Called whenever a worker may have become free."""
        self._agents: list[Agent] = []
        self._left = asyncio.Event()

    @property
    def taken(self) -> int:
        """Leases that attached processes play now."""
        return sum(agent.taken for agent in self._agents)

    @property
    def free(self) -> int:
        """Workers that could take a lease now."""
        return sum(agent.free for agent in self._agents)

    def take(self) -> Agent | None:
        """An agent one of whose workers is now taken, the one with the most free; None where none is free."""
        agent = max(self._agents, key=lambda each: each.free, default=None)
        if agent is None or not agent.free:
            return None
        agent.take()
        return agent

    async def close(self, ended: bool) -> None:
        """Say good-bye to all, and wait a little for them to hang up. ``ended``: the run is over, not this alone."""
        bye = Bye("ended", "the run has ended") if ended else Bye("leaving", "the rollouter ends")
        for agent in self._agents:
            agent.end(bye)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                while self._agents:
                    self._left.clear()
                    await self._left.wait()

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        """The whole conversation with one process; its caller has checked the token."""
        socket = web.WebSocketResponse(heartbeat=HEARTBEAT_S, max_msg_size=MESSAGE_BYTES, compress=False)
        await socket.prepare(request)
        sender = f"{request.remote}"
        try:
            hello = await self._hello(socket)
            sender = f"{hello.agent} at {request.remote}"
            self._check_room(hello)
        except WireError as error:
            self._emit("malformed_frame", {"sender": sender, "error": str(error)})
            await socket.send_str(encode(Bye("refused", f"{error}"[:1_000])))
            await socket.close()
            return socket
        await self._attached(hello, socket, sender)
        return socket

    async def _attached(self, hello: Hello, socket: web.WebSocketResponse, sender: str) -> None:
        agent = Agent(hello, socket, self._make_runner(self._played(hello)), self.changed)
        fields = {"agent": agent.name, "workers": agent.workers, "address": sender}
        agent.post(self._welcome)
        self._agents.append(agent)
        self._emit("agent_attached", fields)
        self.changed()
        writer = asyncio.create_task(agent.write())
        try:
            await agent.listen()
        except WireError as error:
            self._emit("malformed_frame", {"sender": sender, "error": str(error)})
            agent.end(Bye("refused", f"{error}"[:1_000]))
            await writer
        finally:
            writer.cancel()
            self._agents.remove(agent)
            self._left.set()
            self._emit("agent_lost" if agent.lost_leases else "agent_detached", fields | {"leases": agent.lost_leases})
            self.changed()
            await asyncio.wait({writer})  # last: the end of the connection may cancel this wait

    async def _hello(self, socket: web.WebSocketResponse) -> Hello:
        try:
            async with asyncio.timeout(HELLO_S):
                message = await socket.receive()
        except TimeoutError:
            raise WireError(f"expected a hello within {HELLO_S:g} s") from None
        if message.type is not WSMsgType.TEXT:
            raise WireError(f"expected a hello, got {message.type.name.lower()}")
        hello = decode_from_process(message.data)
        if not isinstance(hello, Hello):
            raise WireError(f"expected a hello, got {type(hello).__name__.lower()}")
        if hello.protocol != PROTOCOL:
            raise WireError(f"protocol {hello.protocol} is not spoken here; this run speaks {PROTOCOL}")
        return hello

    def _check_room(self, hello: Hello) -> None:
        most = max(1, MAX_CALLS // self._welcome.group_size)
        if hello.workers > most:
            size = self._welcome.group_size
            raise WireError(f"at most {most} workers of {size} episodes each per rollouter, got {hello.workers}")
        if len(self._agents) >= MAX_AGENTS:
            raise WireError(f"{MAX_AGENTS} processes are attached to this rollouter already")

    def _played(self, hello: Hello) -> Split:
        """What the process plays: the run's tasks, or its own, which it splits itself."""
        if hello.own_tasks:
            return Split(own_environment(hello.agent), self._welcome.seed, held_out=0.0)
        split = copy.copy(self._split)
        split.environment = replace(split.environment, episode=play_elsewhere)
        return split
