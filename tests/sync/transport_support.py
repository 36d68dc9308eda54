"""A sender in a process of its own that does as it is told over a pipe, and a receiver beside the test."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.errors import WeightSyncError
from streamrl.sync.manifest import Manifest, plan_manifest
from streamrl.sync.staging import bucket_of, slot_memory, tensors_in
from streamrl.sync.transport import BucketId, Receiver, Sender, make_receiver, make_sender

NIXL = pytest.param(
    "nixl", marks=pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")
)
MOVING = ("zmq", "disk", "collective", NIXL)
"""Transports that bring bytes into a receiver's own memory."""
SESSION = "5e551011"
SPAWN = multiprocessing.get_context("spawn")


def mixed() -> Manifest:
    """Mixed dtypes, odd sizes, a scalar, a zero-element tensor, and one that takes several buckets."""
    return plan_manifest(
        [
            ("odd", (33, 17), "float32"),
            ("half", (17, 5), "bfloat16"),
            ("empty", (0, 4), "float32"),
            ("large", (5000,), "float16"),
            ("scale", (), "float64"),
            ("flags", (7,), "bool"),
        ],
        4096,
    )


def large(buckets: int = 2, bucket_bytes: int = 18 << 20) -> Manifest:
    """Buckets that take several parts of any transport."""
    return plan_manifest([(f"w{index}", (bucket_bytes,), "uint8") for index in range(buckets)], bucket_bytes)


def content(manifest: Manifest, version: int) -> memoryview:
    """A slot with the weights of ``version``: any process makes the same."""
    memory = slot_memory(manifest)
    random = torch.Generator().manual_seed(version)
    for tensor in tensors_in(manifest, memory).values():
        flat = tensor.view(-1).view(torch.uint8)
        flat.copy_(torch.randint(0, 2 if tensor.dtype == torch.bool else 256, flat.shape, generator=random))
    return memory


class Slab:
    """What a sender needs of the publisher's memory."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.slots = [slot_memory(manifest), slot_memory(manifest)]

    def slot(self, slot: int) -> memoryview:
        return self.slots[slot]

    def bucket(self, slot: int, index: int) -> memoryview:
        return bucket_of(self.manifest, self.slots[slot], index)


def bucket_id(version: int, slot: int, index: int, **fields: Any) -> BucketId:
    return BucketId(session=SESSION, version=version, slot=slot, index=index, **fields)


async def offer_version(sender: Sender, slab: Slab, version: int, slot: int, buckets: int | None = None) -> None:
    """Write a version and offer its buckets, or the first few of them."""
    slab.slots[slot][:] = content(slab.manifest, version)
    await sender.begin(bucket_id(version, slot, -1))
    for index in range(len(slab.manifest.buckets))[:buckets]:
        await sender.offer(bucket_id(version, slot, index), slab.bucket(slot, index))
    if buckets is None:
        await sender.complete(bucket_id(version, slot, -1))


async def fetch_version(receiver: Receiver, manifest: Manifest, version: int, slot: int, **fields: Any) -> None:
    for index in range(len(manifest.buckets)):
        out = bucket_of(manifest, receiver.memory(slot), index)
        await receiver.fetch(bucket_id(version, slot, index, **fields), out)


def fetched(receiver: Receiver, manifest: Manifest, slot: int) -> dict[str, torch.Tensor]:
    return tensors_in(manifest, receiver.memory(slot))


def expected(manifest: Manifest, version: int) -> dict[str, torch.Tensor]:
    return tensors_in(manifest, content(manifest, version))


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        (one[name].dtype, one[name].shape) == (other[name].dtype, other[name].shape)
        and torch.equal(one[name].reshape(-1).view(torch.uint8), other[name].reshape(-1).view(torch.uint8))
        for name in one
    )


@asynccontextmanager
async def sending(name: str, manifest: Manifest, folder: Path) -> AsyncIterator[tuple[Sender, Slab]]:
    slab = Slab(manifest)
    sender = make_sender(name, slab, endpoint=f"ipc://{folder}/s", folder=folder / "weights", timeout_s=20)  # type: ignore[arg-type]
    serving = asyncio.create_task(sender.run())
    try:
        yield sender, slab
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        sender.close()


@contextmanager
def receiving(name: str, address: str, manifest: Manifest, member: str = "rollouter-0") -> Iterator[Receiver]:
    receiver = make_receiver(name, address, manifest, member=member, timeout_s=20)
    try:
        receiver.reserve()
        yield receiver
    finally:
        receiver.close()


def send(pipe: Connection, name: str, manifest: Manifest, folder: Path) -> None:
    """The process of a sender."""

    async def serve() -> None:
        async with sending(name, manifest, folder) as (sender, slab):
            pipe.send(sender.address)
            while True:
                command, *arguments = await asyncio.to_thread(pipe.recv)
                match command:
                    case "members":
                        sender.set_members(set(arguments))
                    case "offer":
                        await offer_version(sender, slab, *arguments)
                    case "withdraw":
                        sender.withdraw(*arguments)
                    case "end":
                        pipe.send(None)
                        return
                pipe.send(None)

    asyncio.run(asyncio.wait_for(serve(), 120))


def receive(pipe: Connection, name: str, address: str, manifest: Manifest, member: str) -> None:
    """The process of a receiver: fetches version 0 over and over, and says each time whether it came through."""

    async def serve() -> None:
        with receiving(name, address, manifest, member) as receiver:
            wanted = expected(manifest, 0)
            while True:
                await fetch_version(receiver, manifest, 0, 0)
                pipe.send(same_bits(fetched(receiver, manifest, 0), wanted))

    with contextlib.suppress(BrokenPipeError):
        asyncio.run(serve())


class Child:
    """A spawned process and the pipe to it."""

    def __init__(self, target: Any, *arguments: Any) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self.process = SPAWN.Process(target=target, args=(theirs, *arguments))
        self.process.start()
        theirs.close()

    def hear(self) -> Any:
        assert self.pipe.poll(60), "the process says nothing"
        return self.pipe.recv()

    def tell(self, *command: Any) -> None:
        self.pipe.send(command)
        self.hear()

    def stop(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


async def refused(fetch: Any) -> str:
    """The ``WeightSyncError`` of a fetch."""
    try:
        await asyncio.wait_for(fetch, 30)
    except WeightSyncError as error:
        return str(error)
    raise AssertionError("the bucket came")
