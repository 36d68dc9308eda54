"""One version on its way into the host memory of a member: fetched, decoded and verified bucket by bucket (C5).

It goes on while the publisher still writes later buckets and while the engine generates.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from streamrl.errors import WeightSyncError
from streamrl.sync import messages as wire
from streamrl.sync.delta import decode
from streamrl.sync.manifest import Manifest
from streamrl.sync.staging import Tensors, bucket_of, require_digest, slot_memory, tensors_in
from streamrl.sync.transport import BucketId, Receiver

Result = TypeVar("Result")


class Arrival:
    """What ``stage`` announces. ``base``: whether this process holds the version that codes are against."""

    def __init__(self, stage: wire.Stage, manifest: Manifest, receiver: Receiver, has_base: bool) -> None:
        self.stage = stage
        self._manifest = manifest
        self._receiver = receiver
        self._has_base = has_base
        self._entries = list(stage.buckets)
        self._changed = asyncio.Event()
        self.private_memory = receiver.in_place and stage.private
        """The slot is the publisher's and may be written again: it is copied out."""
        self._memory = slot_memory(manifest) if self.private_memory else receiver.memory(stage.slot)

    def extend(self, message: wire.Buckets) -> None:
        """Further buckets can be fetched. Raises ``WeightSyncError`` where one was left out."""
        if message.first > len(self._entries):
            raise WeightSyncError(f"buckets {len(self._entries)} to {message.first - 1} were never announced")
        self._entries[message.first :] = message.buckets
        self._changed.set()

    async def announced(self) -> None:
        """Return once every bucket can be fetched."""
        await self._until_known(len(self._manifest.buckets) - 1)

    async def run(self) -> Tensors:
        """The verified tensors: views of shared or own memory, or private copies.

        Raises ``WeightSyncError`` when a bucket cannot be had or is not what was sent.
        """
        for index in range(len(self._manifest.buckets)):
            await self._until_known(index)
            await self._bring(index)
        if not self.intact():
            raise WeightSyncError(f"slot {self.stage.slot} holds version {self.stage.version} no more")
        return tensors_in(self._manifest, self._memory)

    def intact(self) -> bool:
        """Whether the memory still holds what was verified."""
        if self.private_memory or not self._manifest.buckets:
            return True
        return self._receiver.holds(self.stage.version, self.stage.slot)

    def check(self, index: int) -> None:
        """Compare a bucket with its digest. Blocking: for a worker thread."""
        memory = bucket_of(self._manifest, self._memory, index)
        require_digest(self._manifest, self.stage.version, index, memory, self._entries[index].digest)

    async def _bring(self, index: int) -> None:
        entry, stage = self._entries[index], self.stage
        out = bucket_of(self._manifest, self._memory, index)
        bucket = BucketId(stage.session, stage.version, stage.slot, index, stage.attempt, stage.private)
        if self._receiver.in_place:
            if self.private_memory:
                await _in_thread(lambda: self._copy(index, out))
        elif entry.delta:
            if not self._has_base:
                raise WeightSyncError(f"version {stage.base}, which the codes are against, is not held here")
            code = memoryview(bytearray(entry.payload_bytes))
            await self._receiver.fetch(bucket, code)
            base = bucket_of(self._manifest, self._receiver.memory(1 - stage.slot), index)
            await _in_thread(lambda: decode(code, base, out))
        else:
            if entry.payload_bytes != out.nbytes:
                raise WeightSyncError(f"bucket {index}: expected {out.nbytes} bytes, {entry.payload_bytes} are offered")
            await self._receiver.fetch(bucket, out)
        await _in_thread(lambda: self.check(index))

    def _copy(self, index: int, out: memoryview) -> None:
        out[:] = bucket_of(self._manifest, self._receiver.memory(self.stage.slot), index)

    async def _until_known(self, index: int) -> None:
        while len(self._entries) <= index:
            self._changed.clear()
            await self._changed.wait()


async def _in_thread(work: Callable[[], Result]) -> Result:
    """Run blocking work; a cancellation waits for its end, so that nobody writes to memory that has another use."""
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait({working})
        raise
