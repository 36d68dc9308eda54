"""Transport ``shm``: readers map the publisher's own memory, so nothing travels at all. One host."""

from __future__ import annotations

import asyncio

from streamrl.sync.arena import Arena, ArenaReader
from streamrl.sync.manifest import Manifest
from streamrl.sync.transport import BucketId, Receiver, Sender


class ShmSender(Sender):
    name = "shm"

    def __init__(self, arena: Arena) -> None:
        self.address = arena.path

    async def run(self) -> None:
        await asyncio.Event().wait()

    def set_members(self, names: set[str]) -> None:
        """Whoever reads the memory needs no further word."""

    async def begin(self, version: BucketId) -> None:
        """The slot can be read from now on, as far as it is complete."""

    async def offer(self, bucket: BucketId, payload: memoryview) -> None:
        """It lies where readers look."""

    async def complete(self, version: BucketId) -> None:
        """The whole slot lies where readers look."""

    def withdraw(self, version: int) -> None:
        """The slot's header tells late readers (``Receiver.holds``)."""

    def close(self) -> None:
        """The memory is the publisher's."""


class ShmReceiver(Receiver):
    """Raises ``WeightSyncError`` when the memory cannot be opened or holds the weights of another manifest."""

    in_place = True

    def __init__(self, address: str, manifest: Manifest) -> None:
        self._reader = ArenaReader(address, manifest)

    def memory(self, slot: int) -> memoryview:
        return self._reader.slot(slot)

    def holds(self, version: int, slot: int) -> bool:
        return self._reader.holds(version, slot)

    async def fetch(self, bucket: BucketId, out: memoryview) -> None:
        raise AssertionError("nothing has to be fetched from memory that is shared")

    def close(self) -> None:
        self._reader.close()
