"""How buckets get from the trainer's host into the memory of each member: the seam that transports are written to.

The publisher holds every version in a slab of its own host (``arena.py``), complete bucket by bucket. A *sender* makes
a complete bucket fetchable, a *receiver* brings it into the host memory of its process. Order, digests, retries,
deadlines and the commit are the publisher's and the subscriber's business, so that all transports share them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from streamrl.errors import WeightSyncError
from streamrl.sync.arena import Arena
from streamrl.sync.manifest import Manifest


@dataclass(frozen=True)
class BucketId:
    """Which bytes, for whom and in which attempt."""

    session: str
    """One life of the publisher."""
    version: int
    slot: int
    """0 or 1, in the publisher's slab."""
    index: int
    """Of the bucket in the manifest; -1 stands for the version as a whole."""
    attempt: int = 0
    """Over 0: a retry of this member alone."""
    private: bool = False
    """For this member alone: a late joiner, an observer, or one that is brought back to an older version."""


class Sender(Protocol):
    """The publisher's side. Every method belongs to the event loop and returns soon: blocking work goes to threads."""

    name: str
    address: str
    """What receivers need to find it: a path, an endpoint. It travels in Welcome."""

    async def run(self) -> None:
        """Serve until cancelled."""
        ...

    def set_members(self, names: set[str]) -> None:
        """Who takes part from now on."""
        ...

    async def begin(self, version: BucketId) -> None:
        """A version starts to arrive in its slot."""
        ...

    async def offer(self, bucket: BucketId, payload: memoryview) -> None:
        """A bucket is complete: when this returns, receivers may be told to fetch it. In the order of the buckets.

        ``payload``: its bytes, or their code against the version before; unchanged until ``withdraw``. Who asks in
        private or another time always gets the bytes, ``arena.bucket(slot, index)``. Raises ``WeightSyncError`` when it
        cannot be sent, which gives the update up.
        """
        ...

    async def complete(self, version: BucketId) -> None:
        """Every bucket of the version was offered."""
        ...

    def withdraw(self, version: int) -> None:
        """Nobody fetches this version any more: its slot is about to be overwritten."""
        ...

    def close(self) -> None:
        """Free everything. Idempotent."""
        ...


class Receiver(Protocol):
    """A member's side, one for each process and life of the publisher. Every method belongs to the event loop."""

    in_place: bool
    """Whether ``memory`` is the publisher's own: complete as soon as it was offered, and read-only."""

    def reserve(self) -> None:
        """Take the memory: once, before anything else but ``close``. Blocking: for a worker thread.

        Raises ``WeightSyncError`` where it cannot be had.
        """
        return

    def memory(self, slot: int) -> memoryview:
        """The bytes of one slot in this host's memory; ``manifest.slot_bytes`` of them."""
        ...

    def holds(self, version: int, slot: int) -> bool:
        """Whether ``memory(slot)`` still is what was fetched; only a publisher's own memory may change by itself."""
        return True

    async def fetch(self, bucket: BucketId, out: memoryview) -> None:
        """Bring all of ``out``: the bucket, or its code. In the order of the buckets, one at a time.

        Cancelled when the update is given up; ``out`` is not written to after that. Raises ``WeightSyncError`` when the
        bytes cannot be had; the member is staged once more, or given up.
        """
        ...

    def close(self) -> None:
        """Free everything that no tensor views any more. Idempotent."""
        ...


def make_sender(name: str, arena: Arena, *, endpoint: str, folder: Path, timeout_s: float) -> Sender:
    """The publisher's end of transport ``name``.

    ``endpoint``: of the publisher's own socket, to derive others from. ``folder``: for versions on disk.
    """
    if name == "shm":
        from streamrl.sync.transports.shm import ShmSender

        return ShmSender(arena)
    if name == "zmq":
        from streamrl.sync.transports.zmq_pull import ZmqSender

        return ZmqSender(arena, endpoint)
    if name == "collective":
        from streamrl.sync.transports.collective import CollectiveSender

        return CollectiveSender(arena, endpoint)
    if name == "disk":
        from streamrl.sync.transports.disk import DiskSender

        return DiskSender(arena.manifest, folder)
    if name == "nixl":
        from streamrl.sync.transports.nixl_pull import NixlSender

        return NixlSender(arena, endpoint, timeout_s)
    raise AssertionError(f"no transport is called {name!r}")


def make_receiver(name: str, address: str, manifest: Manifest, *, member: str, timeout_s: float) -> Receiver:
    """A member's end of the transport that Welcome names.

    Raises ``WeightSyncError`` when it cannot be reached, or there is none of that name here.
    """
    if name == "shm":
        from streamrl.sync.transports.shm import ShmReceiver

        return ShmReceiver(address, manifest)
    if name == "zmq":
        from streamrl.sync.transports.zmq_pull import ZmqReceiver

        return ZmqReceiver(address, manifest, timeout_s=timeout_s)
    if name == "collective":
        from streamrl.sync.transports.collective import CollectiveReceiver

        return CollectiveReceiver(address, manifest, member=member, timeout_s=timeout_s)
    if name == "disk":
        from streamrl.sync.transports.disk import DiskReceiver

        return DiskReceiver(address, manifest, timeout_s=timeout_s)
    if name == "nixl":
        from streamrl.sync.transports.nixl_pull import NixlReceiver

        return NixlReceiver(address, manifest, member=member, timeout_s=timeout_s)
    raise WeightSyncError(f"the publisher sends by {name!r}, which is no transport here: is it of another version?")
