"""The queue server's side for producers: leases, reservations of bytes, failures, and the release of payloads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from streamrl.buffers.held import PutStatus
from streamrl.buffers.lease import Refund
from streamrl.buffers.wire.messages import (
    FailRequest,
    LeaseItem,
    LeaseRequest,
    Leases,
    Released,
    ReleaseRequest,
    ReserveRequest,
    ReturnRequest,
    Status,
    Withdraw,
)
from streamrl.errors import EnvironmentFailed, StreamRLError
from streamrl.types import Lease

if TYPE_CHECKING:
    from streamrl.buffers.queue.message_server import Asker
    from streamrl.buffers.queue.server import QueueServer

REQUESTS_PER_CLIENT = 1024
"""That may wait at once (C4): more than a rollouter has coroutines."""

BodyT = TypeVar("BodyT")


class Waiting(NamedTuple, Generic[BodyT]):
    """A request that is answered later."""

    asker: Asker
    body: BodyT


class LeaseDesk:
    """Requests wait here until ``serve`` can answer them; one that comes again takes the place of its first copy."""

    def __init__(self, server: QueueServer) -> None:
        self._server = server
        self._buffer = server.buffer
        self._requests: dict[Asker, LeaseRequest] = {}
        """In the order of their arrival."""
        self._reservations: dict[Asker, ReserveRequest] = {}
        self._releases: dict[bytes, Waiting[ReleaseRequest]] = {}
        """One per client: its newest list of held payloads."""
        self._closed_seen = -1
        self._failures_in_row = 0

    # Requests ---------------------------------------------------------------------------------------------------------

    def ask(self, asker: Asker, body: LeaseRequest) -> None:
        """A request that was granted before gets the same leases: their answer was lost."""
        if granted := self._buffer.ledger.granted_to(asker.key):
            self._answer(asker, granted)
            return
        others = sum(other.identity == asker.identity for other in self._requests)
        if asker not in self._requests and others >= REQUESTS_PER_CLIENT:
            raise StreamRLError(f"{REQUESTS_PER_CLIENT} requests for leases wait already; await them first")
        self._requests[asker] = body

    def withdraw(self, asker: Asker, body: Withdraw) -> None:
        """Whoever waited is gone; its request is answered without leases, if it waits still."""
        asker = asker._replace(request=body.request)
        if self._requests.pop(asker, None) is not None:
            self._server.answer(asker, Leases([]))

    def reserve(self, asker: Asker, body: ReserveRequest) -> None:
        self._reservations[asker] = body

    def fail(self, asker: Asker, body: FailRequest) -> None:
        """Counts towards ``env.max_failures`` while the lease is in flight: told again, it counts once."""
        failed = self._buffer.fail(body.lease)
        if failed:
            fields = {"lease": body.lease, "reason": body.reason, "traceback": body.traceback}
            self._server.report("lease_failed", {"sender": asker.name} | fields)
        self._failures_in_row += failed
        limit = self._buffer.config.env.max_failures
        last = " ".join(body.reason.split())
        if failed and self._buffer.ledger.fatal:
            self._server.end(EnvironmentFailed(f"{self._buffer.ledger.fatal}; last: {last}"))
        if self._failures_in_row >= limit:
            text = f"{self._failures_in_row} leases failed in a row (env.max_failures={limit}); last: {last}"
            self._server.end(EnvironmentFailed(text))
        self._server.answer(asker, Status("failed" if failed else PutStatus.LATE.value))

    def take_back(self, asker: Asker, body: ReturnRequest) -> None:
        """A lease whose player is gone is issued again; one that is not in flight any more stays as it is."""
        held = [body.lease] if self._buffer.ledger.is_in_flight(body.lease) else []
        returned = self._buffer.lose(held, Refund.LOST if body.lost else Refund.UNDELIVERED)
        self._server.tell("lease_lost" if body.lost else "lease_returned", returned, holder=asker.name)
        self._server.answer(asker, Status("returned" if returned else PutStatus.LATE.value))

    def succeeded(self) -> None:
        """A group came: the row of failures is broken."""
        self._failures_in_row = 0

    def ask_release(self, asker: Asker, body: ReleaseRequest) -> None:
        """A newer request of the same client takes the place of its last one, which is answered with nothing."""
        if (superseded := self._releases.get(asker.identity)) is not None and superseded.asker != asker:
            self._server.answer(superseded.asker, Released([]))
        self._releases[asker.identity] = Waiting(asker, body)
        self._closed_seen = -1  # some of these may be closed already

    def forget(self, holder: str) -> None:
        """Drop whatever a dead client waits for."""
        for waiting in (self._requests, self._reservations):
            for asker in [asker for asker in waiting if asker.name == holder]:
                del waiting[asker]
        self._releases = {who: each for who, each in self._releases.items() if each.asker.name != holder}

    @property
    def waiting(self) -> int:
        return len(self._requests)

    # Answers ----------------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Answer whoever can be answered now. ``ConfigError`` for groups that ``buffer.max_bytes`` cannot hold."""
        self._serve_reservations()
        self._serve_leases()
        self._serve_releases()

    def _serve_leases(self) -> None:
        """Share what can be granted evenly over the waiting requests, first come first served."""
        while self._requests and (grantable := self._buffer.grantable):
            asker = next(iter(self._requests))
            body = self._requests.pop(asker)
            share = -(-grantable // (len(self._requests) + 1))
            first = not self._buffer.ledger.in_flight
            leases = self._buffer.lease(asker.name, min(body.count, share), self._server.now, asker.key)
            if first:
                self._server.deadline_changed()
            if self._answer(asker, leases):
                again = [lease for lease in leases if lease.attempt]
                self._server.tell("lease_reissued", again, holder=asker.name)
            else:
                lost = self._buffer.lose([lease.id for lease in leases], Refund.UNDELIVERED)
                self._server.tell("lease_lost", lost, holder=asker.name)

    def _answer(self, asker: Asker, leases: list[Lease]) -> bool:
        items = [LeaseItem(x.id, x.prompt, x.group_size, x.attempt, x.deadline_s, x.nbytes) for x in leases]
        return self._server.answer(asker, Leases(items))

    def _serve_reservations(self) -> None:
        """In their order: a large group is not starved by small ones.

        When all groups in flight wait for more than what is left, their promises fill the room and none can be kept.
        Then the newest gives way: its prompt is issued again, with a promise as large as the first of them needs.
        """
        for asker, body in list(self._reservations.items()):
            if not self._buffer.ledger.is_in_flight(body.lease):
                del self._reservations[asker]
                self._server.answer(asker, Status("late"))  # its put will be told the same
        while self._reservations:
            asker, body = next(iter(self._reservations.items()))
            if not self._buffer.reserve(body.lease, body.nbytes):
                if self._buffer.ledger.in_flight > len(self._reservations) or len(self._reservations) == 1:
                    return
                asker, body = self._reservations.popitem()
                if self._buffer.ledger.is_in_flight(body.lease):
                    self._buffer.evict(body.lease)
            self._reservations.pop(asker, None)
            self._server.answer(asker, Status("reserved"))

    def _serve_releases(self) -> None:
        ledger = self._buffer.ledger
        closed = ledger.consumed + ledger.refunded
        if closed == self._closed_seen or not self._releases:
            return
        self._closed_seen = closed
        for identity, (asker, body) in list(self._releases.items()):
            released = [lease for lease in body.leases if ledger.find(lease) is None]
            if released:
                del self._releases[identity]
                self._server.answer(asker, Released(released))
