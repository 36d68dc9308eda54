"""The HTTP endpoint of a rollouter: clients of its episodes, and processes that attach to the run.

It binds to loopback unless ``gateway.host`` says otherwise. Every request needs a key: of its episode (``proxy/``), or
the run's token (``attach/``), which only who may read the run folder knows.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from streamrl.envs.attach.protocol import PATH
from streamrl.envs.proxy import SessionDesk, add_routes
from streamrl.errors import ConfigError
from streamrl.schema import GatewayConfig

FOLDER = "gateways"
"""In the run folder: the run's token, and an address per rollouter."""

BACKLOG = 1_024
"""Connections that may wait to be accepted: the agents of many episodes begin at the same moment."""

SHUTDOWN_S = 2.0
"""Seconds that requests have to end in when the endpoint closes."""

ANY_ADDRESS = ("0.0.0.0", "::", "")


class Gateway:
    """An HTTP server on the caller's event loop. It is the ``Host`` of episodes (``episode.py``)."""

    def __init__(self, settings: GatewayConfig, index: int) -> None:
        """``index``: which of the run's processes this is; with a fixed ``gateway.port`` it is added to that."""
        self.desk = SessionDesk(settings.strict)
        self.url = ""
        """Where it serves, once it was started."""
        self._host = settings.host
        self._port = settings.port + index if settings.port else 0
        self._app = web.Application()
        self._file: Path | None = None
        add_routes(self._app, self.desk)

    async def start(self) -> None:
        """Bind and serve. Raises ``ConfigError`` where the address cannot be had."""
        self._runner = web.AppRunner(
            self._app, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S, access_log=None, handle_signals=False
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port, backlog=BACKLOG).start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(
                f"gateway.host={self._host}: cannot listen on port {self._port}: {error.strerror or error}; choose "
                "another address, or gateway.port=0 for any free port"
            ) from error
        host = socket.gethostname() if self._host in ANY_ADDRESS else self._host
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Stop serving; requests under way are cancelled."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
        await self._runner.cleanup()

    def open(self, session: Any) -> tuple[str, str]:
        """Base URL and key of ``session`` for clients of the OpenAI and Anthropic APIs."""
        return f"{self.url}/v1", self.desk.open(session)

    def close(self, key: str) -> None:
        """The episode of this key has ended."""
        self.desk.close(key)

    def add_attach(self, token: str, serve: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> None:
        """Let processes attach that know ``token``. Before ``start``."""

        async def attach(request: web.Request) -> web.StreamResponse:
            if not _knows(request, token):
                raise web.HTTPUnauthorized(
                    text="wrong or no token; send `Authorization: Bearer TOKEN` with the one in RUN/gateways/token\n"
                )
            return await serve(request)

        self._app.router.add_get(PATH, attach)

    def announce(self, run_dir: Path, name: str, token: str) -> None:
        """Write the address, for ``streamrl attach``."""
        self._file = run_dir / FOLDER / f"{name}.json"
        aside = self._file.with_suffix(f".{os.getpid()}")
        _write_private(aside, json.dumps({"url": self.url, "token": token}) + "\n")
        aside.rename(self._file)


def run_token(run_dir: Path) -> str:
    """The run's token; the first rollouter that asks makes it. Mode 0600, in a folder of mode 0700."""
    folder = run_dir / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / "token"
    if not path.exists():
        aside = folder / f"token.{secrets.token_hex(8)}"  # rollouters on other machines may have this one's pid
        _write_private(aside, secrets.token_urlsafe(32))
        with contextlib.suppress(FileExistsError):  # another rollouter was faster
            path.hardlink_to(aside)
        aside.unlink()
    return path.read_text()


def _write_private(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w") as file:
        file.write(text)


def _knows(request: web.Request, token: str) -> bool:
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.encode("utf-8", "surrogateescape"), token.encode())
