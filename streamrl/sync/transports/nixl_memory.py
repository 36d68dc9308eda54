"""Two slots that others read one-sidedly (NIXL over UCX), and reading them.

Beside the slots lies a *board*: which version is in each slot, and how many of its buckets, from the first on. It is
read after a bucket, and written before the slot is, so that a reader notices what was overwritten under its hands.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from streamrl.errors import StreamRLError, WeightSyncError
from streamrl.nixl import Agent, Pair
from streamrl.sync.arena import Arena
from streamrl.sync.transport import BucketId

SETTING = "sync.transport=nixl"
MOST_OWNERS = 64
"""Whom a process stays connected to: where hosts come and go, those that went do not add up."""


class Place(msgspec.Struct, frozen=True):
    """Where such memory lies."""

    agent: str
    slots: tuple[int, int]
    """Addresses; 0 where slots are empty."""
    board: int
    metadata: bytes
    """NIXL's own."""


class Slots(Protocol):
    def slot(self, slot: int) -> memoryview: ...


class OpenMemory:
    """Registers the slots and keeps the board. ``name``: unique among all agents that meet.

    Raises ``ConfigError`` without the nixl package, ``StreamRLError`` where memory cannot be registered.
    """

    def __init__(self, name: str, slots: Slots) -> None:
        # Others connect, and read where only tcp leads here, with the help of the progress thread.
        self._agent = Agent(SETTING, name, progress=True)
        self._board = _board()
        one, other = (_register(self._agent, slots.slot(slot)) for slot in (0, 1))
        board = _register(self._agent, self._board.data.cast("B"))
        self.place = Place(name, (one, other), board, self._agent.metadata())

    def begin(self, slot: int, version: int) -> None:
        """The slot is about to be written, unless it already holds that version or a part of it."""
        if self._board[slot, 0] != version:
            self._board[slot] = version, 0

    def lacks(self, slot: int, version: int, index: int) -> None:
        """A bucket is about to be written: the slot holds those before it."""
        self._board[slot] = version, index

    def has(self, slot: int, index: int) -> None:
        """A bucket is there, as are all before it."""
        self._board[slot, 1] = max(self._board[slot, 1], index + 1)

    def withdraw(self, version: int) -> None:
        """Wherever that version lies, it is about to be overwritten."""
        self._board[self._board[:, 0] == version] = -1, 0

    def close(self) -> None:
        self._agent.close()


@dataclass(frozen=True)
class Owner:
    """Whose memory is read."""

    place: Place
    name: str
    """In messages."""
    timeout_s: float
    """For one bucket."""
    way_out: str = ""
    """What else to say where nobody is found."""


class Pull:
    """Reads from any number of owners. All of it on one thread; ``memory`` is what reads land in."""

    def __init__(self, memory: Arena, name: str) -> None:
        self.name = name
        self._memory = memory
        self._agent: Agent | None = None
        self._lives = 0
        self._connected: set[str] = set()
        self._board = _board()

    def fetch(self, owner: Owner, bucket: BucketId, out: memoryview, stopped: threading.Event) -> None:
        """``WeightSyncError`` when the bucket is not there, does not come in time, or nobody is there."""
        what = f"bucket {bucket.index} of version {bucket.version}"
        offset = self._memory.manifest.buckets[bucket.index].offset
        board = self._board.data.cast("B")
        try:
            agent = self._connect(owner)
            self._read(agent, owner, _address(out), owner.place.slots[bucket.slot] + offset, out.nbytes, stopped)
            self._read(agent, owner, _address(board), owner.place.board, board.nbytes, stopped)
        except StreamRLError as error:
            self.close()
            raise WeightSyncError(f"{what}: {error}") from None
        version, offered = self._board[bucket.slot].tolist()
        if version != bucket.version:
            raise WeightSyncError(f"version {bucket.version} is not on offer")
        if bucket.index >= offered:
            raise WeightSyncError(f"{what} is not on offer")

    def _connect(self, owner: Owner) -> Agent:
        if owner.place.agent not in self._connected:
            if len(self._connected) == MOST_OWNERS:
                self.close()
            agent = self._agent or self._start()
            try:
                agent.connect(owner.place.agent, owner.place.metadata)
            except ConnectionError as error:
                raise WeightSyncError(f"{owner.name} is gone ({error}){owner.way_out}") from None
            self._connected.add(owner.place.agent)
        assert self._agent is not None, "it is connected"
        return self._agent

    def _start(self) -> Agent:
        self._lives += 1
        # No progress thread: the thread that waits for a transfer drives it.
        self._agent = Agent(SETTING, f"{self.name}.{self._lives}", progress=False)
        for memory in (self._memory.slot(0), self._memory.slot(1), self._board.data.cast("B")):
            _register(self._agent, memory)
        return self._agent

    def _read(self, agent: Agent, owner: Owner, here: int, there: int, nbytes: int, stopped: threading.Event) -> None:
        pair: Pair = (here, nbytes, 0), (there, nbytes, 0)
        failed = agent.read({owner.place.agent: [pair]}, owner.timeout_s, stopped.is_set)
        for error in failed.values():
            if isinstance(error, TimeoutError):
                raise WeightSyncError(f"{owner.name}'s memory gave {error}")
            raise WeightSyncError(f"{owner.name} went away ({error}){owner.way_out}")

    def close(self) -> None:
        """Without its agent, a transfer that did not end writes no more. The next read begins with a new one."""
        self._connected.clear()
        if self._agent is not None:
            self._agent.close()
            self._agent = None


def _board() -> np.ndarray:
    """Of each slot the version, and how many of its buckets are there; int64."""
    board = np.zeros((2, 2), np.int64)
    board[:, 0] = -1
    return board


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def _register(agent: Agent, memory: memoryview) -> int:
    """Its address; of empty memory, which nobody reads, 0. Registered until the agent is closed."""
    return agent.register(_address(memory), memory.nbytes).address if memory.nbytes else 0
