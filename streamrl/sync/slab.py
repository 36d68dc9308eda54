"""The versions that the publisher holds, one per slot, and how their buckets are made fetchable."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from streamrl.sync.arena import Arena
from streamrl.sync.content import Content
from streamrl.sync.manifest import Manifest
from streamrl.sync.transport import BucketId, make_sender
from streamrl.sync.workers import worker_count


class Slab:
    """Two slots and the sender that carries them. All methods belong to the event loop.

    ``endpoint``: of the publisher's socket. ``folder``: for versions that travel by disk. ``anchor_every``: with
    ``delta``, every so many versions one travels as a whole.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        endpoint: str,
        folder: Path,
        timeout_s: float,
        transport: str = "shm",
        delta: bool = False,
        anchor_every: int = 20,
    ) -> None:
        self.session = os.urandom(8).hex()
        """Names one life of the publisher."""
        self.manifest = manifest
        self._buckets = len(manifest.buckets)
        self._arena = Arena(manifest)
        self.sender = make_sender(transport, self._arena, endpoint=endpoint, folder=folder, timeout_s=timeout_s)
        self._digester = ThreadPoolExecutor(worker_count(), thread_name_prefix="weights-digest")
        self._contents: list[Content | None] = [None, None]
        self._delta = delta
        self._anchor_every = anchor_every
        self._whole_next = True

    def content(self, version: int) -> Content | None:
        """What is held of ``version``."""
        return next((held for held in self._contents if held is not None and held.number == version), None)

    def open(self, version: int, current: int, queued: list[int]) -> Content:
        """A slot for ``version`` that holds neither the ``current`` version nor one that is being published."""
        held = [content.number if content else -1 for content in self._contents]
        free = [slot for slot, number in enumerate(held) if number == -1 or number not in (current, *queued)]
        assert free, f"no slot is free for version {version}: versions {held} are still needed"
        slot = min(free, key=lambda each: held[each])
        if (old := self._contents[slot]) is not None:
            self.sender.withdraw(old.number)
        whole, self._whole_next = self._whole_next or version % self._anchor_every == 0, False
        base = self.content(current) if self._delta and not whole else None
        content = Content(self._arena, version, slot, base, self._digester)
        self._contents[slot] = content
        return content

    def distrust(self) -> None:
        """Something went wrong: the next version travels as a whole."""
        self._whole_next = True

    async def offer(self, content: Content, announce: Callable[[Content, int], None]) -> None:
        """Make each bucket fetchable as soon as it is written; ``announce(content, n)`` after the first ``n`` are.

        The last bucket is announced when the slot is sealed, which who reads in place looks for after it. Raises
        ``WeightSyncError`` when the version cannot be written or sent.
        """
        version = BucketId(self.session, content.number, content.slot, -1)
        await self.sender.begin(version)
        for index in range(self._buckets):
            payload = await content.bucket(index)
            await self.sender.offer(dataclasses.replace(version, index=index), payload)
            if index + 1 == len(content.entries) < self._buckets:  # those that come fast share a message
                announce(content, index + 1)
        await content.finished()
        self._arena.seal(content.slot, content.number)
        await self.sender.complete(version)
        announce(content, self._buckets)

    def close(self) -> None:
        """Free the memory; members that mapped it keep it until they let go."""
        self._digester.shutdown(cancel_futures=True)
        self._contents = [None, None]
        self.sender.close()
        self._arena.close()
