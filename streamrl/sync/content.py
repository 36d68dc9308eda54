"""One version in a slot of the publisher's slab, while it is written and afterwards.

::

    writing thread     parts → slot, bucket after bucket
    digest threads           bucket → xxh3-64, its code against the base
    event loop                             entries in order, → members

so that bucket i is digested and sent while bucket i + 1 is gathered, on several threads where the machine has cores for
them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, wait
from types import TracebackType

from streamrl.errors import WeightSyncError
from streamrl.sync.arena import Arena, NamedTensors, named_pairs
from streamrl.sync.delta import encode, word_bytes
from streamrl.sync.messages import BucketEntry
from streamrl.sync.staging import digest_of


class Content:
    """Version ``number`` in ``slot``. Written by one thread inside of ``with content:``, read on the event loop.

    ``base``: the version that serves, where buckets are to be encoded against it.
    """

    def __init__(self, arena: Arena, number: int, slot: int, base: Content | None, digester: Executor) -> None:
        self.number = number
        self.slot = slot
        self.base = base.number if base else -1
        self.scores: list[float] = []
        """The trainer's log-probs of the canary's tokens under this version; empty: nobody is judged by it."""
        self.judged = True
        """Every member is judged by ``scores``; otherwise only those that join under this version."""
        self.entries: list[BucketEntry] = []
        """Of the buckets that are complete, without a gap from the first on."""
        self.payloads: list[memoryview] = []
        """What travels, for each of them."""
        self.offered = 0
        """Buckets that members can fetch."""
        self.complete = False
        self.filling = arena.fill(slot, self._wrote)
        """Where the writing thread puts the tensors; gone after it."""
        self._arena = arena
        self._base_slot = base.slot if base else -1
        self._digester = digester
        self._digesting: list[Future[None]] = []
        self._out_of_order: dict[int, tuple[BucketEntry, memoryview]] = {}
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._failure: WeightSyncError | None = None

    @property
    def payload_bytes(self) -> int:
        """Bytes that travel to a member for the common update."""
        return sum(entry.payload_bytes for entry in self.entries)

    # Writing thread ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Content:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the digests; the version is complete, or failed, and no thread reads the slot any more."""
        try:
            if error is None:
                self.filling.finish(self.number)
                wait(self._digesting, return_when=FIRST_EXCEPTION)
                for digesting in self._digesting:
                    if digesting.done():
                        digesting.result()
        except BaseException as failure:  # whatever it is: the slot holds no version
            error = failure
            raise
        finally:
            for digesting in self._digesting:
                digesting.cancel()
            wait(self._digesting)
            del self.filling  # a cycle, which would keep the memory after its end
            self._loop.call_soon_threadsafe(self._end, error)

    def put(self, named_tensors: NamedTensors) -> None:
        """Write whole tensors; raises ``WeightSyncError`` for those that do not fit the manifest."""
        for name, tensor in named_pairs(named_tensors):
            self.filling.put(name, tensor)

    def _wrote(self, index: int) -> None:
        self._digesting.append(self._digester.submit(self._digest, index))

    # Digest threads ---------------------------------------------------------------------------------------------------

    def _digest(self, index: int) -> None:
        memory = self._arena.bucket(self.slot, index)
        payload, delta = memory, False
        if self.base >= 0:
            manifest = self._arena.manifest
            width = word_bytes(manifest, manifest.buckets[index])
            code = encode(self._arena.bucket(self._base_slot, index), memory, width)
            if code is not None:
                payload, delta = code, True
        entry = BucketEntry(digest_of(memory), payload.nbytes, delta)
        self._loop.call_soon_threadsafe(self._digested, index, entry, payload)

    # Event loop -------------------------------------------------------------------------------------------------------

    async def bucket(self, index: int) -> memoryview:
        """What travels for bucket ``index``, once it is complete. Raises ``WeightSyncError`` if the writing failed."""
        await self._until(lambda: len(self.entries) > index)
        return self.payloads[index]

    async def finished(self) -> None:
        """Return once all is written. Raises ``WeightSyncError`` when the writing failed."""
        await self._until(lambda: self.complete)

    def offered_entries(self, first: int, *, whole: bool) -> list[BucketEntry]:
        """Of the buckets that members can fetch, from number ``first`` on; ``whole``: without codes."""
        entries = self.entries[first : self.offered]
        if not whole:
            return entries
        sizes = [bucket.nbytes for bucket in self._arena.manifest.buckets[first : self.offered]]
        return [BucketEntry(entry.digest, size, False) for entry, size in zip(entries, sizes, strict=True)]

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()

    def _digested(self, index: int, entry: BucketEntry, payload: memoryview) -> None:
        self._out_of_order[index] = entry, payload
        while len(self.entries) in self._out_of_order:
            entry, payload = self._out_of_order.pop(len(self.entries))
            self.entries.append(entry)
            self.payloads.append(payload)
        self._changed.set()

    def _end(self, error: BaseException | None) -> None:
        if error is None:
            self.complete = True
        else:
            reason = str(error) or type(error).__name__
            self._failure = WeightSyncError(f"version {self.number} could not be written: {reason}")
        self._changed.set()
