"""A member's socket to the publisher, and the version that arrives through it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

import zmq
import zmq.asyncio

from streamrl.errors import WeightSyncError, WireError
from streamrl.sync import messages as wire
from streamrl.sync.arrival import Arrival
from streamrl.sync.staging import Tensors
from streamrl.sync.transport import Receiver, make_receiver
from streamrl.sync.workers import in_thread

OnEvent = Callable[[str, dict[str, Any]], None]
Handle = Callable[[wire.Stage | wire.Commit | wire.Discard], Awaitable[None]]


class Link:
    """The DEALER socket of one process, and its end of the transport.

    Says Hello at every connect, so that a publisher that was restarted on the same endpoint learns of it. Hands Stage,
    Commit and Discard to ``handle`` one after the other. A version arrives in a task beside that.
    """

    def __init__(self, endpoint: str, name: str, timeout_s: float, on_event: OnEvent) -> None:
        self.name = name
        self.malformed_frames = 0
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._on_event = on_event
        self._incarnation = time.monotonic_ns()
        self._socket: zmq.asyncio.Socket | None = None
        self._welcome: wire.Welcome | None = None
        self._receiver: Receiver | None = None
        self._held: dict[int, int] = {}
        """Slot → version that was verified in it."""
        self._arrival: Arrival | None = None
        """The version that arrives, or the last one that did."""
        self._arriving: asyncio.Task[None] | None = None
        self._tasks: asyncio.TaskGroup

    async def run(self, handle: Handle) -> None:
        """Receive until cancelled; waits for the publisher without a deadline."""
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.maxmsgsize = wire.FRAME_LIMIT
        self._socket.identity = wire.identity_of(self.name, self._incarnation)
        monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            self._socket.connect(self._endpoint)
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self._greet(monitor), name="weights-greet")
                self._tasks.create_task(self._receive(self._socket, handle), name="weights-receive")
        finally:
            self._socket.disable_monitor()
            monitor.close(linger=0)
            self._socket.close()
            self._leave()

    async def send(self, message: wire.Message) -> None:
        assert self._socket is not None, "only a running link sends"
        await self._socket.send(wire.encode(message))

    @property
    def payload_bytes(self) -> int:
        """Bytes of the tensors of one version; 0 before the publisher said so."""
        return self._welcome.manifest.payload_bytes if self._welcome else 0

    async def begin(self, stage: wire.Stage, work: Callable[[Arrival], Awaitable[None]]) -> None:
        """Let a version arrive: ``work`` runs in a task until it returns, or another one begins or is discarded.

        A ``WeightSyncError`` of ``work`` is told to the publisher, as is a transport that cannot be reached.
        """
        await self._end()
        try:
            await self._reach(stage)
            self._arrival = self._expect(stage)
        except WeightSyncError as error:
            await self._failed(stage, error)
            return
        self._arriving = self._tasks.create_task(self._arrive(self._arrival, work), name="weights-arrive")

    async def discard(self, message: wire.Discard) -> None:
        """Stop what arrives, if it is of this update."""
        if self._arrival and same(self._arrival.stage, message):
            await self._end()

    async def take_in(self, arrival: Arrival) -> Tensors:
        """All of the version, verified; raises ``WeightSyncError`` as ``Arrival.run`` does."""
        tensors = await arrival.run()
        self._held[arrival.stage.slot] = arrival.stage.version
        self._on_event("version_staged", {"version": arrival.stage.version})
        return tensors

    async def _end(self) -> None:
        arriving, self._arriving, self._arrival = self._arriving, None, None
        if arriving is not None:
            arriving.cancel()
            await asyncio.wait({arriving})

    async def _arrive(self, arrival: Arrival, work: Callable[[Arrival], Awaitable[None]]) -> None:
        try:
            await work(arrival)
        except WeightSyncError as error:
            await self._failed(arrival.stage, error)

    async def _extend(self, arrival: Arrival, message: wire.Buckets) -> None:
        """Let further buckets come; a gap, as after a lost connection, fails the version and not this process."""
        try:
            arrival.extend(message)
        except WeightSyncError as error:
            await self._end()
            await self._failed(arrival.stage, error)

    async def _failed(self, stage: wire.Stage, error: WeightSyncError) -> None:
        self._on_event("version_failed", {"version": stage.version, "reason": str(error)})
        await self.send(wire.StageFailed(session=stage.session, update=stage.update, reason=str(error)))

    async def _reach(self, stage: wire.Stage) -> None:
        """Make this end of the transport, if there is none yet."""
        welcome = self._welcome
        if welcome is None or welcome.session != stage.session:
            raise WeightSyncError(f"{self.name} has no Welcome of session {stage.session}")
        if self._receiver is not None:
            return
        welcome.manifest.check()
        receiver = make_receiver(
            welcome.transport, welcome.address, welcome.manifest, member=self.name, timeout_s=self._timeout_s
        )
        try:
            await in_thread(receiver.reserve)
        except BaseException:  # whatever it is, also a cancellation: its memory must not stay
            receiver.close()
            raise
        self._receiver = receiver

    def _expect(self, stage: wire.Stage) -> Arrival:
        assert self._welcome is not None, "it was looked for"
        assert self._receiver is not None, "it was made"
        has_base = stage.base >= 0 and self._held.get(1 - stage.slot) == stage.base
        self._held.pop(stage.slot, None)
        return Arrival(stage, self._welcome.manifest, self._receiver, has_base)

    async def _enter(self, welcome: wire.Welcome) -> None:
        """Turn to the session of ``welcome``; nothing changes if it is the one of before."""
        if self._welcome is None or self._welcome.session != welcome.session:
            await self._end()
            self._leave()
            self._welcome = welcome

    def _leave(self) -> None:
        if self._receiver:
            self._receiver.close()
        self._welcome = self._receiver = self._arrival = None
        self._held = {}

    async def _greet(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            await monitor.recv_multipart()
            await self.send(wire.Hello(name=self.name, pid=os.getpid(), incarnation=self._incarnation))

    async def _receive(self, socket: zmq.asyncio.Socket, handle: Handle) -> None:
        while True:
            frames = await socket.recv_multipart()
            try:
                if len(frames) != 1:
                    raise WireError(f"weight sync: expected one frame per message, got {len(frames)}")
                message = wire.decode_to_subscriber(frames[0])
            except WireError as error:
                self.malformed_frames += 1
                self._on_event("malformed_frame", {"sender": self._endpoint, "reason": str(error)})
                await self.send(wire.Refused(reason=str(error)))
                continue
            match message:
                case wire.Refused():
                    self._on_event("frame_refused", {"by": self._endpoint, "reason": message.reason})
                case wire.Welcome():
                    await self._enter(message)
                case wire.Buckets():
                    if self._arrival and same(self._arrival.stage, message):
                        await self._extend(self._arrival, message)
                case _:
                    await handle(message)


def same(one: wire.OfUpdate, other: wire.OfUpdate) -> bool:
    """Whether both belong to the same update of the same publisher."""
    return (one.session, one.update) == (other.session, other.update)
