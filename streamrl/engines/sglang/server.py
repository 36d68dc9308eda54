"""SGLang's server as a child of this process.

It is in our process group, and the kernel kills it when we die, however we die; its own processes ask the kernel for
the same. Its output goes to our log line by line. Only we know its key, which it reads from a file that is deleted
when the server is ready (``tidy``), with its socket files and shared memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections import deque
from pathlib import Path

import psutil

from streamrl.engines.sglang.arguments import arguments, bare_model, environment, flags, has_accelerator
from streamrl.errors import ActorDied, ConfigError, DeadlineExceeded
from streamrl.schema import Config

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
LISTENS = "Uvicorn running on"
"""In the line that says so; SGLang's own "ready" comes before its socket is open."""
_CHATTER = (" Prefill batch", " Decode batch")
"""In lines that come with every batch and stay out of our log."""
_LINE_BYTES = 1 << 20
_TAIL = 40
_ENDING_S = 10.0
_BECOME_SERVER = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.executable, [sys.executable, "-m", "sglang.launch_server", *sys.argv[2:]])
"""
"""Asks to be killed with the parent (PR_SET_PDEATHSIG, which survives the exec), and ends if that has died already."""


class SglangServer:
    """One server process. ``start`` makes it; ``ended`` is done when it has ended."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path, url: str, key: str) -> None:
        self.url = url
        self.key = key
        self._process = process
        self._folder = folder
        self._lines: deque[str] = deque(maxlen=_TAIL)
        self._ready = asyncio.Event()
        self._reading = asyncio.create_task(self._read(), name="sglang-log")

    @classmethod
    async def start(cls, config: Config, model_folder: str, scratch: str | None = None) -> SglangServer:
        """A server that is ready for requests, with random weights of the architecture in ``model_folder``.

        ``scratch`` takes its files, and is removed by whoever made it: also when nobody comes to call ``close``.

        Raises ``ConfigError`` where the interpreter or SGLang is missing, ``ActorDied`` with the last lines of its log
        where it ends instead, ``DeadlineExceeded`` after nine tenths of ``liveness.start_timeout_s``.
        """
        # Short in ``scratch``: the server puts sockets there, and the kernel takes 107 bytes for a path.
        folder = Path(tempfile.mkdtemp(prefix="sgl-" if scratch else "streamrl-sglang-", dir=scratch))
        try:
            server = await cls._spawn(config, Path(model_folder), folder)
            try:
                await server._wait_ready(config)
            except BaseException:  # whatever ends a start, also a cancellation: no process may stay behind
                await server.close()
                raise
        except BaseException:  # as above, and no file
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return server

    @classmethod
    async def _spawn(cls, config: Config, model_folder: Path, folder: Path) -> SglangServer:
        accelerated = has_accelerator()
        model, key = folder / "model", secrets.token_urlsafe(32)
        model.mkdir()
        bare_model(model_folder, model)
        (folder / "key.yaml").write_text(f"api-key: {key}\n")  # a command line can be read by every user
        port = _free_port()
        chosen = arguments(config, model, accelerated=accelerated) | {"host": HOST, "port": port}
        line = [*flags(chosen), "--config", str(folder / "key.yaml")]
        python = interpreter(config)
        log.info("%s -m sglang.launch_server %s", python, " ".join(line))
        try:
            process = await asyncio.create_subprocess_exec(
                python, "-c", _BECOME_SERVER, str(os.getpid()), *line,
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
                env=environment(config, folder, accelerated=accelerated), limit=_LINE_BYTES,
            )  # fmt: skip
        except OSError as error:
            raise ConfigError(f"engine.python={python}: cannot be run: {error}") from error
        return cls(process, folder, f"http://{HOST}:{port}", key)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ended(self) -> ActorDied:
        """Wait until the server has ended; why, with the last it said."""
        code = await self._process.wait()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._reading), _ENDING_S)
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        said = next((line for line in reversed(self._lines) if "Error" in line or "error" in line), "")
        return ActorDied(f"the SGLang server ended with {how}{': ' if said else ''}{said:.300}")

    async def close(self) -> None:
        """Kill it and wait until none of its processes is left, ten seconds at most. Idempotent."""
        shared: set[Path] = set()
        if self._process.returncode is None:
            with contextlib.suppress(psutil.Error):  # the kernel kills them too, but for those that just begin
                for child in psutil.Process(self.pid).children(recursive=True):
                    shared |= _shared_memory(child.pid)
                    child.kill()
            self._process.kill()
        await self._process.wait()
        # All of them hold the other end of this pipe: at its end they are gone.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._reading, _ENDING_S)
        for path in shared:
            path.unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _wait_ready(self, config: Config) -> None:
        deadline_s = 0.9 * config.liveness.start_timeout_s
        ready = asyncio.create_task(self._ready.wait())
        ended = asyncio.create_task(self.ended())
        try:
            await asyncio.wait({ready, ended}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise self._refusal(ended.result(), config)
            if not ready.done():
                last = self._lines[-1] if self._lines else "nothing"
                raise DeadlineExceeded(
                    f"the SGLang server was not ready after {deadline_s:.0f} s; it said last: {last:.200}; "
                    "raise liveness.start_timeout_s"
                )
        finally:
            ready.cancel()
            ended.cancel()

    def _refusal(self, died: ActorDied, config: Config) -> Exception:
        text = "\n".join(self._lines)
        python = interpreter(config)
        for package in ("sglang", "streamrl"):
            if f"No module named '{package}'" in text or f"No module named {package}" in text:
                return ConfigError(
                    f"engine.python={python}: {package} is not installed there; make an environment as "
                    "docs/engines.md says (make .venv-sglang/.installed) and name its interpreter"
                )
        return died

    def tidy(self) -> None:
        """Unlink what its processes share by name, once each has opened it: nothing is left when all are killed."""
        for path in self._folder.iterdir():
            if not path.is_dir():
                path.unlink(missing_ok=True)
        for path in _shared_memory(self.pid):
            path.unlink(missing_ok=True)

    async def _read(self) -> None:
        """To our log; ends when no process holds the other end."""
        stream = self._process.stdout
        assert stream is not None
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # a line over the limit: the stream has dropped it
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            if not any(word in text for word in _CHATTER):
                self._lines.append(text)
                log.info("%s", text)
            if LISTENS in text:
                self._ready.set()


def interpreter(config: Config) -> str:
    """Of the server: ``engine.python``, or our own."""
    return os.path.expanduser(config.engine.python) or sys.executable


def _shared_memory(pid: int) -> set[Path]:
    """Files of SGLang in shared memory that this process has mapped."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    paths = {Path(line.split(maxsplit=5)[-1]) for line in lines}
    return {path for path in paths if path.parent == Path("/dev/shm") and path.name.startswith("sglang_")}


def _free_port() -> int:
    """A loopback port that is free now. Should another process take it first, the server ends and says so."""
    with socket.socket() as chosen:
        chosen.bind((HOST, 0))
        return int(chosen.getsockname()[1])
