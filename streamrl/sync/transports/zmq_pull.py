"""Transport ``zmq``: receivers ask for buckets over sockets, part by part, and copy what comes into their own memory.

::

    receiver (DEALER)                 sender (ROUTER)
        Ask  × WINDOW   →                                 at most so many parts of PART_BYTES are under way
                        ←   Part, bytes                   straight out of the slab, no copy on this side
        Ask             →                                 one for each part that came
                        ←   Part with a reason            nothing to give: the version is gone, the bucket not there

What is asked for bounds what travels, so that a slow receiver holds up nobody and nothing grows. An answer names its
request: what still comes for a fetch that was given up is dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import cast

import msgspec
import numpy as np
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from streamrl.errors import WeightSyncError
from streamrl.sync.arena import Arena
from streamrl.sync.manifest import Manifest
from streamrl.sync.staging import HostStaging
from streamrl.sync.transport import BucketId, Receiver, Sender
from streamrl.sync.transports.offers import Offers

PART_BYTES = 4 << 20
"""Of one message: large enough for the rate of a copy, small enough to take turns with the rest of the loop."""
WINDOW = 4
"""Parts that a receiver asks for ahead."""
NO_REQUEST = -1
"""What a Part answers that answers a frame which was none."""
ASK_LIMIT = 1 << 16
"""Bytes of an Ask; ZeroMQ drops the connection of a peer that sends more."""


class Ask(msgspec.Struct, frozen=True):
    """For ``size`` bytes from ``offset`` on of the ``nbytes`` bytes that a bucket is fetched as."""

    request: int
    bucket: BucketId
    nbytes: int
    offset: int
    size: int


class Part(msgspec.Struct, frozen=True):
    """Announces the bytes in the frame behind it; with a ``reason`` there are none, and none will come."""

    request: int
    offset: int
    reason: str = ""


_ENCODER = msgspec.msgpack.Encoder()
_ASK = msgspec.msgpack.Decoder(Ask)
_PART = msgspec.msgpack.Decoder(Part)


class ZmqSender(Sender):
    """Answers who asks, for as long as ``run`` runs."""

    name = "zmq"

    def __init__(self, arena: Arena, endpoint: str) -> None:
        self.address = f"{endpoint}-buckets"
        self.malformed_frames = 0
        self._offers = Offers(arena)

    async def run(self) -> None:
        socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        try:
            socket.linger = 0
            socket.maxmsgsize = ASK_LIMIT
            socket.bind(self.address)
            while True:
                identity, *frames = await socket.recv_multipart()
                answer = [identity, *self._answer(frames)]
                # Settled at once. That a peer is gone, or has left a thousand answers unread, is no concern of ours.
                cast("asyncio.Future[None]", socket.send_multipart(answer, zmq.NOBLOCK, copy=False)).exception()
        finally:
            socket.close()

    def _answer(self, frames: list[bytes]) -> list[bytes | memoryview]:
        try:
            if len(frames) != 1:
                raise msgspec.DecodeError(f"expected one frame, got {len(frames)}")
            ask = _ASK.decode(frames[0])
        except msgspec.DecodeError as error:
            self.malformed_frames += 1
            return [_ENCODER.encode(Part(NO_REQUEST, 0, f"no request for a bucket: {error}")), b""]
        try:
            payload = self._offers.find(ask.bucket, ask.nbytes)
        except WeightSyncError as error:
            return [_ENCODER.encode(Part(ask.request, ask.offset, str(error))), b""]
        if not (0 <= ask.offset < ask.nbytes and 0 < ask.size <= PART_BYTES):
            reason = f"no part of {ask.size} bytes at {ask.offset} in a payload of {ask.nbytes}"
            return [_ENCODER.encode(Part(ask.request, ask.offset, reason)), b""]
        return [_ENCODER.encode(Part(ask.request, ask.offset)), payload[ask.offset : ask.offset + ask.size]]

    def set_members(self, names: set[str]) -> None:
        """Who asks is answered; nobody needs to be known."""

    async def begin(self, version: BucketId) -> None:
        self._offers.begin(version)

    async def offer(self, bucket: BucketId, payload: memoryview) -> None:
        self._offers.add(bucket, payload)

    async def complete(self, version: BucketId) -> None:
        """Each bucket is there as soon as it is offered."""

    def withdraw(self, version: int) -> None:
        self._offers.withdraw(version)

    def close(self) -> None:
        """Its socket goes with ``run``."""


class ZmqReceiver(Receiver):
    """One socket and two slots of private memory. ``timeout_s``: for the next part to come."""

    in_place = False

    def __init__(self, address: str, manifest: Manifest, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._staging = HostStaging(manifest)
        self._requests = 0
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.maxmsgsize = PART_BYTES
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._gone = False
        """The connection was lost, and there is no new one."""
        self._socket.connect(address)
        self._poller = zmq.asyncio.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def memory(self, slot: int) -> memoryview:
        return self._staging.memory(slot)

    async def fetch(self, bucket: BucketId, out: memoryview) -> None:
        self._requests += 1
        target = np.frombuffer(out, np.uint8)
        parts = self._parts(bucket, out.nbytes)
        for _ in range(WINDOW):
            await self._ask(parts)
        received = 0
        while received < out.nbytes:
            part, payload = await self._receive(bucket)
            expected = min(PART_BYTES, out.nbytes - received)
            if (part.offset, payload.nbytes) != (received, expected):
                raise WeightSyncError(
                    f"bucket {bucket.index} of version {bucket.version}: expected {expected} bytes from byte "
                    f"{received} on, got {payload.nbytes} from {part.offset} on"
                )
            target[received : received + expected] = np.frombuffer(payload, np.uint8)
            received += expected
            await self._ask(parts)

    def _parts(self, bucket: BucketId, nbytes: int) -> Iterator[Ask]:
        for offset in range(0, nbytes, PART_BYTES):
            yield Ask(self._requests, bucket, nbytes, offset, min(PART_BYTES, nbytes - offset))

    async def _ask(self, parts: Iterator[Ask]) -> None:
        for ask in parts:
            await self._socket.send(_ENCODER.encode(ask))
            return

    async def _receive(self, bucket: BucketId) -> tuple[Part, memoryview]:
        """The next part of the request that runs, and its bytes. Raises ``WeightSyncError`` where none will come."""
        deadline = time.monotonic() + self._timeout_s
        what = f"bucket {bucket.index} of version {bucket.version}"
        while True:
            ready = dict(await self._poller.poll(max(0.0, 1000 * (deadline - time.monotonic()))))
            if self._monitor in ready:
                event = parse_monitor_message(await self._monitor.recv_multipart())["event"]
                self._gone = event == zmq.EVENT_DISCONNECTED
            elif self._socket in ready:
                part, payload = _decode(await self._socket.recv_multipart(copy=False))
                if part.request not in (self._requests, NO_REQUEST):
                    continue
                if part.reason:
                    raise WeightSyncError(part.reason)
                return part, payload
            elif not ready:
                raise WeightSyncError(f"{what}: the publisher sent nothing for {self._timeout_s:g} s")
            if self._gone:
                raise WeightSyncError(f"{what}: the publisher went away")

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close()
            self._staging.close()


def _decode(frames: list[zmq.Frame]) -> tuple[Part, memoryview]:
    try:
        answer, payload = frames
        return _PART.decode(answer.buffer), payload.buffer
    except (ValueError, msgspec.DecodeError) as error:
        raise WeightSyncError(f"the publisher sent no part of a bucket: {error}") from None
