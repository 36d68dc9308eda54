"""The client side of the OpenEnv protocol: one episode over a WebSocket, or over plain HTTP.

::

    ws    {"type": "reset", "data": {seed, …}}   → {"type": "observation", "data": {observation, reward, done}}
          {"type": "step",  "data": action}      → the same, or {"type": "error", "data": {message, code}}
    http  POST /reset {seed, …}   POST /step {"action": action}   → {observation, reward, done}

A WebSocket is a session with an environment of its own. Plain HTTP has no sessions: servers of the openenv package make
a new environment for every request, so there it serves environments of a single step; others keep one for all.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from streamrl.errors import EnvironmentFailed

if TYPE_CHECKING:
    import aiohttp

MAX_ANSWER_BYTES = 4 << 20
"""Of one answer of a server."""


@dataclass(frozen=True)
class Observed:
    """What a reset or a step gave."""

    observation: dict[str, Any]
    reward: float | None
    done: bool


class Server(Protocol):
    """One episode on a server. Every call raises ``EnvironmentFailed`` that names the url and what went wrong."""

    url: str

    async def reset(self, arguments: Mapping[str, Any]) -> Observed: ...

    async def step(self, action: Mapping[str, Any]) -> Observed: ...


@asynccontextmanager
async def over_websocket(url: str, headers: Mapping[str, str], timeout_s: float) -> AsyncIterator[Server]:
    import aiohttp

    async with aiohttp.ClientSession(headers=headers) as http:
        async with _named(url, "the connection", timeout_s):
            socket = await http.ws_connect(f"{url.rstrip('/')}/ws", max_msg_size=MAX_ANSWER_BYTES)
        try:
            yield _WebSocketServer(url, socket, timeout_s)
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await socket.close()


@asynccontextmanager
async def over_http(url: str, headers: Mapping[str, str], timeout_s: float) -> AsyncIterator[Server]:
    import aiohttp

    async with aiohttp.ClientSession(headers=headers) as http:
        yield _HttpServer(url, http, timeout_s)


Connect = Callable[[str, Mapping[str, str], float], AbstractAsyncContextManager[Server]]
TRANSPORTS: dict[str, Connect] = {"ws": over_websocket, "http": over_http}


class _WebSocketServer:
    def __init__(self, url: str, socket: aiohttp.ClientWebSocketResponse, timeout_s: float) -> None:
        self.url = url
        self._socket = socket
        self._timeout_s = timeout_s

    async def reset(self, arguments: Mapping[str, Any]) -> Observed:
        return await self._exchange("reset", arguments)

    async def step(self, action: Mapping[str, Any]) -> Observed:
        return await self._exchange("step", action)

    async def _exchange(self, kind: str, data: Mapping[str, Any]) -> Observed:
        import aiohttp

        async with _named(self.url, kind, self._timeout_s):
            await self._socket.send_str(msgspec.json.encode({"type": kind, "data": data}).decode())
            message = await self._socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            closed = f"the server closed the session (close code {self._socket.close_code})"
            raise EnvironmentFailed(f"{self.url}: {kind}: {closed}")
        answer = _decoded(message.data, self.url, kind)
        if answer.get("type") != "observation":
            problem = answer.get("data")
            if not isinstance(problem, dict):
                raise EnvironmentFailed(f"{self.url}: {kind}: expected an observation, got {_short(answer)}")
            detail = _short(problem.get("message", problem)) + _hint(problem.get("code"))
            raise EnvironmentFailed(f"{self.url}: {kind} was refused: {detail}")
        return _observed(answer.get("data"), self.url, kind)


class _HttpServer:
    def __init__(self, url: str, http: aiohttp.ClientSession, timeout_s: float) -> None:
        self.url = url
        self._http = http
        self._timeout_s = timeout_s

    async def reset(self, arguments: Mapping[str, Any]) -> Observed:
        return await self._post("reset", arguments)

    async def step(self, action: Mapping[str, Any]) -> Observed:
        return await self._post("step", {"action": action})

    async def _post(self, kind: str, body: Mapping[str, Any]) -> Observed:
        async with (
            _named(self.url, kind, self._timeout_s),
            self._http.post(f"{self.url.rstrip('/')}/{kind}", json=body) as response,
        ):
            content = bytearray()
            async for chunk in response.content.iter_chunked(1 << 16):
                content += chunk
                if len(content) > MAX_ANSWER_BYTES:
                    raise EnvironmentFailed(f"{self.url}: {kind}: the answer is larger than {MAX_ANSWER_BYTES} bytes")
        if response.status != 200:
            raise EnvironmentFailed(
                f"{self.url}: {kind} was answered with {response.status}: {_short(content.decode(errors='replace'))}"
            )
        return _observed(_decoded(bytes(content), self.url, kind), self.url, kind)


@asynccontextmanager
async def _named(url: str, what: str, timeout_s: float) -> AsyncIterator[None]:
    """Failures of the network as ``EnvironmentFailed`` that says where and during what."""
    import aiohttp

    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            yield
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise EnvironmentFailed(f"{url}: {what}: no answer within env.args.timeout_s={timeout_s:g}") from error
    except (aiohttp.ClientError, OSError) as error:
        raise EnvironmentFailed(f"{url}: {what} failed: {_short(error) or type(error).__name__}") from error


def _decoded(content: str | bytes, url: str, kind: str) -> dict[str, Any]:
    try:
        answer = msgspec.json.decode(content)
    except msgspec.DecodeError as error:
        raise EnvironmentFailed(f"{url}: {kind} was not answered in JSON: {error}") from error
    if not isinstance(answer, dict):
        raise EnvironmentFailed(f"{url}: {kind}: expected a JSON object, got {_short(answer)}")
    return answer


def _observed(data: Any, url: str, kind: str) -> Observed:
    observation = data.get("observation") if isinstance(data, dict) else None
    if not isinstance(observation, dict):
        raise EnvironmentFailed(f"{url}: {kind}: expected an `observation` with fields, got {_short(data)}")
    reward = data.get("reward")
    if reward is not None and (not isinstance(reward, Real) or not math.isfinite(reward)):
        raise EnvironmentFailed(f"{url}: {kind}: expected a finite number or null as reward, got {_short(reward)}")
    done = data.get("done", False)
    if not isinstance(done, bool):
        raise EnvironmentFailed(f"{url}: {kind}: expected true or false as done, got {_short(done)}")
    return Observed(observation, None if reward is None else float(reward), done)


def _hint(code: object) -> str:
    if code == "CAPACITY_REACHED":
        return "; start the server with more max_concurrent_envs, or lower env.args.sessions"
    return f" ({code})" if code else ""


def _short(value: object) -> str:
    """One line of at most 300 characters."""
    return " ".join(str(value).split())[:300]
