"""Transport ``nixl``: receivers read buckets one-sidedly out of the publisher's slab, or out of each other's memory.

::

    trainer                          first receiver of a host                       the others of that host
    | slot 0 | slot 1 |  ── read ──►  | slot 0 | slot 1 |  ── copy ──►               | slot 0 | slot 1 |
    | board           |               | board           |  ── read ──► first receiver of another host ──► …

The code of whose memory is read takes no part (``nixl_memory.py``). Who reads from whom within a host is in
``host_share.py``, and from host to host in ``chain.py``. Retries, late joiners and observers always read from the
trainer, as does whoever waits too long. Of the waits for others each is longer than those that it includes.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import xxhash

from streamrl.errors import StreamRLError, WeightSyncError
from streamrl.sync.arena import Arena
from streamrl.sync.manifest import Manifest
from streamrl.sync.transport import BucketId, Receiver, Sender
from streamrl.sync.transports.chain_links import ChainEnd, ChainHub, identity_of
from streamrl.sync.transports.host_share import HostShare, same_network, this_host
from streamrl.sync.transports.nixl_memory import OpenMemory, Owner, Place, Pull

READ_PATIENCE = 1 / 16
"""Of ``timeout_s``: for a read from another host."""
CHAIN_PATIENCE = 2 / 16
"""For a host that could read, until nobody waits for it any more."""
TURN_PATIENCE = 3 / 16
"""For the host before this one to have a bucket."""
HOST_PATIENCE = 4 / 16
"""For the first receiver of this host to have it. That leaves the time to pull."""

TRAINER = "the publisher"
OTHER_HOST = "that host"
"""Whose memory is read, in messages."""
NAME_A_NETWORK = "; it is on another host, so set UCX_NET_DEVICES, there and here, to a trusted network between them"
"""UCX is on loopback otherwise."""

log = logging.getLogger(__name__)


class Address(msgspec.Struct, frozen=True):
    """How to reach a sender; travels in Welcome, in base64."""

    place: Place
    host: str
    chain: str
    """Endpoint of its ``ChainHub``."""


class NixlSender(Sender):
    """The slab as memory that others read, and who reads from whom. Raises ``ConfigError`` without the nixl package."""

    name = "nixl"

    def __init__(self, arena: Arena, endpoint: str, timeout_s: float) -> None:
        self._memory = OpenMemory(f"weights#{uuid.uuid4().hex[:16]}", arena)
        self._chain = ChainHub(endpoint, len(arena.manifest.buckets), CHAIN_PATIENCE * timeout_s)
        address = Address(self._memory.place, this_host(), self._chain.address)
        self.address = base64.b64encode(msgspec.msgpack.encode(address)).decode()

    async def run(self) -> None:
        await self._chain.run()

    def set_members(self, names: set[str]) -> None:
        self._chain.set_members(names)

    async def begin(self, version: BucketId) -> None:
        self._memory.begin(version.slot, version.version)
        self._chain.begin(version.session, version.version)

    async def offer(self, bucket: BucketId, payload: memoryview) -> None:
        self._memory.has(bucket.slot, bucket.index)
        self._chain.offered(bucket.version, bucket.index + 1)

    async def complete(self, version: BucketId) -> None:
        """Each bucket is there as soon as it is offered."""

    def withdraw(self, version: int) -> None:
        self._memory.withdraw(version)
        self._chain.withdraw(version)

    def close(self) -> None:
        self._memory.close()


class NixlReceiver(Receiver):
    """Two slots of memory that other receivers may read. ``timeout_s``: for one bucket to come from the trainer.

    Raises ``WeightSyncError`` for an address that is none.
    """

    in_place = False

    def __init__(self, address: str, manifest: Manifest, *, member: str, timeout_s: float) -> None:
        try:
            self._sender = msgspec.msgpack.decode(base64.b64decode(address, validate=True), type=Address)
        except (ValueError, msgspec.DecodeError) as error:
            raise WeightSyncError(f"no address of a publisher's memory: {error}") from None
        self._here = this_host()
        beyond = not same_network(self._sender.host, self._here) and "UCX_NET_DEVICES" not in os.environ
        self._trainer = Owner(self._sender.place, TRAINER, timeout_s, NAME_A_NETWORK if beyond else "")
        self._manifest = manifest
        self._member = member
        self._life = uuid.uuid4().hex[:12]
        self._timeout_s = timeout_s
        self._reserved = False
        self._staging: Arena
        self._pull: Pull
        self._host: HostShare
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=f"{member}: weights")
        self._elsewhere = self._sender.host != self._here
        """On another host than the trainer's, and able to pass on."""
        self._chain = ChainEnd(self._sender.chain, identity_of(member, self._life), TURN_PATIENCE * timeout_s)
        self._open: OpenMemory | None = None
        """The staging memory, for other hosts."""

    def reserve(self) -> None:
        self._staging = Arena(self._manifest)
        self._pull = Pull(self._staging, f"{self._member}#{uuid.uuid4().hex[:12]}")
        name = f"{self._sender.place.agent}@{xxhash.xxh3_64_hexdigest(self._here.encode())}"
        self._host = HostShare(name, self._staging, HOST_PATIENCE * self._timeout_s)
        self._reserved = True

    def memory(self, slot: int) -> memoryview:
        return self._staging.slot(slot)

    async def fetch(self, bucket: BucketId, out: memoryview) -> None:
        expected = self._manifest.buckets[bucket.index].nbytes
        if out.nbytes != expected:
            raise WeightSyncError(f"bucket {bucket.index} takes {expected} bytes; asked for are {out.nbytes}")
        self._host.lacks(bucket)
        if self._open is not None:
            self._open.lacks(bucket.slot, bucket.version, bucket.index)
        try:
            found = await self._host.find(bucket)
            if found is None:
                await self._read(bucket, out)
            else:
                source = np.frombuffer(found, np.uint8)
                await self._work(lambda stopped: np.copyto(np.frombuffer(out, np.uint8), source))
        except BaseException:  # whatever it is, also a cancellation: others wait for this bucket
            self._host.fails(bucket)
            self._chain.fails(bucket)
            raise
        if self._open is not None:
            self._open.has(bucket.slot, bucket.index)
        self._host.has(bucket)
        self._chain.has(bucket)

    async def _read(self, bucket: BucketId, out: memoryview) -> None:
        """From the host before this one, where there is one; else from the trainer."""
        if address := await self._upstream_of(bucket):
            try:
                await self._work(lambda stopped: self._fetch_from(address, bucket, out, stopped))
                return
            except WeightSyncError as error:
                log.warning("%s: another host was read: %s; the rest is read from the trainer", self._member, error)
                self._chain.give_up()
        await self._work(lambda stopped: self._pull.fetch(self._trainer, bucket, out, stopped))

    async def _upstream_of(self, bucket: BucketId) -> bytes:
        """Address of the host that has the bucket, as soon as it does; empty: the trainer is to be read."""
        if not self._elsewhere or not self._host.first or bucket.private or bucket.attempt:
            return b""
        if bucket.index:
            return await self._chain.ask(bucket, b"")
        if self._open is None:
            try:
                await self._work(self._let_in)
            except StreamRLError as error:
                log.warning("%s: other hosts cannot read here, so that it reads from none: %s", self._member, error)
                self._elsewhere = False
                return b""
        assert self._open is not None, "it was made just now"
        self._open.lacks(bucket.slot, bucket.version, bucket.index)
        return await self._chain.ask(bucket, msgspec.msgpack.encode(self._open.place))

    def _let_in(self, stopped: threading.Event) -> None:
        self._open = OpenMemory(f"{self._member}#{self._life}", self._staging)

    def _fetch_from(self, address: bytes, bucket: BucketId, out: memoryview, stopped: threading.Event) -> None:
        """From another host."""
        try:
            place = msgspec.msgpack.decode(address, type=Place)
        except msgspec.DecodeError as error:
            raise WeightSyncError(f"no address of a host's memory: {error}") from None
        self._pull.fetch(Owner(place, OTHER_HOST, READ_PATIENCE * self._timeout_s), bucket, out, stopped)

    async def _work(self, work: Callable[[threading.Event], None]) -> None:
        """Run it on the worker's thread; a cancellation stops it and waits for its end."""
        stopped = threading.Event()
        working = asyncio.get_running_loop().run_in_executor(self._worker, work, stopped)
        try:
            await asyncio.shield(working)
        except asyncio.CancelledError:
            stopped.set()
            await asyncio.wait([working])
            working.exception()  # how it ended is of no interest
            raise

    def close(self) -> None:
        self._chain.close()
        if self._reserved:
            self._reserved = False
            self._host.close()
            self._worker.submit(self._close_agents)
            self._worker.shutdown()
            self._staging.close()

    def _close_agents(self) -> None:
        self._pull.close()
        if self._open is not None:
            self._open.close()
