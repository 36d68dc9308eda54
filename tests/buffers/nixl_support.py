"""Processes that hold payloads and read them, for the tests of payloads by reference."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import multiprocessing
import os
import random
import signal
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import xxhash

from streamrl.buffers.links.link_nixl import ArenaReader, ArenaWriter
from streamrl.buffers.wire.reference import Reference

needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="the nixl package is not installed")

MB = 1 << 20


def random_bytes(nbytes: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def run(scenario: Awaitable[Any]) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(scenario, 120)

    return asyncio.run(limited())


def produce(pipe: Connection, name: str, size: int) -> None:
    """A process with an arena that does as it is told over the pipe."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may ignore it, and children inherit that

    async def serve() -> None:
        writer = ArenaWriter(name, size)
        pipe.send((writer.name, writer.metadata))
        while True:
            command, *arguments = pipe.recv()
            if command == "write":
                nbytes, seed = arguments
                pipe.send(await writer.write([random_bytes(nbytes, seed)], nbytes))
            elif command == "free":
                pipe.send(writer.free(*arguments))
            elif command == "close":
                writer.close()
                pipe.send(None)
                return

    asyncio.run(serve())


def consume(pipe: Connection, agent: str, metadata: bytes, reference: Reference) -> None:
    """A process that reads one payload over and over, and says each digest, until it is killed or told to end."""

    async def serve() -> None:
        reader = ArenaReader("consumer")
        reader.add(agent, metadata)
        for _ in itertools.count():
            (payload,) = await reader.read(reference, [(0, reference.nbytes)])
            pipe.send(xxhash.xxh3_64_intdigest(payload))
            if pipe.poll():
                reader.close()
                return

    asyncio.run(serve())


class Child:
    """A spawned process and the pipe to it."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("spawn").Process(target=target, args=(theirs, *arguments))
        self.process.start()
        theirs.close()

    def hear(self) -> Any:
        assert self.pipe.poll(60), "the process says nothing"
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


class Producer(Child):
    def __init__(self, name: str = "producer", size: int = 64 * MB) -> None:
        super().__init__(produce, name, size)
        self.agent, self.metadata = self.hear()

    def write(self, nbytes: int, seed: int) -> Reference:
        self.pipe.send(("write", nbytes, seed))
        return self.hear()

    def free(self, reference: Reference) -> bool:
        self.pipe.send(("free", reference))
        return self.hear()


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """Starts processes; at the end they are dead, and none has left shared memory behind."""
    before = set(os.listdir("/dev/shm"))
    children: list[Child] = []

    def begin(kind: Callable[..., Child], *arguments: Any) -> Child:
        children.append(kind(*arguments))
        return children[-1]

    yield begin
    for child in children:
        child.kill()
    assert [name for name in set(os.listdir("/dev/shm")) - before if "ucx" in name] == []
    creators = [int(line.split()[4]) for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]
    assert {child.process.pid for child in children} & set(creators) == set()


@pytest.fixture(scope="module")
def shared() -> Iterator[Producer]:
    """One producer for all tests that leave it alive."""
    producer = Producer("shared", 128 * MB)
    yield producer
    producer.kill()


@contextlib.contextmanager
def reading(*producers: Producer, timeout_s: float = 30.0) -> Iterator[ArenaReader]:
    reader = ArenaReader("consumer", timeout_s)
    try:
        for producer in producers:
            reader.add(producer.agent, producer.metadata)
        yield reader
    finally:
        reader.close()


@contextlib.contextmanager
def writing(size: int) -> Iterator[ArenaWriter]:
    writer = ArenaWriter("here", size)
    try:
        yield writer
    finally:
        writer.close()


def everything(reference: Reference) -> list[tuple[int, int]]:
    return [(0, reference.nbytes)]
