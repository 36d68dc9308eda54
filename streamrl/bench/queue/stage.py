"""Runs one contender once: its processes, their start in step, the clock, CPU seconds and memory, and their end.

A contender is a module with ``produce(job, port)`` and ``consume(job, port)`` and, where it needs one, ``serve(job,
port)``. Each runs in a process of its own: first the server, then the consumer, then the producers. The parent
reads CPU seconds of all its descendants when the consumer says that the warm-up is over and when it says that the last
batch is acknowledged, and their memory then too.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import signal
import tempfile
import traceback
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Event
from typing import Any

import msgspec
import psutil

from streamrl.bench.queue.workload import Workload
from streamrl.errors import ActorDied, DeadlineExceeded, StreamRLError

PRODUCERS = 4
TIMEOUT_S = 180.0
"""That one step of a run may take before the run counts as stuck."""
GRACE_S = 15.0
"""That a process gets to end by itself."""

SERVER, CONSUMER = "server", "consumer"

_SPAWN = multiprocessing.get_context("spawn")
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Contender:
    """One system in one setting."""

    name: str
    """What its rows are called."""
    module: str
    options: dict[str, Any] = field(default_factory=dict)
    """Reach the module's functions as ``job.options``."""
    serves: bool = False
    """The module has ``serve``."""
    shares: bool = False
    """The module has ``share(context)``: what ``multiprocessing`` has to hand to its processes when they start."""


@dataclass(frozen=True)
class Job:
    """What one process of a run is to do."""

    workload: Workload
    groups: int
    """Of the whole run, numbered from 0, the warm-up included; a multiple of a batch."""
    warm_up: int
    """Groups after which the clock starts; a multiple of a batch."""
    options: dict[str, Any] = field(default_factory=dict)
    groups_per_s: float | None = None
    """Offered on a fixed schedule; None: as many as are taken."""
    producer: int = 0
    producers: int = PRODUCERS
    folder: str = ""
    """Of the run, for sockets and files; removed afterwards."""
    address: str = ""
    """As the server, or else the consumer, told it with ``port.ready(address=…)``."""
    shared: Any = None

    @property
    def own_groups(self) -> range:
        """That this producer sends."""
        return range(self.producer, self.groups, self.producers)


@dataclass(frozen=True)
class Outcome:
    """What one run measured; verified."""

    job: Job
    trajectories: int
    """After the warm-up."""
    seconds: float
    cpu_s: float
    """User and system time of all processes, threads and kernel work on their behalf included."""
    memory_bytes: int
    """Resident memory of all processes, a page that several share counted once."""
    told: dict[str, dict[str, Any]]
    """What each process said at its end, by its name."""

    @property
    def rate(self) -> float:
        """Trajectories per second."""
        return self.trajectories / self.seconds

    @property
    def cpu_per_1000(self) -> float:
        """CPU seconds per 1,000 trajectories."""
        return 1000 * self.cpu_s / self.trajectories


class Port:
    """A process's line to the bench. Messages are JSON; nothing of the measured data passes here."""

    def __init__(self, connection: Connection, go: Event, finished: Event) -> None:
        self._connection = connection
        self._go = go
        self._finished = finished
        self.told: dict[str, Any] = {}
        """Sent when the process ends."""

    def ready(self, **fields: Any) -> None:
        """Set up. Returns when all others are, too."""
        self.tell("ready", **fields)
        self._go.wait()

    def wait_until_finished(self) -> None:
        """Until the consumer has everything: nobody may end earlier, for its CPU seconds would be lost."""
        self._finished.wait()

    def tell(self, event: str, **fields: Any) -> None:
        self._connection.send_bytes(msgspec.json.encode({"event": event, **fields}))


def run(contender: Contender, job: Job) -> Outcome:
    """One verified run. Raises ``StreamRLError`` when a process fails, dies or stands still; leaves none behind."""
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as folder, _Stage(contender) as stage:
        shared = importlib.import_module(contender.module).share(_SPAWN) if contender.shares else None
        job = replace(job, options=contender.options, folder=folder, shared=shared)
        if contender.serves:
            stage.start(SERVER, "serve", job)
            job = replace(job, address=stage.expect(SERVER, "ready").get("address", ""))
        stage.start(CONSUMER, "consume", job)
        job = replace(job, address=stage.expect(CONSUMER, "ready").get("address", job.address))
        producers = {f"producer-{number}": replace(job, producer=number) for number in range(job.producers)}
        for name, own in producers.items():
            stage.start(name, "produce", own)
        for name in producers:
            stage.expect(name, "ready")
        stage.go()
        stage.expect(CONSUMER, "begin")
        before = _cpu_seconds()
        seconds = stage.expect(CONSUMER, "end")["seconds"]
        after = _cpu_seconds()
        memory = _resident_bytes()
        told = stage.finish()
    trajectories = (job.groups - job.warm_up) * job.workload.group_size
    spent = sum(used - before.get(pid, 0.0) for pid, used in after.items())
    return Outcome(job, trajectories, seconds, spent, memory, told)


class _Stage:
    """The processes of one run."""

    def __init__(self, contender: Contender) -> None:
        self._contender = contender
        self._go = _SPAWN.Event()
        self._finished = {"serve": _SPAWN.Event(), "produce": _SPAWN.Event()}
        self._finished["consume"] = self._finished["produce"]
        self._processes: dict[str, SpawnProcess] = {}
        self._connections: dict[str, Connection] = {}
        self._heard: dict[str, list[dict[str, Any]]] = {}
        self._done: set[str] = set()

    def __enter__(self) -> _Stage:
        return self

    def __exit__(self, *_: object) -> None:
        helpers = [helper for process in self._processes.values() for helper in _descendants(process.pid)]
        for process in self._processes.values():  # after a good run, all of them have ended
            process.kill()
            process.join()
        for helper in helpers:  # what a peer started, such as its servers
            with contextlib.suppress(psutil.NoSuchProcess):
                helper.kill()
        for connection in self._connections.values():
            connection.close()

    def start(self, name: str, role: str, job: Job) -> None:
        ours, theirs = _SPAWN.Pipe()
        port = Port(theirs, self._go, self._finished[role])
        process = _SPAWN.Process(target=_become, args=(self._contender.module, role, job, port, os.getpid()))
        process.start()
        theirs.close()
        self._processes[name], self._connections[name], self._heard[name] = process, ours, []

    def go(self) -> None:
        self._go.set()

    def expect(self, name: str, event: str) -> dict[str, Any]:
        """The next message of ``name``, which is ``event``; whoever fails meanwhile ends the run."""
        while not self._heard[name]:
            self._listen(f"{event!r} of its {name}")
        message = self._heard[name].pop(0)
        assert message.pop("event") == event, f"{self._contender.name}: expected {event} of its {name}, got {message}"
        return message

    def finish(self) -> dict[str, dict[str, Any]]:
        """Let everybody end, the server last. What each of them told."""
        self._finished["produce"].set()
        told = {name: self.expect(name, "done") for name in self._processes if name != SERVER}
        self._finished["serve"].set()
        if SERVER in self._processes:
            told[SERVER] = self.expect(SERVER, "done")
        for process in self._processes.values():
            process.join(GRACE_S)
        return told

    def _listen(self, awaited: str) -> None:
        names = {connection: name for name, connection in self._connections.items()}
        ready = wait(list(names), TIMEOUT_S)
        if not ready:
            raise DeadlineExceeded(f"{self._contender.name}: {TIMEOUT_S:.0f} s passed without {awaited}")
        for connection in ready:
            assert isinstance(connection, Connection)
            name = names[connection]
            try:
                message = msgspec.json.decode(connection.recv_bytes())
            except EOFError:
                del self._connections[name]
                self._processes[name].join(GRACE_S)
                if name not in self._done:
                    code = self._processes[name].exitcode
                    raise ActorDied(f"{self._contender.name}: its {name} ended with code {code}") from None
                continue
            if message["event"] == "failed":
                raise StreamRLError(f"{self._contender.name}: its {name} failed: {message['error']}")
            if message["event"] == "done":
                self._done.add(name)
            self._heard[name].append(message)


def die_with_parent() -> None:
    """The kernel kills this process when the one that started it is gone, however that ended."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _become(module: str, role: str, job: Job, port: Port, parent: int) -> None:
    """In the new process: be that role of that module, and die with the bench."""
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the bench, which ends its processes
    try:
        getattr(importlib.import_module(module), role)(job, port)
    except Exception as error:  # noqa: BLE001 - whatever it is, the bench must hear of it
        lines = traceback.format_exc() if not isinstance(error, StreamRLError) else str(error)
        port.tell("failed", error=lines)
    else:
        port.tell("done", **port.told)


def _descendants(pid: int | None = None) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _cpu_seconds() -> dict[int, float]:
    """Used so far by each descendant of this process."""
    used = {}
    for process in _descendants():
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            used[process.pid] = times.user + times.system
    return used


def _resident_bytes() -> int:
    total = 0
    for process in _descendants():
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_full_info().pss
    return total
