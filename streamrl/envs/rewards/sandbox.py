"""Run a Python program that nobody trusts, and see what it prints: limits, no network, nothing left behind.

How it is closed in is ``sandbox_child.py``'s; this side starts it off the event loop's time and keeps the last word: a
program that outlives its time or prints too much is killed with all that it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from streamrl.errors import ConfigError, EnvironmentFailed

log = logging.getLogger(__name__)

ISOLATIONS = ("namespaces", "seccomp")
"""From the stronger to the weaker; ``auto`` takes the first that this machine permits."""
KINDS = ("auto", *ISOLATIONS)
GRACE_S = 10.0
"""Beyond a program's own time: to start, to be killed, and to report."""
START_S = 60.0
"""For the interpreter to say where it lies, at the start of a run, when everything else starts too."""
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Limits:
    """What a program may use; passing one ends it or fails its call."""

    wall_s: float = 10.0
    cpu_s: float = 10.0
    """Whole seconds of processor time of each process, rounded."""
    memory_bytes: int = 512 << 20
    """Address space of each process."""
    disk_bytes: int = 64 << 20
    """Of its folder, which lies in memory; in force with namespaces only."""
    file_bytes: int = 16 << 20
    """Of one file."""
    open_files: int = 64
    output_bytes: int = 1 << 20
    """Of its output, and again of its errors."""
    processes: int = 1
    """1: it may start threads, but no process. More: processes and threads together; needs namespaces."""


@dataclass(frozen=True)
class Ended:
    """How a program ended. Whatever it did is an outcome, not an error."""

    code: int
    """Exit code, or minus the signal that ended it."""
    output: bytes
    errors: bytes
    timed_out: bool
    too_much_output: bool
    wall_s: float
    cpu_s: float


class Sandbox:
    """Runs programs on the interpreter ``python``, at most ``at_once`` of them at a time.

    Raises ``ConfigError`` where the machine does not permit ``isolation``; with ``auto`` what is in force is logged,
    as a warning where it is the weaker one.
    """

    def __init__(self, limits: Limits, isolation: str = "auto", at_once: int = 0, python: str = "") -> None:
        _check(limits, isolation)
        self._limits = limits
        self._isolation = isolation
        self._python = os.path.abspath(python or sys.executable)
        self._trees = [os.path.dirname(os.path.realpath(self._python))]
        """Folders that the interpreter needs; ``in_force`` asks it for the others."""
        self._at_once = at_once or os.cpu_count() or 1
        self._loop: asyncio.AbstractEventLoop | None = None
        self._finding = threading.Lock()
        self._in_force = ""

    def in_force(self) -> str:
        """Which of ``ISOLATIONS`` holds the programs here; found out by trying, once, which takes a moment."""
        with self._finding:
            if not self._in_force:
                with ThreadPoolExecutor(1) as thread:  # where no event loop runs
                    thread.submit(asyncio.run, self._find()).result()
        return self._in_force

    async def _find(self) -> None:
        self._trees = await self._find_trees()
        self._in_force = await self._find_isolation()

    async def run(self, code: str, given: bytes = b"") -> Ended:
        """Run ``code`` with ``given`` as its input. Raises ``EnvironmentFailed`` where the sandbox itself failed."""
        isolation = self._in_force or await asyncio.to_thread(self.in_force)
        self._enter_loop()
        async with self._room:
            ended = await self._attempt(isolation, code, given)
        if isinstance(ended, str):
            raise EnvironmentFailed(f"sandbox ({isolation}): {ended}")
        return ended

    def _enter_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._room = loop, asyncio.Semaphore(self._at_once)

    async def _find_isolation(self) -> str:
        reasons: list[str] = []
        for isolation in ISOLATIONS if self._isolation == "auto" else (self._isolation,):
            ended = await self._attempt(isolation, "print('in')", b"")
            if not isinstance(ended, str) and ended.output == b"in\n":
                weaker = f"; namespaces are not permitted: {reasons[0]}" if reasons else ""
                log.log(logging.WARNING if reasons else logging.INFO, "sandbox: %s in force%s", isolation, weaker)
                return isolation
            reasons.append(ended if isinstance(ended, str) else _first_words(ended))
        wanted = self._isolation if self._isolation != "auto" else " or ".join(ISOLATIONS)
        hint = "; isolation=seccomp takes less" if self._isolation == "namespaces" else ""
        raise ConfigError(f"sandbox: isolation={wanted} is not permitted here: {'; '.join(reasons)}{hint}")

    async def _find_trees(self) -> list[str]:
        """Folders that the interpreter needs."""
        ask = "import json, sys; print(json.dumps([sys.base_prefix, sys.base_exec_prefix, sys.prefix]))"
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(self._python, "-I", "-c", ask, stdout=pipe, stderr=pipe)
        except OSError as error:
            raise ConfigError(f"sandbox: python={self._python}: {error.strerror}") from error
        try:
            output, errors = await _within(process, process.communicate(), START_S)
        except TimeoutError:
            raise ConfigError(f"sandbox: python={self._python} did not start within {START_S:g} s") from None
        if process.returncode != 0:
            raise ConfigError(f"sandbox: python={self._python} is not an interpreter: {errors[-200:]!r}")
        return sorted({*json.loads(output), *self._trees}, key=len)

    async def _attempt(self, isolation: str, code: str, given: bytes) -> Ended | str:
        """How the program ended, or why it could not be run."""
        job = {
            "code": code, "isolation": isolation, "python": self._python, "trees": self._trees,
            "limits": asdict(self._limits),
        }  # fmt: skip
        with contextlib.ExitStack() as descriptors:
            job_fd = _sealed(json.dumps(job).encode(), descriptors)
            input_fd = _sealed(given, descriptors)
            read_fd, write_fd = os.pipe()
            descriptors.callback(os.close, read_fd)
            with os.fdopen(write_fd, "wb"):
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-I", "-S", str(Path(__file__).with_name("sandbox_child.py")),
                    str(job_fd), str(write_fd), str(os.getpid()), stdin=input_fd, stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE, pass_fds=(job_fd, write_fd), start_new_session=True,
                )  # fmt: skip
            try:
                output, errors = await _within(process, self._read(process), self._limits.wall_s + GRACE_S)
            except TimeoutError:
                return f"no report within {self._limits.wall_s + GRACE_S:g} s"
            with os.fdopen(os.dup(read_fd), "rb") as report:
                return _ended(report.read(), output, errors, self._limits.output_bytes)

    async def _read(self, process: asyncio.subprocess.Process) -> tuple[bytes, bytes]:
        assert process.stdout is not None
        assert process.stderr is not None
        async with asyncio.TaskGroup() as tasks:
            output = tasks.create_task(self._take(process, process.stdout))
            errors = tasks.create_task(self._take(process, process.stderr))
        await process.wait()
        return output.result(), errors.result()

    async def _take(self, process: asyncio.subprocess.Process, stream: asyncio.StreamReader) -> bytes:
        """All of it; one byte more than is allowed where there is more, and the program is ended for it."""
        taken = bytearray()
        most = self._limits.output_bytes + 1
        while len(taken) < most and (chunk := await stream.read(min(_CHUNK, most - len(taken)))):
            taken += chunk
        if len(taken) == most:
            _signal(process, signal.SIGTERM)
            while await stream.read(_CHUNK):  # what is in the pipe already
                pass
        return bytes(taken)


async def _within(process: asyncio.subprocess.Process, work: Any, timeout_s: float) -> Any:
    """The result of ``work``; the process is gone afterwards, whatever happens."""
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    finally:
        if process.returncode is None:
            await asyncio.shield(_end(process))


async def _end(process: asyncio.subprocess.Process) -> None:
    """First by the signal upon which the supervisor clears up, then by the one that it cannot refuse."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        _signal(process, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await process.wait()
                return


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


def _sealed(content: bytes, descriptors: contextlib.ExitStack) -> int:
    """A file in memory that cannot be changed any more, at its start."""
    descriptor = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    descriptors.callback(os.close, descriptor)
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return descriptor


def _ended(report: bytes, output: bytes, errors: bytes, most: int) -> Ended | str:
    if not report:
        return f"its supervisor died: {errors[-200:].decode(errors='replace')}"
    outcome: Mapping[str, Any] = json.loads(report)
    if "error" in outcome:
        return str(outcome["error"])
    too_much = len(output) > most or len(errors) > most
    return Ended(
        outcome["code"], output[:most], errors[:most], outcome["timed_out"], too_much, outcome["wall_s"],
        outcome["cpu_s"],
    )  # fmt: skip


def _first_words(ended: Ended) -> str:
    said = " ".join(ended.errors.decode(errors="replace").split())
    return f"a program that prints a word ended with code {ended.code}: {said:.200}"


def _check(limits: Limits, isolation: str) -> None:
    if isolation not in KINDS:
        raise ConfigError(f"isolation={isolation!r}: expected one of {', '.join(KINDS)}")
    for name, value in asdict(limits).items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ConfigError(f"{name}={value!r}: must be a positive number")
    if limits.processes > 1 and isolation != "namespaces":
        raise ConfigError(
            f"processes={limits.processes} can only be kept to in a namespace; set isolation=namespaces or processes=1"
        )
