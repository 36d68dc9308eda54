"""What the tests of the weight sync share: a fake engine around a small model, and a ring on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from streamrl.errors import WeightSyncError
from streamrl.sync.arena import HEADER_BYTES, Arena, NamedTensors, describe, named_pairs
from streamrl.sync.arrival import Arrival
from streamrl.sync.manifest import Manifest, plan_manifest
from streamrl.sync.messages import BucketEntry
from streamrl.sync.observer import Observer
from streamrl.sync.publisher import Publisher
from streamrl.sync.slab import Slab
from streamrl.sync.staging import digest_of
from streamrl.sync.subscriber import Subscriber
from streamrl.sync.update import Step

torch.set_num_threads(1)


def small_model(seed: int) -> torch.nn.Module:
    """Mixed dtypes, an odd-sized, a zero-element and a scalar tensor; larger than one bucket of 1 KiB."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(33, 17), torch.nn.Linear(17, 5).to(torch.bfloat16))
    model.register_parameter("empty", torch.nn.Parameter(torch.zeros(0, 4)))
    model.register_parameter("scale", torch.nn.Parameter(torch.randn((), dtype=torch.float64)))
    return model


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def manifest_of(model: torch.nn.Module, bucket_bytes: int = 1024) -> Manifest:
    return plan_manifest(describe(model.named_parameters()), bucket_bytes)


def equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


class FakeEngine:
    """Just enough of ``ports.Engine``: a model, a log of what happened, and hooks to stop or refuse a load."""

    def __init__(self) -> None:
        self.model = small_model(99)
        self.version = -1
        self.scores: list[float] = []
        self.log: list[str] = []
        self.refuse: set[int] = set()
        self.before_load: Callable[[int], Awaitable[None]] | None = None
        self.after_load: Callable[[], None] = lambda: None

    async def pause(self) -> None:
        self.log.append("pause")

    async def resume(self) -> None:
        self.log.append("resume")

    async def load(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        if self.before_load:
            await self.before_load(version)
        if version in self.refuse:
            raise WeightSyncError(f"no parameter of mine is called like that (version {version})")
        self.model.load_state_dict(tensors)
        self.version = version
        self.log.append(f"load {version}")
        self.after_load()

    def hold_load(self) -> tuple[asyncio.Event, asyncio.Event]:
        """Stop in every load that begins before the release: (one has begun, release)."""
        loading, release = asyncio.Event(), asyncio.Event()

        async def hold(version: int) -> None:
            loading.set()
            await release.wait()

        self.before_load = hold
        return loading, release

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return weights(self.model)


@dataclass
class Events:
    """Everything that was reported, and a way to wait for the next report that fits."""

    seen: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self, event: str, fields: dict[str, Any]) -> None:
        self.seen.append((event, fields))
        self._changed.set()

    def named(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.seen if name == event]

    async def wait(self, event: str, **fields: Any) -> dict[str, Any]:
        async with asyncio.timeout(60):
            while True:
                for got in self.named(event):
                    if fields.items() <= got.items():
                        return got
                self._changed.clear()
                await self._changed.wait()


@dataclass
class Ring:
    """A publisher and whoever was started beside it, each as a task of one loop over real ipc sockets."""

    endpoint: str
    publisher: Publisher
    events: Events
    unresponsive: list[tuple[str, str]]
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    engines: dict[str, Any] = field(default_factory=dict)
    subscribers: dict[str, Subscriber] = field(default_factory=dict)

    def spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        self.tasks[name] = asyncio.create_task(work)

    def join(self, name: str, engine: Any = None, **settings: Any) -> Any:
        engine = engine or FakeEngine()
        self.engines[name] = engine
        self.subscribers[name] = Subscriber(self.endpoint, name, engine, Events(), **settings)
        self.spawn(name, self.subscribers[name].run())
        return engine

    def observe(self, name: str) -> Observer:
        observer = Observer(self.endpoint, name, Events())
        self.spawn(name, observer.run())
        return observer

    def slow_reads(self, name: str) -> tuple[asyncio.Event, threading.Event]:
        """Stop the staging of a subscriber on its worker thread: (it has begun to read, let it go on)."""
        loop = asyncio.get_running_loop()
        reading, read_on = asyncio.Event(), threading.Event()

        def slow(arrival: Arrival) -> None:
            copy = arrival._copy

            def slow_copy(index: int, out: memoryview) -> None:
                loop.call_soon_threadsafe(reading.set)
                assert read_on.wait(60)
                copy(index, out)

            arrival._copy = slow_copy  # type: ignore[method-assign]

        self.on_arrival(name, slow)
        return reading, read_on

    def on_arrival(self, name: str, act: Callable[[Arrival], None]) -> None:
        """Do something to each version that begins to arrive at a subscriber."""
        link = self.subscribers[name]._link
        expect = link._expect

        def expecting(stage: Any) -> Arrival:
            arrival = expect(stage)
            act(arrival)
            return arrival

        link._expect = expecting  # type: ignore[method-assign]

    async def expire(self, behind: dict[str, Step]) -> None:
        """Let the deadline of the update under way pass, once it is set and nobody but ``behind`` is waited for."""
        async with asyncio.timeout(60):
            while (timer := self._deadline(behind)) is None:  # noqa: ASYNC110 the state has no event
                await asyncio.sleep(0)
        act, arguments = timer._callback, timer._args  # type: ignore[attr-defined]
        timer.cancel()
        act(*arguments)

    def _deadline(self, behind: dict[str, Step]) -> asyncio.TimerHandle | None:
        for running in self.publisher._running.values():
            if running.update.waiting == behind and running.timer is not None and not running.timer.cancelled():
                return running.timer
        return None

    async def leave(self, name: str) -> None:
        task = self.tasks.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def write(self, version: int, model: torch.nn.Module) -> None:
        with self.publisher.open(version) as content:
            content.put(model.named_parameters())


@contextmanager
def socket_folder() -> Iterator[str]:
    """A short path: ipc addresses end at 107 characters."""
    folder = tempfile.mkdtemp(prefix="weights-")
    try:
        yield f"ipc://{folder}/w"
    finally:
        shutil.rmtree(folder)


@asynccontextmanager
async def ring(
    *,
    timeout_s: float = 10.0,
    model: torch.nn.Module | None = None,
    endpoint: str | None = None,
    bucket_bytes: int = 1024,
    rolling: bool = False,
    **settings: Any,
) -> AsyncIterator[Ring]:
    """A running publisher of ``model``'s manifest, to which the test adds members; all is ended at the end."""
    with socket_folder() as own:
        events, unresponsive = Events(), []
        slab = Slab(
            manifest_of(model or small_model(0), bucket_bytes),
            endpoint=endpoint or own,
            folder=Path(own.removeprefix("ipc://")).parent / "weights",
            timeout_s=timeout_s,
            **settings,
        )
        publisher = Publisher(
            endpoint or own,
            slab,
            timeout_s=timeout_s,
            on_event=events,
            on_unresponsive=lambda member, phase: unresponsive.append((member, phase)),
            rolling=rolling,
        )
        it = Ring(endpoint or own, publisher, events, unresponsive)
        it.spawn("publisher", publisher.run())
        try:
            async with asyncio.timeout(60):
                yield it
        finally:
            for name in list(it.tasks):
                await it.leave(name)
            publisher.close()


def fill(arena: Arena, slot: int, version: int, named_tensors: NamedTensors) -> list[BucketEntry]:
    """Write and seal a version as a publisher does; what a Stage says of its buckets."""
    entries: dict[int, BucketEntry] = {}

    def digest(index: int) -> None:
        memory = arena.bucket(slot, index)
        entries[index] = BucketEntry(digest_of(memory), memory.nbytes, False)

    filling = arena.fill(slot, digest)
    for name, tensor in named_pairs(named_tensors):
        filling.put(name, tensor)
    filling.finish(version)
    arena.seal(slot, version)
    return [entries[index] for index in range(len(entries))]


def flip_byte(arena: Arena, slot: int, offset: int) -> None:
    """Damage one byte of a slot, as faulty memory would."""
    fd = os.open(arena.path, os.O_RDWR)
    position = HEADER_BYTES + slot * arena.manifest.slot_bytes + offset
    (byte,) = os.pread(fd, 1, position)
    os.pwrite(fd, bytes([byte ^ 1]), position)
    os.close(fd)


def open_memfds(pid: int | str = "self") -> list[str]:
    """Memory for weights that the process holds; of this one, without what waits to be collected in a cycle."""
    gc.collect()
    links = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return [link for link in links if "streamrl-weights" in link]
