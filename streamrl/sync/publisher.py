"""The trainer's side of the weight sync: brings versions into the memory of every member, and into service (C5).

::

    open(v)      a slot for v
    publish(v)   Stage → all … Buckets → all            while the rest of v is still written, and every engine generates
                 … Staged ← all                         any failure up to here changes nothing anywhere
                 Commit → all … Committed ← all         pause, load, resume in each engine, canary
                 current_version = v                    or, rejected by a canary: everybody back to the version before

With ``rolling`` a member is told to commit as soon as it has staged; else when all have.

A member that joins or restarts later is brought to ``current_version`` by an update of its own. It has a copy of
its own before it answers, so that neither the update of the others nor the next version waits for it. A rejected
version is undone in the same way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from streamrl.errors import WeightSyncError
from streamrl.sync import messages as wire
from streamrl.sync.content import Content
from streamrl.sync.digest import weights_digest
from streamrl.sync.exchange import Exchange, OnEvent
from streamrl.sync.report import PublishReport
from streamrl.sync.roster import Roster
from streamrl.sync.slab import Slab
from streamrl.sync.update import Order, Orders, Phase, Step, Update


@dataclass
class _Running:
    """An update under way."""

    update: Update
    content: Content
    done: asyncio.Future[None]
    phase: Phase = Phase.STAGE
    """The last phase that was acted on."""
    expired: bool = False
    """The last deadline passed."""
    timer: asyncio.TimerHandle | None = None


class Publisher:
    """Publishes versions to the members named by ``set_members``. All methods belong to the event loop.

    ``timeout_s``: what a member may take for one phase before ``on_unresponsive(member, waited_for)`` is called, with
    ``waited_for`` one of ``connect``, ``stage``, ``commit``; the caller then ends it and takes it out with
    ``set_members``, or restarts it. After the same time again ``publish`` raises. ``on_unresponsive`` is also called
    for a member that the others left behind: it serves an older version, and only a restart brings it back. The time
    for staging counts from when the version is written. With ``rolling`` nobody waits for the others to commit.
    """

    def __init__(
        self,
        endpoint: str,
        slab: Slab,
        *,
        timeout_s: float,
        on_event: OnEvent,
        on_unresponsive: Callable[[str, str], None],
        rolling: bool = False,
    ) -> None:
        self.current_version = -1
        """The version that every live member serves; -1 before the first."""
        self._timeout_s = timeout_s
        self._on_event = on_event
        self._on_unresponsive = on_unresponsive
        self._rolling = rolling
        self._exchange = Exchange(endpoint, self._take, on_event)
        self._slab = slab
        self._queued: list[int] = []
        """Versions of the ``publish`` calls that are not over."""
        self._turn = asyncio.Lock()
        self._rollouters: set[str] = set()
        self._observers: set[str] = set()
        self._roster = Roster()
        self._running: dict[int, _Running] = {}
        self._updates = 0

    @property
    def malformed_frames(self) -> int:
        return self._exchange.malformed_frames

    async def run(self) -> None:
        """Serve until cancelled; updates that are under way then fail with ``WeightSyncError``."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._exchange.run(), name="weights-exchange")
                tasks.create_task(self._slab.sender.run(), name="weights-sender")
        finally:
            for running in list(self._running.values()):
                self._drop(running, WeightSyncError("the weight publisher was stopped during an update"))

    def close(self) -> None:
        """Free the slab; members that mapped it keep it until they let go. After ``run`` has ended."""
        self._slab.close()

    def open(self, version: int) -> Content:
        """A free slot for ``version``, to be written by one thread. ``publish`` may be called at once.

        A slot is free when the version in it is neither the current one nor being published.
        """
        return self._slab.open(version, self.current_version, self._queued)

    async def publish(self, version: int, *, observe: bool = False) -> PublishReport:
        """Bring ``version``, which is being written or was, to every member; observers where ``observe`` says so.

        Calls queue up. Raises ``WeightSyncError`` when a member refuses the version twice or stays unresponsive for
        ``2 × timeout_s``, or when it cannot be written or sent; the old version then serves on, unless some had
        committed: the message and ``current_version`` tell. Cancelling the call gives the update up.
        """
        content = self._slab.content(version)
        assert content is not None, f"version {version} was not written"
        self._queued.append(version)
        try:
            async with self._turn:
                assert version > self.current_version, f"version {version} cannot follow {self.current_version}"
                return await self._publish(content, self._observers if observe else set())
        finally:
            self._queued.remove(version)

    def set_members(self, rollouters: set[str], observers: set[str]) -> None:
        """Who takes part from now on. Who is left out is no longer waited for, also in an update under way.

        A new rollouter gets the current version as soon as it is connected and takes part in the next ``publish``.
        """
        assert not rollouters & observers, f"both rollouter and observer: {sorted(rollouters & observers)}"
        gone = (self._rollouters | self._observers) - rollouters - observers
        self._rollouters, self._observers = set(rollouters), set(observers)
        self._slab.sender.set_members(rollouters)
        for name in gone:
            self._roster.doubt(name)
            for running in list(self._running.values()):
                if running.update.private and name in running.update:
                    self._drop(running)
                else:
                    self._follow(running, running.update.removed(name))
        self._catch_up()

    # Updates under way ------------------------------------------------------------------------------------------------

    async def _publish(self, content: Content, observers: set[str]) -> PublishReport:
        started = time.monotonic()
        while late := next((one for one in self._running.values() if one.update.members & self._rollouters), None):
            if late.phase is Phase.COMMIT or any(self._roster.version(name) >= 0 for name in late.update.members):
                await asyncio.wait({late.done})  # it may serve from memory that the new version takes
            else:
                self._drop(late)  # a late joiner goes straight to the new version
        update = Update(self._next(), content.number, self._rollouters, observers, rolling=self._rolling, writing=True)
        running = self._begin(update, content)
        try:
            await self._offer(running)
            await running.done
            if update.phase is Phase.REJECTED:
                if self.current_version < 0:
                    raise WeightSyncError(f"version {content.number} was rejected, the first one: {_reasons(update)}")
                await self._bring_back(update)
        except asyncio.CancelledError:
            if update.phase is Phase.COMMIT:  # some may serve it by now: bring them back
                for name in update.members:
                    self._roster.doubt(name)
            self._follow(running, update.give_up())
            raise
        except WeightSyncError:
            self._slab.distrust()
            raise
        finally:
            self._catch_up()
        if running.expired:
            raise WeightSyncError(f"version {content.number} serves, but not everywhere: {_reasons(update)}")
        return PublishReport(
            version=content.number,
            seconds=time.monotonic() - started,
            pause_seconds=max(update.pauses.values(), default=0.0),
            bytes=self._slab.manifest.payload_bytes,
            delta_fraction=content.payload_bytes / max(1, self._slab.manifest.slot_bytes),
            rollouters=len(update.committed),
            canary_rms=update.canary_rms,
            rejected=_reasons(update) if update.phase is Phase.REJECTED else "",
        )

    async def _offer(self, running: _Running) -> None:
        """Let members fetch the version as it is written; from its end on they have ``timeout_s`` to stage it."""
        try:
            await self._slab.offer(running.content, self._announce)
        except WeightSyncError as error:
            running.update.failures |= {"publisher": str(error)}
            self._follow(running, running.update.give_up())
            return
        self._follow(running, running.update.written())
        if running.update.number in self._running and running.phase is Phase.STAGE:
            self._set_deadline(running)

    def _announce(self, content: Content, offered: int) -> None:
        """Tell everybody who stages the version that its first ``offered`` buckets can be fetched."""
        first, content.offered = content.offered, offered
        for running in list(self._running.values()):
            if running.content is content:
                for name in running.update.staging():
                    self._send(name, self._buckets(name, running, first))

    async def _bring_back(self, update: Update) -> None:
        """Every member that may serve the rejected version gets the current one, as a late joiner would."""
        self._slab.distrust()
        for name in update.members:
            self._roster.doubt(name)
        self._catch_up()
        while behind := [running.done for running in self._running.values() if running.update.private]:
            await asyncio.wait(behind)

    def _catch_up(self) -> None:
        """Start an update of its own for each connected rollouter that does not serve the current version."""
        content = self._slab.content(self.current_version)
        if content is None:
            return
        busy = {name for running in self._running.values() for name in running.update.members}
        for name in sorted(self._rollouters - busy):
            if self._roster.reachable(name) and self._roster.version(name) != self.current_version:
                self._begin(Update(self._next(), self.current_version, [name], [], private=True), content)

    def _begin(self, update: Update, content: Content) -> _Running:
        running = _Running(update, content, asyncio.get_running_loop().create_future())
        self._running[update.number] = running
        if update.private:
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
            fields["weights"] = weights_digest(self._slab.manifest, [entry.digest for entry in running.content.entries])
            self._on_event("version_committed", fields)
            self._leave_behind(update.failures)
        elif update.phase is Phase.REJECTED and not update.private:
            self._drop(running)
            fields = {"version": update.version, "reason": _reasons(update), "canary_rms": update.canary_rms}
            self._on_event("version_rejected", fields)
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

    def _take(self, identity: bytes, message: wire.ToPublisher) -> None:
        if isinstance(message, wire.Hello):
            self._hello(identity, message)
        elif not isinstance(message, wire.Refused):
            self._reply(identity, message)

    def _hello(self, identity: bytes, hello: wire.Hello) -> None:
        if not self._roster.greet(identity, hello):
            return
        welcome = wire.Welcome(
            session=self._slab.session,
            transport=self._slab.sender.name,
            address=self._slab.sender.address,
            manifest=self._slab.manifest,
        )
        self._exchange.transmit(identity, welcome)
        for running in list(self._running.values()):
            self._follow(running, running.update.connected(hello.name))
        self._catch_up()

    def _reply(self, identity: bytes, message: wire.Reply) -> None:
        name = self._roster.sender(identity)
        running = self._running.get(message.update) if message.session == self._slab.session else None
        if running is None or name is None:
            return  # a late word about something that is over
        update = running.update
        match message:
            case wire.Staged():
                orders = update.staged(name)
            case wire.Committed():
                orders = update.committed_by(name, message.pause_seconds, message.canary_rms)
            case wire.Rejected():
                orders = update.rejected_by(name, message.canary_rms, message.reason)
            case wire.StageFailed() | wire.CommitFailed():
                fields = {"member": name, "version": update.version, "reason": message.reason}
                self._on_event("version_refused", fields)
                orders = update.failed(name, message.reason)
        self._follow(running, orders)

    def _send(self, name: str, message: wire.Message) -> None:
        if self._exchange.transmit(self._roster.identity(name), message):
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
            joins = update.private or self._roster.version(name) < 0
            scores = running.content.scores if running.content.judged or joins else []
            return wire.Commit(session=self._slab.session, update=update.number, scores=scores)
        if order is Order.DISCARD:
            return wire.Discard(session=self._slab.session, update=update.number)
        return wire.Stage(
            session=self._slab.session,
            update=update.number,
            version=update.version,
            slot=running.content.slot,
            attempt=update.attempt(name),
            private=self._alone(name, update),
            base=running.content.base,
            buckets=self._buckets(name, running, 0).buckets,
        )

    def _buckets(self, name: str, running: _Running, first: int) -> wire.Buckets:
        """What the member can fetch, from bucket ``first`` on; codes only while it goes along with the others."""
        update, content = running.update, running.content
        whole = self._alone(name, update) or update.attempt(name) > 0
        entries = content.offered_entries(first, whole=whole)
        return wire.Buckets(session=self._slab.session, update=update.number, first=first, buckets=entries)

    def _alone(self, name: str, update: Update) -> bool:
        return update.private or update.observes(name)


def _reasons(update: Update) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in sorted(update.failures.items()))
