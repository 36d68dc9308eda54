"""The processes of ``streamrl bench sync``: one with new weights, several with an engine's, and a pipe to each.

Every process holds its weights once and serves all contenders, in turn. It ends when its pipe does, also when the bench
was killed, and each of them removes the folders then.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import multiprocessing
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Protocol

import psutil
import torch

from streamrl.bench.sync import weights as models
from streamrl.errors import StreamRLError

TIMEOUT_S = 180.0
"""That one command to a process may take before the bench counts as stuck."""

_PREFIX = "weights-bench-"
"""Of the folders' names."""
_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Contender:
    """One way to bring weights to engines: ``Source`` and ``Target`` of its module."""

    name: str
    module: str
    options: dict[str, Any] = field(default_factory=dict)
    together: bool = False
    """Source and targets work at once; otherwise targets start when the source is done."""
    loads: bool = True
    """Targets have something to do of their own; otherwise they are done when the source is."""


@dataclass
class Role:
    """What a process is, and holds."""

    name: str
    weights: dict[str, torch.Tensor]
    targets: int
    folder: str
    """For sockets; removed at the end."""
    shared: str
    """The same in /dev/shm, for files."""
    options: dict[str, Any]


class Side(Protocol):
    """One contender in one process."""

    async def open(self, address: Any) -> Any:
        """Get ready; the source's answer is the targets' ``address``."""
        ...

    async def update(self, version: int) -> dict[str, float]:
        """Send or load; whatever was measured on the way."""
        ...

    async def close(self) -> None: ...


def work(pipe: Connection, name: str, size: str, targets: int, folders: tuple[str, str]) -> None:
    """A process: does as it is told until the pipe ends."""
    torch.set_num_threads(1)
    mine = models.build(size) if name == "source" else models.empty(size)
    try:
        asyncio.run(_serve(pipe, name, mine, targets, folders))
    except EOFError:
        pass
    finally:
        _remove(folders)


def _remove(folders: tuple[str, str]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


async def _serve(
    pipe: Connection, name: str, mine: dict[str, torch.Tensor], targets: int, folders: tuple[str, str]
) -> None:
    side: Side | None = None
    pipe.send(("ok", None))
    while True:
        command, *arguments = await asyncio.to_thread(pipe.recv)
        answer: Any = None
        try:
            match command:
                case "open":
                    module, options, address = arguments
                    kind = "Source" if name == "source" else "Target"
                    role = Role(name, mine, targets, *folders, options)
                    side = getattr(importlib.import_module(module), kind)(role)
                    answer = await side.open(address)
                case "update" if side is not None:
                    answer = await side.update(*arguments)
                case "close" if side is not None:
                    await side.close()
                    side = None
                case "change":
                    models.change(mine, *arguments)
                case "digest":
                    answer = models.digest(mine)
                case "memory":
                    memory = psutil.Process().memory_full_info()
                    answer = {"own": memory.uss, "share": memory.pss}
            pipe.send(("ok", answer))
        except Exception:  # noqa: BLE001 whatever a contender raises is the bench's to report
            pipe.send(("failed", traceback.format_exc()))


class Stage:
    """One source and ``targets`` targets, with weights of ``size``. Use it as a context manager."""

    def __init__(self, size: str, targets: int) -> None:
        self.folders = tempfile.mkdtemp(prefix=_PREFIX), tempfile.mkdtemp(prefix=_PREFIX, dir="/dev/shm")
        """For sockets, and for files in shared memory."""
        self._pipes: dict[str, Connection] = {}
        self._processes: list[SpawnProcess] = []
        self.targets = [f"rollouter-{index}" for index in range(targets)]
        self._version = -1
        self._open: Contender | None = None
        self.memory: dict[str, list[float]] = {}
        """Bytes beyond the weights themselves, by contender: of the source, of all processes."""
        try:
            self._start(size)
        except BaseException:  # whatever ends a start, also Ctrl-C: no process may stay behind
            self._end()
            raise

    def _start(self, size: str) -> None:
        names = ["source", *self.targets]
        for name in names:
            self._pipes[name], theirs = _SPAWN.Pipe()
            arguments = (theirs, name, size, len(self.targets), self.folders)
            process = _SPAWN.Process(target=work, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
        self._hear(names)

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        for pipe in self._pipes.values():
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        _remove(self.folders)

    @contextlib.contextmanager
    def playing(self, contender: Contender) -> Iterator[None]:
        """Open a contender everywhere; close it at the end. Notes what memory it took."""
        before = self._memory()
        self._version = -1
        self._tell(["source"], "open", contender.module, contender.options, None, wait=not contender.together)
        address = None if contender.together else self._answers["source"]
        self._tell(self.targets, "open", contender.module, contender.options, address)
        if contender.together:
            self._hear(["source"])
        self._open = contender
        yield
        after = self._memory()
        self.memory.setdefault(contender.name, []).append(after[0] - before[0])
        self.memory.setdefault(f"{contender.name}/host", []).append(after[1] - before[1])
        self._tell(["source", *self.targets], "close")
        self._open = None

    def update(self, share: float, *, anyhow: bool = False) -> dict[str, float]:
        """Change about ``share`` of the values, bring them everywhere, verify; seconds and what the source measured.

        ``anyhow``: to any number, rather than to the next.
        """
        contender = self._open
        assert contender is not None
        self._version += 1
        self._tell(["source"], "change", share, time.monotonic_ns() & 0xFFFF_FFFF, anyhow)
        started = time.perf_counter()
        if contender.together:
            self._tell(["source", *self.targets], "update", self._version)
            measured = self._answers["source"]
        else:
            self._tell(["source"], "update", self._version)
            measured = self._answers["source"]
            if contender.loads:
                self._tell(self.targets, "update", self._version)
                measured = (measured or {}) | _total(self._answers.values())
        elapsed = time.perf_counter() - started
        self._tell(["source", *self.targets], "digest")
        if len(set(self._answers.values())) != 1:
            raise StreamRLError(f"{contender.name}: version {self._version} did not arrive as it was sent")
        return {"seconds": elapsed, **(measured or {})}

    def _memory(self) -> tuple[int, int]:
        self._tell(["source", *self.targets], "memory")
        return self._answers["source"]["own"], sum(each["share"] for each in self._answers.values())

    def _tell(self, names: Sequence[str], *command: Any, wait: bool = True) -> None:
        for name in names:
            self._pipes[name].send(command)
        if wait:
            self._hear(names)

    def _hear(self, names: Sequence[str]) -> None:
        self._answers: dict[str, Any] = {}
        for name in names:
            if not self._pipes[name].poll(TIMEOUT_S):
                raise StreamRLError(f"bench sync: {name} did not answer within {TIMEOUT_S:g} s")
            try:
                how, answer = self._pipes[name].recv()
            except EOFError:
                raise StreamRLError(f"bench sync: {name} ended (out of memory?)") from None
            if how == "failed":
                raise StreamRLError(f"bench sync: {name} failed:\n{answer}")
            self._answers[name] = answer


def _total(answers: Iterable[dict[str, float] | None]) -> dict[str, float]:
    """What targets measured, added up."""
    total: dict[str, float] = {}
    for answer in answers:
        for name, value in (answer or {}).items():
            total[name] = total.get(name, 0.0) + value
    return total


def memory_file(name: str, nbytes: int) -> int:
    """A descriptor of shared memory without a name, ``nbytes`` long; readers open ``/proc/<pid>/fd/<fd>``."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.truncate(fd, nbytes)
    return fd
