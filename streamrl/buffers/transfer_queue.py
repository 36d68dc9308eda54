"""TransferQueue over ZeroMQ: leases, groups and batches between rollouters, buffer and trainer ranks (C1–C4).

::

    QueueProducer (rollouter)          QueueServer (buffer actor)             QueueConsumer (trainer rank)
    lease(n) ─────────────────────────► waits until credits and bytes allow
    put(group) ───────────────────────► ReplayBuffer.put ─┐
    fail(lease) ──────────────────────► Ledger            ├─► waits until a batch ◄── next_batch(step, version)
                                        deadline timer ───┘    is planned             acknowledge(step, version)
                                        frees credits ◄───────────────────────────── published(version)

The server is event-driven: each message, deadline and control call changes the buffer, then ``_pump`` answers whoever
can be answered now. All of it is synchronous on one event loop; one task receives, one sleeps until the next deadline.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import zmq.asyncio

from streamrl.buffers import codec
from streamrl.buffers.codec import Frame, Tensors
from streamrl.buffers.link_zmq import ServerLink, sender_name
from streamrl.buffers.messages import (
    AcknowledgeRequest,
    BatchRequest,
    Body,
    FailRequest,
    LeaseItem,
    LeaseRequest,
    Leases,
    PublishedRequest,
    PutRequest,
    Refusal,
    Status,
    Withdraw,
)
from streamrl.buffers.replay_buffer import PutStatus, ReplayBuffer
from streamrl.clock import Clock
from streamrl.errors import StreamRLError, WireError
from streamrl.types import Lease, RankBatch

LATENCIES_KEPT = 2048
"""Latest puts over which the latency quantiles are taken."""

LEASE_REQUESTS_PER_CLIENT = 1024
"""That may wait at once (C4): more than a rollouter has coroutines."""

OnEvent = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request that is answered later."""

    identity: bytes
    request: int
    body: Any


@dataclass(frozen=True, slots=True)
class _Planned:
    """The batch that is handed out and not acknowledged; kept so that a rank may ask for its part at any time."""

    step: int
    version: int
    parts: list[RankBatch]

    def fits(self, body: BatchRequest) -> bool:
        return (body.step, body.version, body.ranks) == (self.step, self.version, len(self.parts))


class QueueServer:
    """Serves ``buffer`` at ``endpoint`` until ``run`` is cancelled.

    ``on_event(name, fields)`` gets ``malformed_frame``, ``request_refused``, ``group_refused`` (duplicate, late,
    unknown, stale), ``lease_failed``, ``lease_expired``, ``lease_lost``, ``lease_reissued``. ``on_fatal(reason)`` is
    called once, when the run cannot go on: a prompt used up ``buffer.max_attempts``, or ``env.max_failures`` leases
    failed in a row.
    """

    def __init__(
        self,
        endpoint: str,
        buffer: ReplayBuffer,
        clock: Clock,
        on_event: OnEvent,
        on_fatal: Callable[[str], None],
        context: zmq.asyncio.Context | None = None,
    ) -> None:
        self.buffer = buffer
        self.malformed = 0
        """Messages that did not follow the schema."""
        self._endpoint = endpoint
        self._clock = clock
        self._on_event = on_event
        self._on_fatal = on_fatal
        self._context = context
        self._link: ServerLink | None = None
        self._lease_requests: deque[_Waiting] = deque()
        self._batch_requests: dict[int, _Waiting] = {}
        self._planned: _Planned | None = None
        self._failures_in_row = 0
        self._fatal_told = False
        self._draining = False
        self._in_flight = asyncio.Event()
        self._bytes = 0
        self._latencies: deque[float] = deque(maxlen=LATENCIES_KEPT)

    async def run(self) -> None:
        """Bind and serve until cancelled; no message from outside ends it. ``StreamRLError`` if it cannot bind."""
        self._link = ServerLink(self._endpoint, self._context)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive(self._link), name="transfer queue: requests")
                tasks.create_task(self._watch_deadlines(), name="transfer queue: lease deadlines")
        finally:
            self._link.close()
            self._link = None

    # Control, called by the buffer actor ------------------------------------------------------------------------------

    def holder_lost(self, holder: str) -> int:
        """A rollouter died: its leases go back, its waiting requests are dropped. Call before its successor starts."""
        self._lease_requests = deque(
            waiting for waiting in self._lease_requests if sender_name(waiting.identity) != holder
        )
        lost = self.buffer.ledger.holder_lost(holder)
        self._tell("lease_lost", lost, holder=holder)
        self._pump()
        return len(lost)

    def consumer_lost(self) -> int:
        """The trainer group died: what it had not acknowledged is ready again, its waiting requests are dropped."""
        self._batch_requests.clear()
        self._planned = None
        returned = self.buffer.hand_back()
        self._pump()
        return returned

    def drain(self) -> None:
        """Grant no more leases; requests for them go on waiting."""
        self._draining = True

    @property
    def waiting_for_leases(self) -> int:
        """Requests for leases that wait for credits or bytes."""
        return len(self._lease_requests)

    @property
    def waiting_for_batch(self) -> list[int]:
        """Trainer ranks that wait for a batch."""
        return sorted(self._batch_requests)

    def statistics(self) -> dict[str, float]:
        """The ``queue/``, ``buffer/`` and ``ledger/`` keys, now.

        ``queue/bytes`` is received since the start; latency is from a producer's send to the arrival here, over the
        latest puts, and compares monotonic clocks, so producers on another host are left out where it comes out
        negative.
        """
        p50, p99 = np.percentile(self._latencies, (50, 99)).tolist() if self._latencies else (0.0, 0.0)
        queue = {"queue/bytes": float(self._bytes), "queue/latency_p50_s": p50, "queue/latency_p99_s": p99}
        return queue | self.buffer.statistics()

    # Messages ---------------------------------------------------------------------------------------------------------

    async def _receive(self, link: ServerLink) -> None:
        while True:
            identity, frames = await link.receive()
            arrived = self._clock.now()
            try:
                header, tensors = codec.decode(frames)
                self._bytes += sum(map(len, frames))
                if isinstance(header.body, PutRequest) and arrived >= header.sent_s:
                    self._latencies.append(arrived - header.sent_s)
                self._handle(identity, header.request, header.body, tensors)
            except WireError as error:
                self._refuse_malformed(identity, frames, error)
            except StreamRLError as error:
                self._on_event("request_refused", {"sender": sender_name(identity), "error": str(error)})
                self._answer(identity, codec.request_id(frames), Refusal(str(error), malformed=False))
            self._pump()

    def _refuse_malformed(self, identity: bytes, frames: list[Frame], error: WireError) -> None:
        self.malformed += 1
        self._on_event("malformed_frame", {"sender": sender_name(identity), "error": str(error)})
        self._answer(identity, codec.request_id(frames), Refusal(str(error), malformed=True))

    def _handle(self, identity: bytes, request: int, body: Body, tensors: Tensors) -> None:
        match body:
            case PutRequest():
                self._put(identity, request, body, tensors)
            case LeaseRequest():
                self._ask_leases(_Waiting(identity, request, body))
            case Withdraw():
                self._withdraw(identity, body)
            case FailRequest():
                self._fail(identity, request, body)
            case BatchRequest():
                self._ask_batch(_Waiting(identity, request, body))
            case AcknowledgeRequest():
                self._acknowledge(identity, request, body)
            case PublishedRequest():
                self.buffer.ledger.publish(body.version)
                self._answer(identity, request, Status("published"))
            case _:
                raise WireError(f"expected a request, got the answer {type(body).__name__}")

    def _put(self, identity: bytes, request: int, body: PutRequest, tensors: Tensors) -> None:
        group = codec.unpack_group(body, tensors)
        status = self.buffer.put(group)
        if status in (PutStatus.ACCEPTED, PutStatus.FILTERED):
            self._failures_in_row = 0
        else:
            fields = {
                "sender": sender_name(identity),
                "lease": group.lease,
                "prompt": group.prompt,
                "status": status.value,
            }
            self._on_event("group_refused", fields)
        self._answer(identity, request, Status(status.value))

    def _ask_leases(self, waiting: _Waiting) -> None:
        if sum(other.identity == waiting.identity for other in self._lease_requests) >= LEASE_REQUESTS_PER_CLIENT:
            raise StreamRLError(f"{LEASE_REQUESTS_PER_CLIENT} requests for leases wait already; await them first")
        self._lease_requests.append(waiting)

    def _withdraw(self, identity: bytes, body: Withdraw) -> None:
        for waiting in self._lease_requests:
            if (waiting.identity, waiting.request) == (identity, body.request):
                self._lease_requests.remove(waiting)
                self._answer(identity, body.request, Leases([]))
                return

    def _fail(self, identity: bytes, request: int, body: FailRequest) -> None:
        lease = self.buffer.ledger.fail(body.lease)
        self._on_event(
            "lease_failed",
            {"sender": sender_name(identity), "lease": body.lease, "reason": body.reason, "traceback": body.traceback},
        )
        self._failures_in_row += 1
        limit = self.buffer.config.env.max_failures
        if self._failures_in_row >= limit:
            last = " ".join(body.reason.split())
            self._end(f"{self._failures_in_row} leases failed in a row (env.max_failures={limit}); last: {last}")
        self._answer(identity, request, Status("failed" if lease else PutStatus.LATE.value))

    # Batches ----------------------------------------------------------------------------------------------------------

    def _ask_batch(self, waiting: _Waiting) -> None:
        body: BatchRequest = waiting.body
        if body.rank >= body.ranks:
            raise StreamRLError(f"rank {body.rank} of {body.ranks} asked for a batch")
        planned = self._planned
        if planned is not None and (body.rank == 0 or body.step <= planned.step):
            if not planned.fits(body):
                raise StreamRLError(
                    f"rank {body.rank} of {body.ranks} asked for step {body.step} at version {body.version}, but step "
                    f"{planned.step} at version {planned.version} is handed out to {len(planned.parts)} ranks"
                )
            self._send_part(waiting, planned)
        else:
            self._batch_requests[body.rank] = waiting

    def _acknowledge(self, identity: bytes, request: int, body: AcknowledgeRequest) -> None:
        planned = self._planned
        if planned is not None and planned.step == body.step:
            if planned.version != body.version:
                raise StreamRLError(
                    f"step {body.step} was acknowledged at version {body.version}, but handed out at {planned.version}"
                )
            self._planned = None
        self.buffer.acknowledge(body.step)
        self._answer(identity, request, Status("consumed"))

    def _serve_batch(self) -> None:
        leader = self._batch_requests.get(0)
        if leader is None or self._planned is not None:
            return
        body: BatchRequest = leader.body
        parts = self.buffer.next_batch(body.step, body.version, body.ranks)
        if parts is None:
            return
        queue = {key: value for key, value in self.statistics().items() if key.startswith("queue/")}
        for part in parts:
            part.stats.update(queue)
        self._planned = _Planned(body.step, body.version, parts)
        requests, self._batch_requests = self._batch_requests, {}
        for waiting in requests.values():
            try:
                self._ask_batch(waiting)
            except StreamRLError as error:
                self._answer(waiting.identity, waiting.request, Refusal(str(error), malformed=False))

    def _send_part(self, waiting: _Waiting, planned: _Planned) -> None:
        body, tensors = codec.pack_batch(planned.parts[waiting.body.rank])
        self._answer(waiting.identity, waiting.request, body, tensors)

    # Leases -----------------------------------------------------------------------------------------------------------

    def _grant_leases(self) -> None:
        """Share what can be granted evenly over the waiting requests, first come first served."""
        while self._lease_requests and not self._draining and (grantable := self.buffer.grantable):
            waiting = self._lease_requests.popleft()
            share = -(-grantable // (len(self._lease_requests) + 1))
            holder = sender_name(waiting.identity)
            leases = self.buffer.lease(holder, min(waiting.body.count, share), self._clock.now())
            items = [LeaseItem(x.id, x.prompt, x.group_size, x.attempt, x.deadline_s) for x in leases]
            self._in_flight.set()
            if self._answer(waiting.identity, waiting.request, Leases(items)):
                self._tell("lease_reissued", [lease for lease in leases if lease.attempt], holder=holder)
            else:
                self._tell("lease_lost", self.buffer.ledger.lose([lease.id for lease in leases]), holder=holder)

    async def _watch_deadlines(self) -> None:
        """All leases have the same time, so a new one never comes due before those it joins."""
        while True:
            deadline = self.buffer.ledger.next_deadline
            if deadline is None:
                self._in_flight.clear()
                await self._in_flight.wait()
                continue
            await self._clock.sleep_until(deadline)
            self._tell("lease_expired", self.buffer.ledger.expire(self._clock.now()))
            self._pump()

    # Inside -----------------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Answer whoever can be answered now; batches first, because eviction frees credits."""
        if self._link is not None:
            self._serve_batch()
            self._grant_leases()
        if self.buffer.ledger.fatal:
            self._end(self.buffer.ledger.fatal)

    def _end(self, reason: str) -> None:
        if not self._fatal_told:
            self._fatal_told = True
            self._on_fatal(reason)

    def _tell(self, event: str, leases: Iterable[Lease], **fields: Any) -> None:
        for lease in leases:
            self._on_event(event, {"lease": lease.id, "prompt": lease.prompt, "attempt": lease.attempt, **fields})

    def _answer(self, identity: bytes, request: int, body: Body, tensors: Tensors | None = None) -> bool:
        assert self._link is not None
        return self._link.send(identity, codec.encode(body, request, self._clock.now(), tensors))
