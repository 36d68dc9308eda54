"""The TransferQueue's server: leases, groups and batches between rollouters, buffer and trainer ranks (C1–C4).

::

    QueueProducer (rollouter)          QueueServer (buffer actor)             QueueConsumer (trainer rank)
    lease(n) ─────────────────────────► waits until credits and bytes allow
    put(group) ───────────────────────► ReplayBuffer.put ─┐
    fail(lease) ──────────────────────► Ledger            ├─► waits until a batch ◄── next_batch(step, version)
    release(leases) ◄── those closed    deadline timer ───┘    is planned             acknowledge(step, version)
                                        frees credits ◄───────────────────────────── published(version)

The server is event-driven: each message, deadline and control call changes the buffer, then ``settled`` answers whoever
can be answered now. All of it is synchronous on one event loop; the tasks beside it sleep until the next deadline and
force the journal to the disk. Leases are served by ``lease_desk.py``, batches by ``batch_desk.py``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterable
from typing import Any

import numpy as np

from streamrl.buffers.held import PutStatus
from streamrl.buffers.journal.writer import Journal, JournalError
from streamrl.buffers.links.link_keys import LinkKeys
from streamrl.buffers.links.link_zmq import Context
from streamrl.buffers.queue.batch_desk import BatchDesk
from streamrl.buffers.queue.lease_desk import LeaseDesk
from streamrl.buffers.queue.message_server import Asker, MessageServer, OnEvent, OnFatal
from streamrl.buffers.queue.stores import StoreJanitor
from streamrl.buffers.replay_buffer import ReplayBuffer
from streamrl.buffers.wire import groups
from streamrl.buffers.wire.messages import (
    AcknowledgeRequest,
    BatchRequest,
    FailRequest,
    FetchRequest,
    Header,
    LeaseRequest,
    LostRequest,
    PublishedRequest,
    PutRequest,
    ReleaseRequest,
    ReserveRequest,
    ReturnRequest,
    Status,
    Withdraw,
)
from streamrl.buffers.wire.payload import Payload
from streamrl.clock import Clock
from streamrl.errors import ConfigError, EnvironmentFailed, WireError
from streamrl.types import Lease

LATENCIES_KEPT = 2048
"""Latest puts over which the latency quantiles are taken."""


class QueueServer(MessageServer):
    """Serves ``buffer`` at ``endpoint`` until ``run`` is cancelled.

    ``on_event(name, fields)`` gets ``malformed_frame``, ``request_refused``, ``group_refused`` (duplicate, late,
    unknown, stale), ``lease_failed``, ``lease_expired``, ``lease_lost``, ``lease_returned``, ``lease_evicted``,
    ``lease_reissued``, ``batch_reoffered``, ``payload_lost``, ``journal_failed``. ``on_fatal(error)`` is called once,
    when the run cannot go on: a prompt used up ``buffer.max_attempts``, ``env.max_failures`` leases failed in a row,
    the journal cannot be written, or the groups are too large for ``buffer.max_bytes``.
    """

    def __init__(
        self,
        endpoint: str,
        buffer: ReplayBuffer,
        clock: Clock,
        on_event: OnEvent,
        on_fatal: OnFatal,
        *,
        journal: Journal | None = None,
        janitor: StoreJanitor | None = None,
        context: Context | None = None,
        keys: LinkKeys | None = None,
    ) -> None:
        super().__init__(endpoint, clock, on_event, on_fatal, journal=journal, context=context, keys=keys)
        self.buffer = buffer
        self._janitor = janitor
        if janitor is not None:
            buffer.on_close = janitor.close_lease
        buffer.on_evict = lambda lease: self.tell("lease_evicted", [lease])
        self._leases = LeaseDesk(self)
        self._batches = BatchDesk(self)
        self._deadlines_changed = asyncio.Event()
        self._latencies: deque[float] = deque(maxlen=LATENCIES_KEPT)

    def tasks(self) -> Iterable[Coroutine[Any, Any, None]]:
        """Lease and batch deadlines; where there are stores, telling them of closed leases."""
        return [self._watch_deadlines()] + ([self._janitor.run()] if self._janitor is not None else [])

    # Control, called by the buffer actor ------------------------------------------------------------------------------

    def holder_lost(self, holder: str) -> int:
        """A rollouter died: its leases go back, its waiting requests are dropped. Call before its successor starts."""
        self._leases.forget(holder)
        lost: list[Lease] = []
        with self.told_of_journal_failure():
            lost = self.buffer.holder_lost(holder)
        self.tell("lease_lost", lost, holder=holder)
        self.settled()
        return len(lost)

    def consumer_lost(self) -> int:
        """The trainer group died: what it had not acknowledged is ready again, its waiting requests are dropped."""
        returned = 0
        with self.told_of_journal_failure():
            returned = self._batches.consumer_lost()
        self.settled()
        return returned

    @property
    def waiting_for_leases(self) -> int:
        """Requests for leases that wait for credits or bytes."""
        return self._leases.waiting

    @property
    def waiting_for_batch(self) -> list[int]:
        """Trainer ranks that wait for a batch."""
        return self._batches.waiting

    def statistics(self) -> dict[str, float]:
        """The ``queue/``, ``buffer/``, ``ledger/`` and ``journal/`` keys, now.

        ``queue/bytes`` is received since the start; latency is from a producer's send to the arrival here, over the
        latest puts, and compares monotonic clocks, so producers on another host are left out where it comes out
        negative.
        """
        return self.transport_statistics() | self.buffer.statistics()

    def transport_statistics(self) -> dict[str, float]:
        """The ``queue/`` and ``journal/`` keys alone."""
        p50, p99 = np.percentile(self._latencies, (50, 99)).tolist() if self._latencies else (0.0, 0.0)
        queue = {
            "queue/bytes": float(self.bytes),
            "queue/messages": float(self.messages),
            "queue/malformed": float(self.malformed),
            "queue/refused": float(self.refused),
            "queue/latency_p50_s": p50,
            "queue/latency_p99_s": p99,
        }
        return queue | (self.journal.statistics() if self.journal is not None else {})

    # Messages ---------------------------------------------------------------------------------------------------------

    def handle(self, asker: Asker, header: Header, payload: Payload) -> None:
        match body := header.body:
            case PutRequest():
                if (now := self.now) >= header.sent_s:
                    self._latencies.append(now - header.sent_s)
                self._put(asker, body, payload)
            case LeaseRequest():
                self._leases.ask(asker, body)
            case Withdraw():
                self._leases.withdraw(asker, body)
            case ReserveRequest():
                self._leases.reserve(asker, body)
            case ReleaseRequest():
                self._leases.ask_release(asker, body)
            case FailRequest():
                self._leases.fail(asker, body)
            case ReturnRequest():
                self._leases.take_back(asker, body)
            case BatchRequest():
                self._batches.ask(asker, body)
            case AcknowledgeRequest():
                self._batches.acknowledge(asker, body)
            case LostRequest():
                self._batches.lost(asker, body)
            case FetchRequest():
                self._batches.fetch(asker, body)
            case PublishedRequest():
                self.buffer.publish(body.version)
                self.answer(asker, Status("published"))
            case _:
                raise WireError(f"expected a request, got {type(body).__name__}, which is not one for a buffer")

    def _put(self, asker: Asker, body: PutRequest, payload: Payload) -> None:
        group = body.group
        by_value = body.reference is None and self.buffer.config.buffer.shards == 1
        if by_value:
            groups.check_group(group, payload)
        else:
            groups.check_description(group)
        if not by_value and payload.nbytes:
            raise WireError(f"group of lease {group.lease}: expected its payload elsewhere, got {payload.nbytes} bytes")
        status = self.buffer.put(group, payload if by_value else None, body.reference)
        if status in (PutStatus.ACCEPTED, PutStatus.FILTERED):
            self._leases.succeeded()
        else:
            self.refused += 1
            fields = {"sender": asker.name, "lease": group.lease, "prompt": group.prompt, "status": status.value}
            self.report("group_refused", fields)
        self.answer_when_synced(asker, Status(status.value))

    # Deadlines and the journal ----------------------------------------------------------------------------------------

    def deadline_changed(self) -> None:
        """There is a new first deadline."""
        self._deadlines_changed.set()

    async def _watch_deadlines(self) -> None:
        """Leases and the batch that is handed out; a sleep is cut short when an earlier deadline comes up."""
        while True:
            self._deadlines_changed.clear()
            both = (self.buffer.ledger.next_deadline, self._batches.deadline)
            # A run that ends decides nothing by time any more: what could not be journaled would be due for ever.
            deadlines = [when for when in both if when is not None and not self.ended]
            sleep = asyncio.ensure_future(self._clock.sleep_until(min(deadlines))) if deadlines else None
            changed = asyncio.ensure_future(self._deadlines_changed.wait())
            try:
                await asyncio.wait([sleep, changed] if sleep else [changed], return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()
                if sleep is not None:
                    sleep.cancel()
            with self.told_of_journal_failure():
                self.tell("lease_expired", self.buffer.expire(self.now))
                self._batches.expire(self.now)
            self.settled()

    # For the desks ----------------------------------------------------------------------------------------------------

    def tell(self, event: str, leases: Iterable[Lease], **fields: Any) -> None:
        """One event per lease."""
        for lease in leases:
            self.report(event, {"lease": lease.id, "prompt": lease.prompt, "attempt": lease.attempt, **fields})

    def recycle(self) -> None:
        """Let the journal delete the segments that nobody needs."""
        if self.journal is not None:
            self.journal.recycle(self.buffer.oldest_position)

    def settled(self) -> None:
        """Answer whoever can be answered now; batches first, because eviction frees credits."""
        try:
            if self._link is not None:
                self._batches.serve()
                self._leases.serve()
        except JournalError as error:
            self._journal_failed(error)
        except ConfigError as error:
            self.end(error)
        if self.buffer.ledger.fatal:
            self.end(EnvironmentFailed(self.buffer.ledger.fatal))
