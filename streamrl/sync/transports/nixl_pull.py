"""Transport ``nixl``: receivers read buckets one-sidedly out of the publisher's slab (NIXL over UCX).

::

    sender                                     first receiver of a host              the others of that host
    | slot 0 | slot 1 |   ── one-sided read ──►  | slot 0 | slot 1 |  ── copy ──►      | slot 0 | slot 1 |
    | board: version, buckets on offer |  ────►  whether the slot still was what was read

The trainer's code takes no part in a read. Its *board* says of each slot which version is on offer, and how many of
its buckets; it is read after the bucket, and cleared before the slot is overwritten. Who reads from whom within a host
is in ``host_share.py``; retries always read from the trainer.
"""

from __future__ import annotations

import asyncio
import base64
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np

from streamrl.errors import StreamRLError, WeightSyncError
from streamrl.nixl import Agent, Pair
from streamrl.sync.arena import Arena
from streamrl.sync.manifest import Manifest
from streamrl.sync.transport import BucketId, Receiver, Sender
from streamrl.sync.transports.host_share import HostShare

SETTING = "sync.transport=nixl"


class Address(msgspec.Struct, frozen=True):
    """Where a sender's memory lies; travels in Welcome, in base64."""

    agent: str
    slots: tuple[int, int]
    """Addresses; 0 where slots are empty."""
    board: int
    metadata: bytes
    """NIXL's own."""


class NixlSender(Sender):
    """Registers the slab and keeps the board. Raises ``ConfigError`` without the nixl package."""

    name = "nixl"

    def __init__(self, arena: Arena) -> None:
        name = f"weights#{uuid.uuid4().hex[:16]}"
        # Receivers connect, and read where only tcp leads here, with the help of the progress thread.
        self._agent = Agent(SETTING, name, progress=True)
        self._board = _board()
        one, other = (_register(self._agent, arena.slot(slot)) for slot in (0, 1))
        board = _register(self._agent, self._board.data.cast("B"))
        address = Address(name, (one, other), board, self._agent.metadata())
        self.address = base64.b64encode(msgspec.msgpack.encode(address)).decode()

    async def run(self) -> None:
        await asyncio.Event().wait()

    def set_members(self, names: set[str]) -> None:
        """Who knows the address reads; nobody needs to be known."""

    async def begin(self, version: BucketId) -> None:
        if self._board[version.slot, 0] != version.version:
            self._board[version.slot] = version.version, 0

    async def offer(self, bucket: BucketId, payload: memoryview) -> None:
        self._board[bucket.slot, 1] = max(self._board[bucket.slot, 1], bucket.index + 1)

    async def complete(self, version: BucketId) -> None:
        """Each bucket is there as soon as it is offered."""

    def withdraw(self, version: int) -> None:
        self._board[self._board[:, 0] == version] = -1, 0

    def close(self) -> None:
        self._agent.close()


class NixlReceiver(Receiver):
    """Two slots of memory that the other receivers of this host may read. ``timeout_s``: for one bucket to come.

    Raises ``WeightSyncError`` for an address that is none, or without the memory.
    """

    in_place = False

    def __init__(self, address: str, manifest: Manifest, *, member: str, timeout_s: float) -> None:
        try:
            sender = msgspec.msgpack.decode(base64.b64decode(address, validate=True), type=Address)
        except (ValueError, msgspec.DecodeError) as error:
            raise WeightSyncError(f"no address of a publisher's memory: {error}") from None
        self._closed = False
        self._manifest = manifest
        self._staging = Arena(manifest)
        self._pull = _Pull(sender, self._staging, f"{member}#{uuid.uuid4().hex[:12]}", timeout_s)
        # One that has nothing is waited for as long as leaves the time to pull.
        self._host = HostShare(sender.agent, self._staging, patience_s=timeout_s / 4)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=f"{member}: weights")

    def memory(self, slot: int) -> memoryview:
        return self._staging.slot(slot)

    async def fetch(self, bucket: BucketId, out: memoryview) -> None:
        expected = self._manifest.buckets[bucket.index].nbytes
        if out.nbytes != expected:
            raise WeightSyncError(f"bucket {bucket.index} takes {expected} bytes; asked for are {out.nbytes}")
        self._host.lacks(bucket)
        try:
            found = await self._host.find(bucket)
            if found is None:
                await self._work(lambda stopped: self._pull.fetch(bucket, out, stopped))
            else:
                source = np.frombuffer(found, np.uint8)
                await self._work(lambda stopped: np.copyto(np.frombuffer(out, np.uint8), source))
        except BaseException:
            self._host.fails(bucket)
            raise
        self._host.has(bucket)

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
        if not self._closed:
            self._closed = True
            self._host.close()
            self._worker.submit(self._pull.close)
            self._worker.shutdown()
            self._staging.close()


class _Pull:
    """A receiver's agent. All of it on one thread; ``memory`` is what reads land in."""

    def __init__(self, sender: Address, memory: Arena, name: str, timeout_s: float) -> None:
        self._sender = sender
        self._memory = memory
        self._name = name
        self._timeout_s = timeout_s
        self._agent: Agent | None = None
        self._lives = 0
        self._board = _board()

    def fetch(self, bucket: BucketId, out: memoryview, stopped: threading.Event) -> None:
        """``WeightSyncError`` when the bucket is not on offer, does not come in time, or nobody is there."""
        what = f"bucket {bucket.index} of version {bucket.version}"
        offset = self._memory.manifest.buckets[bucket.index].offset
        board = self._board.data.cast("B")
        try:
            agent = self._agent or self._connect()
            self._read(agent, _address(out), self._sender.slots[bucket.slot] + offset, out.nbytes, stopped)
            self._read(agent, _address(board), self._sender.board, board.nbytes, stopped)
        except StreamRLError as error:
            self.close()
            raise WeightSyncError(f"{what}: {error}") from None
        version, offered = self._board[bucket.slot].tolist()
        if version != bucket.version:
            raise WeightSyncError(f"version {bucket.version} is not on offer")
        if bucket.index >= offered:
            raise WeightSyncError(f"{what} is not on offer")

    def _connect(self) -> Agent:
        self._lives += 1
        # No progress thread: the thread that waits for a transfer drives it.
        agent = self._agent = Agent(SETTING, f"{self._name}.{self._lives}", progress=False)
        for memory in (self._memory.slot(0), self._memory.slot(1), self._board.data.cast("B")):
            _register(agent, memory)
        try:
            agent.connect(self._sender.agent, self._sender.metadata)
        except ConnectionError as error:
            raise WeightSyncError(f"the publisher is gone ({error})") from None
        return agent

    def _read(self, agent: Agent, here: int, there: int, nbytes: int, stopped: threading.Event) -> None:
        pair: Pair = (here, nbytes, 0), (there, nbytes, 0)
        failed = agent.read({self._sender.agent: [pair]}, self._timeout_s, stopped.is_set)
        for error in failed.values():
            if isinstance(error, TimeoutError):
                raise WeightSyncError(f"the publisher's memory gave {error}")
            raise WeightSyncError(f"the publisher went away ({error})")

    def close(self) -> None:
        """Without its agent, a transfer that did not end writes no more."""
        if self._agent is not None:
            self._agent.close()
            self._agent = None


def _board() -> np.ndarray:
    """Of each slot the version, and how many of its buckets are on offer; int64."""
    board = np.zeros((2, 2), np.int64)
    board[:, 0] = -1
    return board


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def _register(agent: Agent, memory: memoryview) -> int:
    """Its address; of empty memory, which nobody reads, 0. Registered until the agent is closed."""
    return agent.register(_address(memory), memory.nbytes).address if memory.nbytes else 0
