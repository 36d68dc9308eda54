"""The receiving sides of the weight sync: a rollouter's ``Subscriber`` and the evaluator's ``Observer`` (C5, C6).

Staging maps the publisher's memory and verifies every bucket on a worker thread while the engine generates on. Only
the commit stops the engine: pause, load from the mapping, resume. Nothing resumes on half-loaded weights: an engine
that refuses the tensors before the first copy resumes on the old ones, everything else ends the process.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import torch
import zmq
import zmq.asyncio

from streamrl.errors import WeightSyncError, WireError
from streamrl.ports import Engine
from streamrl.sync import messages as wire
from streamrl.sync.arena import ArenaReader

OnEvent = Callable[[str, dict[str, Any]], None]
Tensors = dict[str, torch.Tensor]

PENDING_VERSIONS = 8
PENDING_BYTES = 256 << 20
"""What an ``Observer`` keeps for its caller at most, though never less than one version."""


@dataclass(frozen=True)
class _Staged:
    """A version that was verified and waits for Commit."""

    stage: wire.Stage
    tensors: Tensors


class _Link:
    """The DEALER socket of one process, and the publisher's memory as it is mapped here.

    Says Hello at every connect, so that a publisher that was restarted on the same endpoint learns of it. Hands the
    messages to ``handle`` one after the other.
    """

    def __init__(self, endpoint: str, name: str, on_event: OnEvent) -> None:
        self.name = name
        self.malformed_frames = 0
        self._endpoint = endpoint
        self._on_event = on_event
        self._incarnation = time.monotonic_ns()
        self._socket: zmq.asyncio.Socket | None = None
        self._welcome: wire.Welcome | None = None
        self._reader: ArenaReader | None = None

    async def run(self, handle: Callable[[wire.ToSubscriber], Awaitable[None]]) -> None:
        """Receive until cancelled; waits for the publisher without a deadline."""
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.maxmsgsize = wire.FRAME_LIMIT
        self._socket.identity = wire.identity_of(self.name, self._incarnation)
        monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            self._socket.connect(self._endpoint)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._greet(monitor), name="weights-greet")
                tasks.create_task(self._receive(self._socket, handle), name="weights-receive")
        finally:
            self._socket.disable_monitor()
            monitor.close(linger=0)
            self._socket.close()
            self._leave()

    async def send(self, message: wire.Message) -> None:
        assert self._socket is not None, "only a running subscriber sends"
        await self._socket.send(wire.encode(message))

    def enter(self, welcome: wire.Welcome) -> None:
        """Turn to the session of ``welcome``; nothing changes if it is the one of before."""
        if self._welcome is None or self._welcome.session != welcome.session:
            self._leave()
            self._welcome = welcome

    @property
    def payload_bytes(self) -> int:
        """Bytes of the tensors of one version; 0 before the publisher said so."""
        return self._welcome.manifest.payload_bytes if self._welcome else 0

    async def stage(self, stage: wire.Stage) -> _Staged | None:
        """Read a version on a worker thread; None when that failed, which the publisher is told."""
        try:
            tensors = await asyncio.to_thread(self.read, stage)
        except WeightSyncError as error:
            self._on_event("version_failed", {"version": stage.version, "reason": str(error)})
            await self.send(wire.StageFailed(session=stage.session, update=stage.update, reason=str(error)))
            return None
        self._on_event("version_staged", {"version": stage.version})
        return _Staged(stage, tensors)

    def read(self, stage: wire.Stage) -> Tensors:
        """Verified tensors of a version, views or private copies as it asks. Blocking; for a worker thread.

        Raises ``WeightSyncError`` when the memory cannot be opened or does not hold what the digests say.
        """
        if self._welcome is None or self._welcome.session != stage.session:
            raise WeightSyncError(f"{self.name} has no Welcome of session {stage.session}")
        if self._reader is None:
            self._reader = ArenaReader(self._welcome.path, self._welcome.manifest)
        if stage.private:
            return self._reader.copy(stage.version, stage.digests)
        self._reader.verify(stage.version, stage.digests)
        return self._reader.tensors(stage.version)

    def holds(self, stage: wire.Stage) -> bool:
        """Whether the tensors of ``stage`` still are what was verified."""
        return stage.private or (self._reader is not None and self._reader.holds(stage.version))

    def _leave(self) -> None:
        if self._reader:
            self._reader.close()
        self._welcome = self._reader = None

    async def _greet(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            await monitor.recv_multipart()
            await self.send(wire.Hello(name=self.name, pid=os.getpid(), incarnation=self._incarnation))

    async def _receive(
        self, socket: zmq.asyncio.Socket, handle: Callable[[wire.ToSubscriber], Awaitable[None]]
    ) -> None:
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
            if isinstance(message, wire.Refused):
                self._on_event("frame_refused", {"by": self._endpoint, "reason": message.reason})
            else:
                await handle(message)


class Subscriber:
    """Keeps one engine on the publisher's newest version. ``run`` is a task of the rollouter's TaskGroup."""

    def __init__(self, endpoint: str, name: str, engine: Engine, on_event: OnEvent) -> None:
        self.version = -1
        """The version that the engine serves."""
        self.committed = asyncio.Event()
        """Set once the engine serves a version."""
        self._engine = engine
        self._on_event = on_event
        self._link = _Link(endpoint, name, on_event)
        self._staged: _Staged | None = None
        self._last: wire.Committed | None = None
        """The answer to the last Commit that was carried out, for the case that it is asked for again."""
        self._changed = asyncio.Condition()

    @property
    def malformed_frames(self) -> int:
        return self._link.malformed_frames

    async def run(self) -> None:
        """Follow the publisher until cancelled.

        Raises (in an ``ExceptionGroup``) ``WeightSyncError`` when the memory was overwritten while the engine loaded
        it, and whatever else the engine raises; the engine then stays paused and its process must be restarted.
        """
        try:
            await self._link.run(self._handle)
        finally:
            self._staged = None

    async def wait_version(self, version: int) -> None:
        """Return once the engine serves ``version`` or a newer one. Ended by cancellation."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.version >= version)

    async def _handle(self, message: wire.ToSubscriber) -> None:
        match message:
            case wire.Welcome():
                self._link.enter(message)
            case wire.Stage():
                await self._stage(message)
            case wire.Commit():
                await self._commit(message)
            case wire.Discard():
                if self._staged and _same(self._staged.stage, message):
                    self._staged = None

    async def _stage(self, stage: wire.Stage) -> None:
        known = (self._staged and _same(self._staged.stage, stage)) or (self._last and _same(self._last, stage))
        if not known:
            self._staged = None
            self._staged = await self._link.stage(stage)
            if self._staged is None:
                return
        await self._link.send(wire.Staged(session=stage.session, update=stage.update))

    async def _commit(self, commit: wire.Commit) -> None:
        if self._last and _same(self._last, commit):
            await self._link.send(self._last)
            return
        staged, self._staged = self._staged, None
        if staged is None or not _same(staged.stage, commit):
            reason = f"update {commit.update} is not staged here"
            await self._link.send(wire.CommitFailed(session=commit.session, update=commit.update, reason=reason))
            return
        try:
            pause_seconds = await self._load(staged)
        except _Refusal as refusal:
            self._on_event("version_failed", {"version": staged.stage.version, "reason": str(refusal)})
            failed = wire.CommitFailed(session=commit.session, update=commit.update, reason=str(refusal))
            await self._link.send(failed)
            return
        self._last = wire.Committed(session=commit.session, update=commit.update, pause_seconds=pause_seconds)
        self._on_event("version_committed", {"version": staged.stage.version, "pause_seconds": pause_seconds})
        await self._link.send(self._last)
        await self._serve(staged.stage.version)

    async def _load(self, staged: _Staged) -> float:
        """Seconds from the call of ``pause`` to the end of ``resume``.

        Raises ``_Refusal`` when the engine refused the tensors and the old weights serve on.
        """
        version = staged.stage.version
        started = time.monotonic()
        await self._engine.pause()
        try:
            await self._engine.load(version, staged.tensors)
        except WeightSyncError as error:
            await self._engine.resume()
            raise _Refusal(str(error)) from error
        if not self._link.holds(staged.stage):
            raise WeightSyncError(
                f"version {version} was overwritten while the engine loaded it; the engine stays paused"
            )
        await self._engine.resume()
        return time.monotonic() - started

    async def _serve(self, version: int) -> None:
        async with self._changed:
            self.version = version
            self.committed.set()
            self._changed.notify_all()


class Observer:
    """Copies out the versions that are published with ``observe=True``, in order and none left out.

    A version is handed out only when it has become current. Those that wait to be taken are bounded: 8 versions or 256
    MiB, whichever is less, but at least one. When that many wait, the next Stage is not answered before one is taken,
    and ``publish`` waits for the answer.
    """

    def __init__(self, endpoint: str, name: str, on_event: OnEvent = lambda event, fields: None) -> None:
        self._link = _Link(endpoint, name, on_event)
        self._staged: _Staged | None = None
        self._waiting: deque[_Staged] = deque()
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        """Receive until cancelled: a task of the evaluator's TaskGroup."""
        await self._link.run(self._handle)

    async def updates(self) -> AsyncIterator[tuple[int, Tensors]]:
        """(version, private tensors by name) of each observed version, for as long as the caller asks."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._waiting)
                taken = self._waiting.popleft()
                self._changed.notify_all()
            yield taken.stage.version, taken.tensors

    async def _handle(self, message: wire.ToSubscriber) -> None:
        match message:
            case wire.Welcome():
                self._link.enter(message)
            case wire.Stage():
                await self._stage(message)
            case wire.Commit():
                await self._keep(message)
            case wire.Discard():
                if self._staged and _same(self._staged.stage, message):
                    self._staged = None

    async def _stage(self, stage: wire.Stage) -> None:
        if self._staged is None or not _same(self._staged.stage, stage):
            self._staged = None
            async with self._changed:
                await self._changed.wait_for(self._has_room)
            self._staged = await self._link.stage(stage)
            if self._staged is None:
                return
        await self._link.send(wire.Staged(session=stage.session, update=stage.update))

    def _has_room(self) -> bool:
        versions = min(PENDING_VERSIONS, PENDING_BYTES // max(1, self._link.payload_bytes))
        return len(self._waiting) < max(1, versions)

    async def _keep(self, commit: wire.Commit) -> None:
        """The staged version is current now."""
        staged, self._staged = self._staged, None
        if staged and _same(staged.stage, commit):
            async with self._changed:
                self._waiting.append(staged)
                self._changed.notify_all()


class _Refusal(Exception):
    """The engine refused a version before the first copy."""


def _same(
    one: wire.Reply | wire.Stage | wire.Commit | wire.Discard, other: wire.Stage | wire.Commit | wire.Discard
) -> bool:
    """Whether both belong to the same attempt of the same publisher."""
    return (one.session, one.update) == (other.session, other.update)
