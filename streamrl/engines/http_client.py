"""HTTP to a server that samples: a connection for each call, JSON in and out, and errors that say what they mean."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import aiohttp
import msgspec

from streamrl.errors import ActorDied, ConfigError, DeadlineExceeded, StreamRLError

ANSWER_BYTES = 256 << 20
"""Of one answer at most."""
CONTROL_S = 120.0
"""Of any call but a generation."""


class Refused(StreamRLError):
    """The server answered a call with an error, and goes on."""

    def __init__(self, server: str, path: str, status: int, message: str) -> None:
        self.server = server
        self.path = path
        self.status = status
        self.message = message
        super().__init__(f"{server} refused {path} ({status}): {message:.300}")

    def __reduce__(self) -> tuple[type[Refused], tuple[str, str, int, str]]:
        return Refused, (self.server, self.path, self.status, self.message)


class ServerClient:
    """Calls of one server. Raises ``Refused`` for an answer that is an error, ``ActorDied`` where there is none.

    ``name`` says what serves, in messages. ``key_statuses``: answers that mean that ``key`` is not the server's.
    """

    def __init__(self, name: str, url: str, key: str, key_statuses: tuple[int, ...] = (401, 403)) -> None:
        self.name = name
        self.url = url.rstrip("/")
        self._key_statuses = key_statuses
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._session = aiohttp.ClientSession(
            headers=headers,
            # A connection for each call: one that was kept may be closed by the server while the call is on its way,
            # which nobody can tell from the server's death.
            connector=aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_watched_socket),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        )

    async def close(self) -> None:
        await self._session.close()

    async def get(self, path: str, within_s: float = CONTROL_S) -> Any:
        return _decoded(await self._call("GET", path, None, within_s))

    async def get_text(self, path: str, within_s: float = CONTROL_S) -> str:
        return (await self._call("GET", path, None, within_s)).decode()

    async def post(self, path: str, body: object, within_s: float | None = CONTROL_S) -> Any:
        """``body`` is an object for JSON, or its bytes. ``within_s`` of None: until answered or cancelled."""
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        return _decoded(await self._call("POST", path, data, within_s))

    async def post_text(self, path: str, body: object, within_s: float = CONTROL_S) -> str:
        """Where the answer is not JSON."""
        return (await self._call("POST", path, msgspec.json.encode(body), within_s)).decode()

    async def _call(self, method: str, path: str, data: bytes | None, within_s: float | None) -> bytes:
        try:
            async with asyncio.timeout(within_s), self._session.request(method, self.url + path, data=data) as response:
                text = await self._read(response)
                if response.status in self._key_statuses:
                    raise ConfigError(f"{self.name} at {self.url} wants another key ({response.status} at {path})")
                if response.status != 200:
                    raise Refused(self.name, path, response.status, _message(text))
        except TimeoutError:
            raise DeadlineExceeded(f"{self.name} at {self.url} did not answer {path} within {within_s:g} s") from None
        except aiohttp.ClientError as error:
            raise ActorDied(f"{self.name} at {self.url} cannot be reached at {path}: {error}") from error
        return text

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        parts, size = [], 0
        async for part in response.content.iter_any():
            size += len(part)
            if size > ANSWER_BYTES:
                raise ActorDied(f"{self.name} answers {response.url.path} with more than {ANSWER_BYTES} bytes")
            parts.append(part)
        return b"".join(parts)


def _watched_socket(address: tuple[Any, ...]) -> socket.socket:
    """One that the kernel breaks within a minute when the other host is gone, however long an answer may take."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 6)):
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


def _decoded(text: bytes) -> Any:
    return msgspec.json.decode(text) if text else None


def _message(text: bytes) -> str:
    try:
        answer = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text.decode(errors="replace")
    if isinstance(answer, dict):
        error = answer.get("message") or answer.get("error") or answer
        return str(error.get("message", error) if isinstance(error, dict) else error)
    return str(answer)
