"""The trainer's side of the weight sync: writes versions into shared memory and brings them to every member (C5).

::

    write(v)     slot v % 2 ← tensors, digests          on a worker thread, while every engine generates
    publish(v)   Stage → all … Staged ← all             engines generate on; any failure here changes nothing anywhere
                 Commit → all … Committed ← all         pause, load, resume in each engine
                 current_version = v

A member that joins or restarts later is brought to ``current_version`` by an update of its own. It copies the slot
before it answers, so that neither the update of the others nor the next ``write`` waits for it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import zmq
import zmq.asyncio

from streamrl.errors import WeightSyncError, WireError
from streamrl.sync import messages as wire
from streamrl.sync.arena import Arena, NamedTensors
from streamrl.sync.digest import weights_digest
from streamrl.sync.manifest import Manifest
from streamrl.sync.roster import Roster
from streamrl.sync.update import Order, Orders, Phase, Step, Update

OnEvent = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True)
class PublishReport:
    """What one weight update took, as in the ``sync/`` metrics."""

    version: int
    seconds: float
    """From the call of ``publish`` (or its turn) until every live member acknowledged."""
    pause_seconds: float
    """Longest time that one engine stood still."""
    bytes: int
    """Bytes of weights that each member received."""
    rollouters: int
    """Rollouters that serve the version."""


@dataclass
class _Running:
    """An update under way."""

    update: Update
    digests: list[int]
    done: asyncio.Future[None]
    phase: Phase = Phase.STAGE
    """The last phase that was acted on."""
    expired: bool = False
    """The last deadline passed."""
    timer: asyncio.TimerHandle | None = None


class Publisher:
    """Publishes versions to the members named by ``set_members``. All methods but ``write`` belong to the event loop.

    ``timeout_s``: what a member may take for one phase before ``on_unresponsive(member, waited_for)`` is called, with
    ``waited_for`` one of ``connect``, ``stage``, ``commit``; the caller then ends it and takes it out with
    ``set_members``, or restarts it. After the same time again ``publish`` raises. ``on_unresponsive`` is also called
    for a member that the others left behind: it serves an older version, and only a restart brings it back.
    """

    def __init__(
        self,
        endpoint: str,
        manifest: Manifest,
        *,
        timeout_s: float,
        on_event: OnEvent,
        on_unresponsive: Callable[[str, str], None],
    ) -> None:
        self.manifest = manifest
        self.current_version = -1
        """The version that every live member serves; -1 before the first."""
        self.malformed_frames = 0
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._on_event = on_event
        self._on_unresponsive = on_unresponsive
        self._session = os.urandom(8).hex()
        self._socket: zmq.asyncio.Socket | None = None
        self._arena = Arena(manifest)
        self._written: dict[int, tuple[int, list[int]]] = {}
        """Slot → version in it and its digests."""
        self._queued: list[int] = []
        """Versions of the ``publish`` calls that are not over."""
        self._turn = asyncio.Lock()
        self._rollouters: set[str] = set()
        self._observers: set[str] = set()
        self._roster = Roster()
        self._running: dict[int, _Running] = {}
        self._updates = 0

    async def run(self) -> None:
        """Own the socket until cancelled; updates that are under way then fail with ``WeightSyncError``."""
        socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        try:
            socket.linger = 0
            socket.router_mandatory = True  # a member that is gone is an error of the send, not a silent loss
            socket.router_handover = True  # a member that reconnects takes its identity along
            socket.maxmsgsize = wire.FRAME_LIMIT
            socket.bind(self._endpoint)
            self._socket = socket
            while True:
                identity, *frames = await socket.recv_multipart()
                self._take(identity, frames)
        finally:
            self._socket = None
            socket.close()
            for running in list(self._running.values()):
                self._drop(running, WeightSyncError("the weight publisher was stopped during an update"))

    def close(self) -> None:
        """Free the shared memory; members that mapped it keep it until they let go. After ``run`` has ended."""
        self._arena.close()

    def write(self, version: int, named_tensors: NamedTensors) -> None:
        """Copy all tensors into the version's slot. Blocks for the copy: call it on a worker thread.

        Raises ``WeightSyncError`` when names, shapes or dtypes are not those of the manifest. The slot must be free:
        the version in it is neither the current one nor being published.
        """
        slot = version % 2
        held, _ = self._written.get(slot, (None, []))
        assert held is None or held not in (self.current_version, *self._queued), (
            f"version {version} would overwrite version {held}, which is still needed"
        )
        self._written.pop(slot, None)
        self._written[slot] = (version, self._arena.write(version, named_tensors))

    async def publish(self, version: int, *, observe: bool = False) -> PublishReport:
        """Bring ``version``, written before, to every member; observers take part where ``observe`` says so.

        Calls queue up. Raises ``WeightSyncError`` when a member refuses the version twice or stays unresponsive for
        ``2 × timeout_s``; the old version then serves on, unless some had committed: the message and
        ``current_version`` tell. Cancelling the call gives the update up.
        """
        held, _ = self._written.get(version % 2, (None, []))
        assert held == version, f"version {version} was not written"
        self._queued.append(version)
        try:
            async with self._turn:
                assert self.current_version in (-1, version - 1), (
                    f"version {version} cannot follow version {self.current_version}"
                )
                return await self._publish(version, self._observers if observe else set())
        finally:
            self._queued.remove(version)

    def set_members(self, rollouters: set[str], observers: set[str]) -> None:
        """Who takes part from now on. Who is left out is no longer waited for, also in an update under way.

        A new rollouter gets the current version as soon as it is connected and takes part in the next ``publish``.
        """
        assert not rollouters & observers, f"both rollouter and observer: {sorted(rollouters & observers)}"
        gone = (self._rollouters | self._observers) - rollouters - observers
        self._rollouters, self._observers = set(rollouters), set(observers)
        for name in gone:
            self._roster.doubt(name)
            for running in list(self._running.values()):
                if running.update.private and name in running.update:
                    self._drop(running)
                else:
                    self._follow(running, running.update.removed(name))
        self._catch_up()

    # Updates under way ------------------------------------------------------------------------------------------------

    async def _publish(self, version: int, observers: set[str]) -> PublishReport:
        started = time.monotonic()
        for late in list(self._running.values()):
            if late.update.members & self._rollouters:
                self._drop(late)  # a late joiner goes straight to the new version
        running = self._begin(Update(self._next(), version, self._rollouters, observers))
        update = running.update
        try:
            await running.done
        except asyncio.CancelledError:
            if update.phase is Phase.COMMIT:  # some may serve it by now: bring them back
                for name in update.members:
                    self._roster.doubt(name)
            self._follow(running, update.give_up())
            raise
        finally:
            self._catch_up()
        if running.expired:
            raise WeightSyncError(f"version {version} serves, but not everywhere: {_reasons(update)}")
        return PublishReport(
            version=version,
            seconds=time.monotonic() - started,
            pause_seconds=max(update.pauses.values(), default=0.0),
            bytes=self.manifest.payload_bytes,
            rollouters=len(update.committed),
        )

    def _catch_up(self) -> None:
        """Start an update of its own for each connected rollouter that does not serve the current version."""
        if self.current_version < 0:
            return
        busy = {name for running in self._running.values() for name in running.update.members}
        for name in sorted(self._rollouters - busy):
            if self._roster.reachable(name) and self._roster.version(name) != self.current_version:
                self._begin(Update(self._next(), self.current_version, [name], [], private=True))

    def _begin(self, update: Update) -> _Running:
        _, digests = self._written[update.version % 2]
        running = _Running(update, digests, asyncio.get_running_loop().create_future())
        self._running[update.number] = running
        self._set_deadline(running)
        self._follow(running, update.begin([name for name in sorted(update.members) if self._roster.reachable(name)]))
        return running

    def _follow(self, running: _Running, orders: Orders) -> None:
        """Send the orders and act on the phase that the update reached with them."""
        update = running.update
        for name, order in orders:
            self._send(name, self._message(name, order, running))
        if update.phase is running.phase or update.number not in self._running:
            return
        running.phase = update.phase
        if update.phase is Phase.COMMIT:
            self._on_event("version_staged", {"version": update.version, "members": sorted(update.members)})
            self._set_deadline(running)
        else:
            self._finish(running)

    def _finish(self, running: _Running) -> None:
        update = running.update
        for name in update.committed:
            self._roster.serves(name, update.version)
        fields = {"version": update.version, "members": sorted(update.committed), "late": update.private}
        if update.phase is Phase.DONE:
            if not update.private:
                self.current_version = update.version
            self._drop(running)
            fields["weights"] = weights_digest(self.manifest, running.digests)
            self._on_event("version_committed", fields)
            self._leave_behind(update.failures)
        else:
            reason = f"version {update.version} was given up, version {self.current_version} serves: {_reasons(update)}"
            self._drop(running, WeightSyncError(reason))
            self._on_event("version_failed", {"version": update.version, "reason": reason, "late": update.private})
            if update.private and update.version == self.current_version:
                self._leave_behind(update.failures)
        if update.private:
            self._catch_up()

    def _drop(self, running: _Running, error: WeightSyncError | None = None) -> None:
        """The update is over: whatever its members still say about it is ignored."""
        self._running.pop(running.update.number, None)
        if running.timer:
            running.timer.cancel()
        if running.done.done():
            return
        if error is None or running.update.private:  # nobody awaits the update of a late joiner
            running.done.set_result(None)
        else:
            running.done.set_exception(error)

    def _leave_behind(self, failures: Iterable[str]) -> None:
        for name in failures:
            if self._roster.condemn(name):
                self._on_unresponsive(name, Step.COMMIT.value)

    def _set_deadline(self, running: _Running) -> None:
        if running.timer:
            running.timer.cancel()
        running.timer = asyncio.get_running_loop().call_later(self._timeout_s, self._late, running, False)

    def _late(self, running: _Running, last: bool) -> None:
        update, timer = running.update, running.timer
        for name, step in update.waiting.items():
            fields = {"member": name, "phase": step.value, "version": update.version, "last": last}
            self._on_event("sync_timeout", fields)
            if not last:
                self._on_unresponsive(name, step.value)
            elif step is not Step.CONNECT:
                self._roster.condemn(name)  # it may still follow the order that it was given
        if update.number not in self._running or running.timer is not timer:
            return  # the callback took the culprits out: the update is over, or in its next phase
        if last:
            running.expired = True
            self._follow(running, update.expire(f"no answer within {2 * self._timeout_s:g} s"))
        else:
            running.timer = asyncio.get_running_loop().call_later(self._timeout_s, self._late, running, True)

    def _next(self) -> int:
        self._updates += 1
        return self._updates

    # Messages ---------------------------------------------------------------------------------------------------------

    def _take(self, identity: bytes, frames: list[bytes]) -> None:
        try:
            if len(frames) != 1:
                raise WireError(f"weight sync: expected one frame per message, got {len(frames)}")
            message = wire.decode_to_publisher(frames[0])
            if isinstance(message, wire.Hello):
                self._hello(identity, message)
            elif isinstance(message, wire.Refused):
                self._on_event("frame_refused", {"by": wire.readable(identity), "reason": message.reason})
            else:
                self._reply(identity, message)
        except WireError as error:
            self.malformed_frames += 1
            self._on_event("malformed_frame", {"sender": wire.readable(identity), "reason": str(error)})
            self._transmit(identity, wire.Refused(reason=str(error)))

    def _hello(self, identity: bytes, hello: wire.Hello) -> None:
        if not self._roster.greet(identity, hello):
            return
        welcome = wire.Welcome(session=self._session, path=self._arena.path, manifest=self.manifest)
        self._transmit(identity, welcome)
        for running in list(self._running.values()):
            self._follow(running, running.update.connected(hello.name))
        self._catch_up()

    def _reply(self, identity: bytes, message: wire.Reply) -> None:
        name = self._roster.sender(identity)
        running = self._running.get(message.update) if message.session == self._session else None
        if running is None or name is None:
            return  # a late word about something that is over
        update = running.update
        match message:
            case wire.Staged():
                orders = update.staged(name)
            case wire.Committed():
                orders = update.committed_by(name, message.pause_seconds)
            case wire.StageFailed() | wire.CommitFailed():
                fields = {"member": name, "version": update.version, "reason": message.reason}
                self._on_event("version_refused", fields)
                orders = update.failed(name, message.reason)
        self._follow(running, orders)

    def _send(self, name: str, message: wire.Message) -> None:
        if self._transmit(self._roster.identity(name), message):
            return
        self._roster.lost(name)
        for running in list(self._running.values()):
            if name in running.update:
                running.update.disconnected(name)
                if running.update.private:
                    self._drop(running)

    def _message(self, name: str, order: Order, running: _Running) -> wire.Message:
        update = running.update
        if order is Order.COMMIT:
            return wire.Commit(session=self._session, update=update.number)
        if order is Order.DISCARD:
            return wire.Discard(session=self._session, update=update.number)
        return wire.Stage(
            session=self._session,
            update=update.number,
            version=update.version,
            digests=running.digests,
            private=update.private or update.observes(name),
        )

    def _transmit(self, identity: bytes, message: wire.Message) -> bool:
        """Send without waiting; False when the peer is gone or has left a thousand messages unread."""
        if self._socket is None:
            return False
        sent = self._socket.send_multipart([identity, wire.encode(message)], zmq.NOBLOCK)
        # With NOBLOCK the future that pyzmq returns is settled already: EHOSTUNREACH, EAGAIN or done.
        return cast("asyncio.Future[None]", sent).exception() is None


def _reasons(update: Update) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in sorted(update.failures.items()))
