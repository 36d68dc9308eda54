"""Processes that answer JSON lines, each with a deadline that is kept: what hangs is killed and replaced."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from streamrl.errors import EnvironmentFailed

LINE_BYTES = 1 << 20
"""Of one request or reply at most."""


class WorkerPool:
    """At most ``size`` processes of the script ``script``, started when they are first needed.

    A process gets its parent's pid and then ``arguments``, says ``{"ready": true}`` once it can work, and answers one
    line with one line. It belongs to the event loop that started it.
    """

    def __init__(
        self, script: Path, arguments: Sequence[str], *, size: int, timeout_s: float, start_timeout_s: float
    ) -> None:
        self._command = [sys.executable, "-I", str(script), str(os.getpid()), *arguments]
        self._what = script.stem
        self._size = size
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._idle: list[asyncio.subprocess.Process] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._room = asyncio.Semaphore(size)

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply. Raises ``EnvironmentFailed`` where it takes too long, the process dies, or it says ``error``."""
        line = json.dumps(request).encode() + b"\n"
        if len(line) > LINE_BYTES:
            raise EnvironmentFailed(f"{self._what}: expected a request of at most {LINE_BYTES} bytes, got {len(line)}")
        self._enter_loop()
        async with self._room:
            worker = self._idle.pop() if self._idle else await self._start()
            try:
                reply = await self._exchange(worker, line, self._timeout_s, "an answer")
            except BaseException:  # cancelled, late or broken: whatever it says next belongs to this request
                await _end(worker)
                raise
            self._idle.append(worker)
        if "error" in reply:
            raise EnvironmentFailed(f"{self._what}: {reply['error']}")
        return reply

    async def close(self) -> None:
        """End the idle processes; those at work end with their request."""
        self._enter_loop()
        idle, self._idle = self._idle, []
        for worker in idle:
            await _end(worker)

    def _enter_loop(self) -> None:
        """Processes of a loop that is gone cannot be read from; they have ended with their pipes."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._idle, self._room = loop, [], asyncio.Semaphore(self._size)

    async def _start(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        worker = await asyncio.create_subprocess_exec(*self._command, stdin=pipe, stdout=pipe, limit=LINE_BYTES)
        try:
            await self._exchange(worker, b"", self._start_timeout_s, "to start")
        except BaseException:  # whatever ends the start, also a cancellation: no process may stay behind
            await _end(worker)
            raise
        return worker

    async def _exchange(
        self, worker: asyncio.subprocess.Process, line: bytes, timeout_s: float, what: str
    ) -> dict[str, Any]:
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                if line:
                    worker.stdin.write(line)
                    await worker.stdin.drain()
                reply = await worker.stdout.readline()
        except TimeoutError:
            raise EnvironmentFailed(f"{self._what}: waited {timeout_s:g} s for {what}") from None
        except (ConnectionError, ValueError) as error:
            raise EnvironmentFailed(f"{self._what}: its process cannot be spoken to: {error}") from error
        if not reply.endswith(b"\n"):
            raise EnvironmentFailed(f"{self._what}: its process ended while it was waited for {what}")
        answer: dict[str, Any] = json.loads(reply)
        return answer


async def _end(worker: asyncio.subprocess.Process) -> None:
    """Kill and reap, also where the caller is being cancelled: a killed process ends at once."""
    with contextlib.suppress(ProcessLookupError):
        worker.kill()
    if worker.stdin is not None:
        worker.stdin.close()
    await asyncio.shield(worker.wait())
