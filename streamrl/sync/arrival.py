"""One version on its way into the host memory of a member: fetched, decoded and verified bucket by bucket (C5).

It goes on while the publisher still writes later buckets and while the engine generates.
"""

from __future__ import annotations

import asyncio
import functools
from typing import cast

from streamrl.errors import WeightSyncError
from streamrl.sync import messages as wire
from streamrl.sync.delta import decode
from streamrl.sync.manifest import Manifest
from streamrl.sync.staging import Tensors, bucket_of, digest_of, require_digest, slot_memory, tensors_in
from streamrl.sync.transport import BucketId, Receiver
from streamrl.sync.workers import Crew


class Arrival:
    """What ``stage`` announces. ``base``: whether this process holds the version that codes are against."""

    def __init__(self, stage: wire.Stage, manifest: Manifest, receiver: Receiver, has_base: bool) -> None:
        self.stage = stage
        self._manifest = manifest
        self._receiver = receiver
        self._has_base = has_base
        self._entries = list(stage.buckets)
        self._changed = asyncio.Event()
        self._spare: list[bytearray] = []
        """Memory of codes that were decoded."""
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
        async with Crew() as crew:
            for index in range(len(self._manifest.buckets)):
                await self._until_known(index)
                code = await self._fetch(index)
                await crew.give(functools.partial(self.check, index, code))
        self._spare.clear()
        if not self.intact():
            raise WeightSyncError(f"slot {self.stage.slot} holds version {self.stage.version} no more")
        return tensors_in(self._manifest, self._memory)

    def intact(self) -> bool:
        """Whether the memory still holds what was verified."""
        if self.private_memory or not self._manifest.buckets:
            return True
        return self._receiver.holds(self.stage.version, self.stage.slot)

    def overwritten_by(self, stage: wire.Stage) -> bool:
        """Whether the arrival of another version would write to the memory of this one."""
        mine = self.stage
        if self.private_memory or (self._receiver.in_place and stage.private):
            return False
        return (stage.session, stage.slot) == (mine.session, mine.slot) and stage.version != mine.version

    def check(self, index: int, code: memoryview | None) -> None:
        """Decode or copy a bucket where that is needed, and compare it with its digest. Blocking: for a worker thread.

        Raises ``WeightSyncError`` where it is not what was sent.
        """
        memory = bucket_of(self._manifest, self._memory, index)
        if code is not None:
            digest = decode(code, bucket_of(self._manifest, self._receiver.memory(1 - self.stage.slot), index), memory)
            self._spare.append(cast(bytearray, code.obj))
        else:
            if self.private_memory:
                self._copy(index, memory)
            digest = digest_of(memory)
        require_digest(self._manifest, self.stage.version, index, digest, self._entries[index].digest)

    async def _fetch(self, index: int) -> memoryview | None:
        """Bring a bucket to its place, or its code, which is returned."""
        if self._receiver.in_place:
            return None
        entry, stage = self._entries[index], self.stage
        out = bucket_of(self._manifest, self._memory, index)
        bucket = BucketId(stage.session, stage.version, stage.slot, index, stage.attempt, stage.private)
        if not entry.delta:
            if entry.payload_bytes != out.nbytes:
                raise WeightSyncError(f"bucket {index}: expected {out.nbytes} bytes, {entry.payload_bytes} are offered")
            await self._receiver.fetch(bucket, out)
            return None
        if entry.payload_bytes > out.nbytes:
            raise WeightSyncError(f"bucket {index}: a code of {entry.payload_bytes} bytes for {out.nbytes} bytes")
        if not self._has_base:
            raise WeightSyncError(f"version {stage.base}, which the codes are against, is not held here")
        code = self._room(entry.payload_bytes)
        await self._receiver.fetch(bucket, code)
        return code

    def _room(self, nbytes: int) -> memoryview:
        """Memory for a code: what one was decoded from, if it is large enough, as its pages are there."""
        memory = self._spare.pop() if self._spare else bytearray()
        if len(memory) < nbytes:
            memory = bytearray(min(nbytes + nbytes // 8, self._manifest.slot_bytes))
        return memoryview(memory)[:nbytes]

    def _copy(self, index: int, out: memoryview) -> None:
        out[:] = bucket_of(self._manifest, self._receiver.memory(self.stage.slot), index)

    async def _until_known(self, index: int) -> None:
        while len(self._entries) <= index:
            self._changed.clear()
            await self._changed.wait()
