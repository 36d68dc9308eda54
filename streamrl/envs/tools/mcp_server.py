"""MCP servers as sources of tools, through the official ``mcp`` client (extra ``mcp``).

======== ====================================== ==============================================
state    entered by                             a call
======== ====================================== ==============================================
idle     the constructor, ``close``             starts the server
running  a start that listed the tools          is sent to it
lost     a call that found the connection gone  starts it again; its own state is lost
======== ====================================== ==============================================

Each connection is owned by one task, which opens and closes it, since the client's cancel scopes may not change tasks.
A server process is ended with its connection, and by the kernel where this process is killed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.envs.loading import nearest
from streamrl.envs.tools.function import Tool, ToolError, ToolFatal
from streamrl.errors import ConfigError

_MAX_PAGES = 100
"""Pages of a server's list of tools that are read."""

_HTTP_S = 30.0
"""Seconds for one exchange with a server behind a URL that says nothing meanwhile; calls have limits of their own."""

_LAUNCHER = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
if hasattr(libc, "prctl"):
    libc.prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Becomes the server's command in a process that dies with its parent."""


class McpServer:
    """Tools of an MCP server: of a process (stdio) or behind a URL (streamable HTTP).

    ``scope="episode"``: a server, or a connection, of each episode's own; ``"shared"``: one for all of this process.
    """

    def __init__(
        self,
        *command: str,
        url: str = "",
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        headers: Mapping[str, str] | None = None,
        scope: str = "episode",
        only: Sequence[str] = (),
        prefix: str = "",
        start_timeout_s: float = 30.0,
    ) -> None:
        """``command`` and its arguments, or ``url``. A process gets ``env`` and a few harmless variables, such as PATH.

        ``only``: names of the tools to offer; none: all. ``prefix``: put before their names.
        """
        _check(command, url, env, headers, scope)
        self.title = url or " ".join(map(os.path.basename, command[:2]))
        self.command = command
        self.url = url
        self.env = dict(env or {})
        self.cwd = cwd
        self.headers = dict(headers or {})
        self.prefix = prefix
        self.start_timeout_s = start_timeout_s
        self._only = tuple(only)
        self._shared = _Connection(self) if scope == "shared" else None
        self._ending: set[_Connection] = set()

    @asynccontextmanager
    async def tools(self) -> AsyncIterator[list[Tool]]:
        """The server's tools for one episode, started where need be.

        Raises ``ToolFatal`` where it cannot be started, ``ConfigError`` where it has not the tools in ``only``.
        """
        connection = self._shared or _Connection(self)
        try:
            offered = await connection.offered()
            yield [_McpTool(self, connection, each) for each in self._chosen(offered)]
        except asyncio.CancelledError:
            if connection is not self._shared:
                self._end_later(connection)
            raise
        finally:
            if connection is not self._shared and connection not in self._ending:
                await connection.close()

    async def close(self) -> None:
        """End what is shared, and wait for what cancelled episodes left to its end."""
        waiting = [each.close() for each in self._ending]
        if self._shared is not None:
            waiting.append(self._shared.close())
        await asyncio.gather(*waiting)

    def _chosen(self, offered: Sequence[Any]) -> list[Any]:
        names = [each.name for each in offered]
        for name in self._only:
            if name not in names:
                raise ConfigError(f"McpServer {self.title}: it has no tool {name!r}{nearest(name, names)}")
        return [each for each in offered if not self._only or each.name in self._only]

    def _end_later(self, connection: _Connection) -> None:
        """A cancelled episode does not wait for its server; ``close`` does."""
        owner = connection.stop()
        if owner is not None:
            self._ending.add(connection)
            owner.add_done_callback(lambda _: self._ending.discard(connection))


class _Connection:
    """One server, started when it is first used and again after it was lost."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._starting = asyncio.Lock()
        self._client: Any = None
        self._offered: list[Any] = []
        self._owner: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    async def offered(self) -> list[Any]:
        """The tools as the server describes them; it is started where it does not run."""
        await self._running()
        return self._offered

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """The result. Raises ``ToolError`` for what the server refused and where it was lost, ``ToolFatal`` where it
        cannot be started again."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        client = await self._running()
        try:
            return await client.call_tool(name, dict(arguments))
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                raise ToolError(f"{name}: {error.message}") from error
            reason = "its connection was closed"
        except Exception as error:  # noqa: BLE001 transports raise types of their own; each means: it is gone
            reason = _first_line(error)
        if client is self._client:
            self.stop()
        raise ToolError(f"{name}: its server was lost during the call ({reason}); the next call starts it again")

    def stop(self) -> asyncio.Task[None] | None:
        """Begin to end the server; the task that does, None where there is none."""
        self._stop.set()
        self._client = None
        return self._owner

    async def close(self) -> None:
        """End the server and wait until it is gone. Idempotent."""
        owner = self.stop()
        if owner is not None and not owner.done():
            await asyncio.wait([owner])

    async def _running(self) -> Any:
        async with self._starting:
            if self._client is None or self._owner is None or self._owner.done():
                await self.close()  # what was lost is out of the way before it is started again
                self._client, self._offered = await self._start()
            return self._client

    async def _start(self) -> tuple[Any, list[Any]]:
        ready: asyncio.Future[tuple[Any, list[Any]]] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        self._owner = asyncio.create_task(self._own(ready, self._stop), name=f"mcp {self._server.title}")
        try:
            async with asyncio.timeout(self._server.start_timeout_s):
                return await ready
        except TimeoutError:
            self._owner.cancel()
            limit = f"start_timeout_s={self._server.start_timeout_s:g}"
            raise ToolFatal(f"McpServer {self._server.title}: not ready within {limit}") from None
        except asyncio.CancelledError:
            self._owner.cancel()
            raise

    async def _own(self, ready: asyncio.Future[tuple[Any, list[Any]]], stop: asyncio.Event) -> None:
        """Hold the connection open until ``stop``; its death shows in the calls."""
        try:
            async with _connected(self._server) as client:
                offered = await _list_tools(client)
                if not ready.done():
                    ready.set_result((client, offered))
                await stop.wait()
        except (ConfigError, ToolFatal) as error:
            _refuse(ready, error)
        except Exception as error:  # noqa: BLE001 transports raise types of their own; each means: no connection
            _refuse(ready, ToolFatal(f"McpServer {self._server.title}: cannot be used: {_first_line(error)}"))


@dataclass(frozen=True)
class _McpTool:
    """One tool of a server."""

    server: McpServer
    connection: _Connection
    told: Any
    """What the server says of it."""

    @property
    def name(self) -> str:
        return self.server.prefix + str(self.told.name)

    @property
    def description(self) -> str:
        return " ".join((self.told.description or "").split())

    @property
    def schema(self) -> Mapping[str, Any]:
        return self.told.input_schema

    async def ready(self) -> None:
        """Start the server again where it was lost, within ``start_timeout_s``."""
        await self.connection.offered()

    async def call(self, arguments: Mapping[str, Any], state: Any) -> str:
        result = await self.connection.call(self.told.name, arguments)
        text = "\n".join(map(_block_text, result.content))
        if result.is_error:
            raise ToolError(text or f"{self.name} failed and did not say why")
        return text or "ok"


@asynccontextmanager
async def _connected(server: McpServer) -> AsyncIterator[Any]:
    """A client of ``server`` after its handshake."""
    try:
        import httpx2
        from mcp import Client, StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client
    except ImportError:
        raise ConfigError("McpServer needs the package mcp: pip install 'streamrl[mcp]'") from None
    async with AsyncExitStack() as stack:
        if server.url:
            http = await stack.enter_async_context(httpx2.AsyncClient(headers=server.headers, timeout=_HTTP_S))
            transport = streamable_http_client(server.url, http_client=http)
        else:
            launcher = ["-I", "-S", "-c", _LAUNCHER, str(os.getpid()), _found(server.command[0]), *server.command[1:]]
            parameters = StdioServerParameters(command=sys.executable, args=launcher, env=server.env, cwd=server.cwd)
            transport = stdio_client(parameters, errlog=sys.__stderr__ or sys.stderr)
        yield await stack.enter_async_context(Client(transport))


def _found(command: str) -> str:
    path = shutil.which(command)
    if path is None:
        raise ToolFatal(f"McpServer {command}: no such command on the PATH")
    return path


async def _list_tools(client: Any) -> list[Any]:
    listed: list[Any] = []
    cursor = None
    for _ in range(_MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        listed += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return listed
    raise ToolFatal(f"its list of tools has more than {_MAX_PAGES} pages")


def _block_text(block: Any) -> str:
    """What a model reads of one block of a result: text as it is, of other kinds that they are there."""
    if block.type == "text":
        return str(block.text)
    if block.type == "resource" and hasattr(block.resource, "text"):
        return str(block.resource.text)
    return f"[{block.type} {getattr(block, 'mime_type', None) or ''}]".replace(" ]", "]")


def _first_line(error: BaseException) -> str:
    """Type and message of the first error in a group, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(f"{type(error).__name__}: {error}".split())


def _refuse(ready: asyncio.Future[Any], error: Exception) -> None:
    if not ready.done():
        ready.set_exception(error)


def _check(
    command: Sequence[str],
    url: str,
    env: Mapping[str, str] | None,
    headers: Mapping[str, str] | None,
    scope: str,
) -> None:
    if bool(command) == bool(url):
        raise ConfigError("McpServer: give a command, as in McpServer('python', 'server.py'), or url=…, one of them")
    if any(not isinstance(each, str) for each in command):
        raise ConfigError(
            f"McpServer: the command must be words, as in McpServer('python', 'server.py'): {command!r:.80}"
        )
    if scope not in ("episode", "shared"):
        raise ConfigError(f"McpServer: scope={scope!r}: expected 'episode' or 'shared'")
    if url and env:
        raise ConfigError("McpServer: env belongs to a process; a server behind a url takes headers")
    if headers and not url:
        raise ConfigError("McpServer: headers belong to a url; a process takes env")
