"""Payloads by reference (C2, C4): a producer keeps a payload in registered memory, consumers read what they need of it.

::

    ArenaWriter (producer)                                     ArenaReader (consumer)
    | slot: header 64 | payload |  … ──── Reference (zmq) ───► read(reference, ranges): payload ranges, then the header

The reads are one-sided (NIXL over UCX): the producer's code takes no part in them. What is copied when:

- ``write`` waits for room in the arena, copies the payload, then writes the slot's header with a fresh random *stamp*.
- ``free`` clears the header first; only then can the slot be given to another payload.
- ``read`` copies the payload ranges, and after they arrived the header. The header bears the reference's stamp only if
  the slot was not freed up to that moment, so the bytes that came before it are those that were written. Otherwise
  the read is ``ReferenceLost``: a slot that was freed or reused, a producer that is gone, or an address that belongs
  to another process by now, never comes back as data.

A producer that was killed is noticed by the failing transfer, in about a millisecond; one that hangs by ``timeout_s``.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from streamrl.buffers.links.arena import Arena
from streamrl.buffers.links.nixl_memory import Region, Staging
from streamrl.buffers.wire.reference import HEADER_BYTES, STAMP_BYTES, Metadata, Reference, ReferenceLost, header
from streamrl.errors import StreamRLError, WireError
from streamrl.nixl import Agent, Pair

COPY_INLINE_BYTES = 1 << 20
"""Payloads up to this are copied on the event loop: 0.03 ms, in pages that were never used 0.5 ms."""
SETTING = "queue.backend=nixl"

Range = tuple[int, int]
"""(offset, nbytes) inside a payload."""


class ArenaWriter:
    """The producer's side: payloads wait in its arena until they are freed. Belongs to one event loop.

    ``name``: who this is, in messages; the agent's name is made unique per process. ``size``: bytes of the arena, for
    payloads, their headers (64 bytes each) and alignment (256 bytes). Raises ``ConfigError`` without the nixl package,
    ``StreamRLError`` when UCX or the memory is not to be had.
    """

    def __init__(self, name: str, size: int) -> None:
        self._slots = Arena(size)
        self.name = f"{name}#{uuid.uuid4().hex[:12]}"
        # Readers connect, and read where only tcp leads here, with the help of the progress thread.
        self._agent = Agent(SETTING, self.name, progress=True)
        self._region = Region(self._agent, self._slots.size)
        self._closed = False
        self.metadata: bytes = msgspec.msgpack.encode(
            Metadata(self.name, self._region.address, self._slots.size, self._agent.metadata())
        )
        self._stamps: dict[int, int] = {}
        # Orders the clearing of a header before every byte that is written over its slot: see ``_fill``.
        self._order = threading.Lock()
        self._copier = ThreadPoolExecutor(1, thread_name_prefix=f"{name}: payload copies")

    async def write(self, frames: Sequence[bytes | memoryview], nbytes: int) -> Reference:
        """Copy a payload of ``nbytes`` bytes, given as contiguous frames in order, into a slot of its own.

        Waits while the arena is full. No time limit of its own: ended by ``free``, ``close`` or cancellation, which
        leaves no slot taken. Raises ``WireError`` when the frames do not add up to ``nbytes``, ``ConfigError`` when the
        payload is larger than the arena, ``StreamRLError`` when the writer is closed.
        """
        given = sum(memoryview(frame).nbytes for frame in frames)
        if given != nbytes:
            raise WireError(f"payload: expected frames of {nbytes} bytes in all, got {given}")
        offset = await self._slots.allocate(HEADER_BYTES + nbytes)
        stamp = secrets.randbits(63)
        if nbytes <= COPY_INLINE_BYTES:
            self._fill(offset, frames, nbytes, stamp)
        else:
            copy = asyncio.get_running_loop().run_in_executor(self._copier, self._fill, offset, frames, nbytes, stamp)
            try:
                await asyncio.shield(copy)
            except asyncio.CancelledError:
                # The thread writes on: the slot is free when it has done so.
                copy.add_done_callback(lambda _: self._slots.free(offset))
                raise
        self._stamps[offset] = stamp
        return Reference(self.name, self._region.address + offset, nbytes, stamp)

    def free(self, reference: Reference) -> bool:
        """Give the slot back. False when it was given back before, or is not this writer's: nothing happens then."""
        offset = reference.address - self._region.address
        if reference.agent != self.name or self._stamps.get(offset) != reference.stamp:
            return False
        del self._stamps[offset]
        with self._order:
            self._region.bytes[offset : offset + HEADER_BYTES] = 0
        self._slots.free(offset)
        return True

    def statistics(self) -> dict[str, float]:
        """Bytes of the arena in all and taken, slots, and writes that wait for room."""
        return self._slots.statistics()

    def close(self) -> None:
        """Deregister the arena; what readers still ask for is lost. Writes that wait raise. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._slots.close()
        self._copier.shutdown()
        self._region.deregister(self._agent)
        self._agent.close()

    def _fill(self, offset: int, frames: Iterable[bytes | memoryview], nbytes: int, stamp: int) -> None:
        # A large copy may use stores that overtake earlier ones. Taken here and in ``free``, the lock keeps them behind
        # the clearing of the header of whatever lay here before. numpy releases the interpreter lock while it copies.
        with self._order:
            place = offset + HEADER_BYTES
        memory = self._region.bytes
        for frame in frames:
            size = memoryview(frame).nbytes
            if size:
                memory[place : place + size] = np.frombuffer(frame, dtype=np.uint8)
            place += size
        memory[offset : offset + STAMP_BYTES] = np.frombuffer(header(stamp, nbytes), dtype=np.uint8)


@dataclass(eq=False)
class _Peer:
    """A writer that a reader knows."""

    metadata: Metadata
    lost: str = ""
    """Why nothing can be read from it, once that is so."""


@dataclass(eq=False)
class _Read:
    """One reference of a call, and where its ranges and then its header land in staging memory."""

    reference: Reference
    ranges: Sequence[Range]
    places: list[int]
    region: Region
    staged: np.ndarray

    def payload(self) -> Iterator[Pair]:
        start = self.reference.address + HEADER_BYTES
        for (offset, nbytes), place in zip(self.ranges, self.places, strict=True):
            if nbytes:
                yield (self.region.address + place, nbytes, 0), (start + offset, nbytes, 0)

    def header(self) -> Iterator[Pair]:
        yield (
            (self.region.address + len(self.staged) - HEADER_BYTES, STAMP_BYTES, 0),
            (
                self.reference.address,
                STAMP_BYTES,
                0,
            ),
        )

    def result(self) -> list[memoryview] | ReferenceLost:
        found = self.staged[-HEADER_BYTES:][:STAMP_BYTES].tobytes()
        if found != header(self.reference.stamp, self.reference.nbytes):
            return _lost(self.reference, "its slot was freed")
        whole = self.staged.data.toreadonly()
        return [whole[place : place + nbytes] for (_, nbytes), place in zip(self.ranges, self.places, strict=True)]


def _lost(reference: Reference, why: str) -> ReferenceLost:
    return ReferenceLost(f"payload of {reference.nbytes} bytes at {reference.agent}: {why}")


class ArenaReader:
    """The consumer's side. Belongs to one event loop; NIXL is called on a thread of its own.

    ``name``: who this is, in messages. ``timeout_s``: for a producer to answer one transfer, in seconds, before its
    references are lost. It runs once per producer that hangs: who did not answer is disconnected, and what is read
    from it next is lost at once, until ``add``. Raises ``ConfigError`` without the nixl package, ``StreamRLError`` when
    UCX is not to be had.
    """

    def __init__(self, name: str, timeout_s: float = 20.0) -> None:
        self._timeout_s = timeout_s
        self._peers: dict[str, _Peer] = {}
        # No progress thread: the thread that waits for a transfer drives it.
        self._agent = Agent(SETTING, f"{name}#{uuid.uuid4().hex[:12]}", progress=False)
        self._staging = Staging(self._agent)
        # Of transfers that failed: never used again, as a late byte might still land there.
        self._spoilt: list[np.ndarray] = []
        self._closing = False
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=f"{name}: payload reads")

    def add(self, agent: str, metadata: bytes) -> None:
        """Learn how to reach a writer; it is contacted in the background. Again and again does no harm.

        Raises ``WireError`` when ``metadata`` is not what a writer named ``agent`` gives.
        """
        try:
            decoded = msgspec.msgpack.decode(metadata, type=Metadata)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise WireError(f"metadata of {agent!r}: {error}") from None
        if decoded.agent != agent:
            raise WireError(f"metadata of {agent!r}: it is that of {decoded.agent!r}")
        known = self._peers.get(agent)
        if known is None or known.lost or known.metadata != decoded:
            self.forget(agent)
            peer = self._peers[agent] = _Peer(decoded)
            self._later(self._connect, peer)

    def knows(self, agent: str) -> bool:
        """Whether its references can be tried."""
        peer = self._peers.get(agent)
        return peer is not None and not peer.lost

    def forget(self, agent: str) -> None:
        """Disconnect from a writer; what is read from it later is lost. An unknown one is no error."""
        peer = self._peers.pop(agent, None)
        if peer is not None:
            self._later(self._disconnect, peer, "it was forgotten")

    async def read(self, reference: Reference, ranges: Sequence[Range]) -> list[memoryview]:
        """Bytes of each (offset, nbytes) inside the payload. Raises ``ReferenceLost``; otherwise as ``read_many``."""
        (result,) = await self.read_many([(reference, ranges)])
        if isinstance(result, ReferenceLost):
            raise result
        return result

    async def read_many(
        self, wanted: Sequence[tuple[Reference, Sequence[Range]]]
    ) -> list[list[memoryview] | ReferenceLost]:
        """For each reference the bytes of its ranges, or why it is lost; two transfers per producer, whatever is read.

        The views are read-only, start at multiples of 64 bytes, stay valid as long as anything refers to them, and
        are private: nothing that happens to producer or reader changes them. Their memory is used for later reads
        once all views of one reference are gone. Raises ``WireError`` for a range outside of its payload.
        """
        for reference, ranges in wanted:
            for offset, nbytes in ranges:
                if offset < 0 or nbytes < 0 or offset + nbytes > reference.nbytes:
                    raise WireError(
                        f"range of {nbytes} bytes at {offset}: expected one inside the payload of {reference.nbytes}"
                    )
        if self._closing:
            raise StreamRLError("a payload cannot be read by a reader that is closed")
        peers = [self._peers.get(reference.agent) for reference, _ in wanted]
        return await asyncio.get_running_loop().run_in_executor(self._worker, self._read_many, wanted, peers)

    def close(self) -> None:
        """End running reads, disconnect, and deregister. Views stay valid. Idempotent."""
        if not self._closing:
            self._later(self._end)
            self._closing = True
            self._worker.shutdown()

    def _later(self, call: Callable[..., None], *arguments: Any) -> None:
        if not self._closing:
            self._worker.submit(call, *arguments)

    # On the worker's thread ----------------------------------------------------------------------------------------

    def _read_many(
        self, wanted: Sequence[tuple[Reference, Sequence[Range]]], peers: Sequence[_Peer | None]
    ) -> list[list[memoryview] | ReferenceLost]:
        results: list[list[memoryview] | ReferenceLost] = []
        reads: dict[_Peer, dict[int, _Read]] = {}
        for index, ((reference, ranges), peer) in enumerate(zip(wanted, peers, strict=True)):
            why = _refusal(peer, reference)
            results.append(_lost(reference, why))
            if peer is not None and not why:
                reads.setdefault(peer, {})[index] = self._stage(reference, ranges)
        for part in (_Read.payload, _Read.header):
            self._transfer(
                {peer: [pair for read in own.values() for pair in part(read)] for peer, own in reads.items()}
            )
        for peer, own in reads.items():
            for index, read in own.items():
                if peer.lost:
                    read.region.drop_pages()
                    self._spoilt.append(read.staged)
                    results[index] = _lost(read.reference, peer.lost)
                else:
                    results[index] = read.result()
        return results

    def _stage(self, reference: Reference, ranges: Sequence[Range]) -> _Read:
        places, end = [], 0
        for _, nbytes in ranges:
            places.append(end)
            end += -(-nbytes // HEADER_BYTES) * HEADER_BYTES
        return _Read(reference, ranges, places, *self._staging.take(end + HEADER_BYTES))

    def _transfer(self, wanted: dict[_Peer, list[Pair]]) -> None:
        """Read from all peers at once. Who fails, or does not answer in time, is lost."""
        peers = {peer.metadata.agent: peer for peer, pairs in wanted.items() if pairs and not peer.lost}
        pairs = {name: wanted[peer] for name, peer in peers.items()}
        for name, error in self._agent.read(pairs, self._timeout_s, lambda: self._closing).items():
            if not isinstance(error, TimeoutError):
                why = f"its producer is gone ({error})"
            else:
                why = "the reader was closed" if self._closing else str(error)
            self._disconnect(peers[name], why)

    def _connect(self, peer: _Peer) -> None:
        try:
            self._agent.connect(peer.metadata.agent, peer.metadata.nixl)
        except ConnectionError as error:
            peer.lost = f"its producer is gone ({error})"
        except StreamRLError as error:
            peer.lost = str(error)

    def _disconnect(self, peer: _Peer, why: str) -> None:
        if not peer.lost:
            peer.lost = why
            self._agent.disconnect(peer.metadata.agent)

    def _end(self) -> None:
        for peer in list(self._peers.values()):
            self._disconnect(peer, "the reader was closed")
        self._staging.close()
        self._agent.close()


def _refusal(peer: _Peer | None, reference: Reference) -> str:
    if peer is None:
        return "its producer is unknown"
    if peer.lost:
        return peer.lost
    start, end = peer.metadata.address, peer.metadata.address + peer.metadata.nbytes
    if not start <= reference.address <= end - HEADER_BYTES - reference.nbytes:
        return f"slot {reference.address:#x} is not inside the arena, {start:#x} to {end:#x}"
    return ""
