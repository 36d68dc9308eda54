"""What a sender has to give: per version the bytes of its buckets, as they lie in the slab or shortened to a delta."""

from __future__ import annotations

from dataclasses import dataclass, field

from streamrl.errors import WeightSyncError
from streamrl.sync.arena import Arena
from streamrl.sync.transport import BucketId


@dataclass
class _Version:
    session: str
    slot: int
    payloads: dict[int, memoryview] = field(default_factory=dict)
    """By bucket; those that were offered."""


class Offers:
    """By version, from ``begin`` to ``withdraw``. Belongs to the event loop."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._versions: dict[int, _Version] = {}

    def begin(self, version: BucketId) -> None:
        """One that is on offer already keeps its buckets."""
        known = self._versions.get(version.version)
        if known is None or (known.session, known.slot) != (version.session, version.slot):
            self._versions[version.version] = _Version(version.session, version.slot)

    def add(self, bucket: BucketId, payload: memoryview) -> None:
        self._versions[bucket.version].payloads[bucket.index] = payload

    def withdraw(self, version: int) -> None:
        self._versions.pop(version, None)

    def find(self, bucket: BucketId, nbytes: int) -> memoryview:
        """The ``nbytes`` bytes of a bucket: what was offered or, as long as the bucket itself, the bucket in the slab.

        Raises ``WeightSyncError`` when there is nothing of the kind.
        """
        version = self._versions.get(bucket.version)
        if version is None or (version.session, version.slot) != (bucket.session, bucket.slot):
            raise WeightSyncError(f"version {bucket.version} of session {bucket.session} is not on offer")
        payload = version.payloads.get(bucket.index)
        if payload is None:
            raise WeightSyncError(f"bucket {bucket.index} of version {bucket.version} is not on offer")
        if payload.nbytes == nbytes:
            return payload
        whole = self._arena.manifest.buckets[bucket.index].nbytes
        if whole != nbytes:
            raise WeightSyncError(
                f"bucket {bucket.index} of version {bucket.version} takes {whole} bytes, or {payload.nbytes} as it was "
                f"offered; asked for are {nbytes}"
            )
        return self._arena.bucket(version.slot, bucket.index)
