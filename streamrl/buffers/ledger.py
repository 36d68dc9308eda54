"""The ledger: who may generate which prompt until when, and what became of it (C1 pacing, C2 delivery).

Life of a lease::

    state       entered by                         left by
    IN_FLIGHT   grant                              deliver → READY; fail, expire, holder_lost → REFUNDED
    READY       deliver, hand_back                 hand_out → HANDED_OUT; refund(FILTERED | EVICTED) → REFUNDED
    HANDED_OUT  hand_out                           acknowledge → CONSUMED; hand_back → READY
    CONSUMED    acknowledge (the optimizer step)   final
    REFUNDED    any reason in ``Refund``           final; all reasons but FILTERED issue the prompt again, at the front

``issued = consumed + in_flight + ready + refunded`` (``ready`` includes handed-out ones) is asserted after every
operation. Everything is pure: time is an argument, nothing is sent. Records live only while a lease is outstanding, so
memory is bounded by pacing; lease ids only grow, so an id that is below the next one and not outstanding is closed for
good.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from streamrl.staleness import credits
from streamrl.types import Lease

CLOSED_REMEMBERED = 1 << 14
"""Closed leases whose fate is kept, only to tell a duplicate from a late delivery; both are refused without it too."""


class LeaseState(StrEnum):
    IN_FLIGHT = "in_flight"
    READY = "ready"
    HANDED_OUT = "handed_out"
    CONSUMED = "consumed"
    REFUNDED = "refunded"


class Refund(StrEnum):
    FAILED = "failed"
    EXPIRED = "expired"
    LOST = "lost"
    FILTERED = "filtered"
    EVICTED = "evicted"


class Delivery(StrEnum):
    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    LATE = "late"
    UNKNOWN = "unknown"


BLAMED = frozenset({Refund.FAILED, Refund.EXPIRED, Refund.LOST})
"""Reasons that count towards ``max_attempts`` of a prompt."""

MOVES: dict[LeaseState, frozenset[LeaseState]] = {
    LeaseState.IN_FLIGHT: frozenset({LeaseState.READY, LeaseState.REFUNDED}),
    LeaseState.READY: frozenset({LeaseState.HANDED_OUT, LeaseState.REFUNDED}),
    LeaseState.HANDED_OUT: frozenset({LeaseState.CONSUMED, LeaseState.READY}),
    LeaseState.CONSUMED: frozenset(),
    LeaseState.REFUNDED: frozenset(),
}


@dataclass(slots=True)
class Record:
    """One outstanding lease."""

    lease: Lease
    holder: str
    granted_version: int
    """Published version when it was granted: no token of its group is older."""
    expires_at: float
    losses: int
    """Earlier leases of the same prompt that failed, expired or were lost."""
    state: LeaseState = LeaseState.IN_FLIGHT


@dataclass(frozen=True, slots=True)
class _Pending:
    """A prompt that waits to be issued again."""

    prompt: int
    attempt: int
    losses: int


class _Tally:
    """A growing set of integers that is nearly contiguous from 0: a watermark and what lies above it."""

    def __init__(self) -> None:
        self.watermark = 0
        self._above: set[int] = set()

    def __contains__(self, number: int) -> bool:
        return number < self.watermark or number in self._above

    def add(self, number: int) -> bool:
        """False if ``number`` was in already."""
        if number in self:
            return False
        self._above.add(number)
        while self.watermark in self._above:
            self._above.remove(self.watermark)
            self.watermark += 1
        return True


class Ledger:
    """See the module's table. ``now`` arguments are monotonic seconds and must not decrease."""

    def __init__(
        self, *, groups_per_step: int, max_lag: int, group_size: int, lease_timeout_s: float, max_attempts: int
    ) -> None:
        self.groups_per_step = groups_per_step
        self.max_lag = max_lag
        self.group_size = group_size
        self.lease_timeout_s = lease_timeout_s
        self.max_attempts = max_attempts
        self.published = -1
        self.issued = 0
        self.consumed = 0
        self.reissued = 0
        self.refunds: Counter[Refund] = Counter()
        self.refused: Counter[Delivery] = Counter()
        self.duplicates_trained = 0
        self.fatal = ""
        """Why the run cannot go on; empty while it can."""
        self._outstanding: dict[LeaseState, dict[int, Record]] = {
            state: {} for state in (LeaseState.IN_FLIGHT, LeaseState.READY, LeaseState.HANDED_OUT)
        }
        self._steps: dict[int, list[int]] = {}
        self._last_step = -1
        self._reissue: deque[_Pending] = deque()
        self._cursor = 0
        self._done = _Tally()
        self._closed: OrderedDict[int, bool] = OrderedDict()

    # Numbers ----------------------------------------------------------------------------------------------------------

    @property
    def refunded(self) -> int:
        return self.refunds.total()

    @property
    def in_flight(self) -> int:
        return len(self._outstanding[LeaseState.IN_FLIGHT])

    @property
    def ready(self) -> int:
        """Delivered and not yet consumed, handed-out ones included."""
        return len(self._outstanding[LeaseState.READY]) + len(self._outstanding[LeaseState.HANDED_OUT])

    @property
    def credits(self) -> int:
        """Leases that pacing allows now."""
        return credits(self.issued - self.refunded, self.published, self.max_lag, self.groups_per_step)

    @property
    def next_deadline(self) -> float | None:
        """When the first lease in flight expires. All have the same time, so the oldest is the first."""
        for record in self._outstanding[LeaseState.IN_FLIGHT].values():
            return record.expires_at
        return None

    @property
    def lost(self) -> int:
        """Prompts that were started and are neither done (trained or filtered) nor pending. 0, or the ledger leaks.

        Counted from the prompts alone, not from the states and counters of leases.
        """
        pending = {entry.prompt for entry in self._reissue}
        for records in self._outstanding.values():
            pending.update(record.lease.prompt for record in records.values())
        started = range(self._done.watermark, self._cursor)
        return sum(1 for prompt in started if prompt not in self._done and prompt not in pending)

    def granted_versions(self) -> list[int]:
        """Published version at the grant of each lease in flight."""
        return [record.granted_version for record in self._outstanding[LeaseState.IN_FLIGHT].values()]

    def find(self, lease_id: int) -> Record | None:
        """The record of an outstanding lease."""
        for records in self._outstanding.values():
            if lease_id in records:
                return records[lease_id]
        return None

    # Operations -------------------------------------------------------------------------------------------------------

    def publish(self, version: int) -> None:
        """Every live rollouter has committed ``version``: its credits are free. An older version changes nothing."""
        self.published = max(self.published, version)

    def grant(self, holder: str, count: int, now: float) -> list[Lease]:
        """Up to ``count`` leases, prompts to be re-issued first; fewer, or none, when credits run out."""
        leases = [self._issue(holder, now) for _ in range(min(count, self.credits))]
        self._check()
        return leases

    def deliver(self, lease_id: int) -> Delivery:
        """The group of a lease arrived; only ``ACCEPTED`` makes it ready, everything else is counted and dropped."""
        outcome = self._judge(lease_id)
        if outcome is Delivery.ACCEPTED:
            self._move(lease_id, LeaseState.READY)
        else:
            self.refused[outcome] += 1
        self._check()
        return outcome

    def fail(self, lease_id: int) -> Lease | None:
        """The holder gave up; ``None`` when the lease is not in flight (any more)."""
        if lease_id not in self._outstanding[LeaseState.IN_FLIGHT]:
            return None
        return self.refund(lease_id, Refund.FAILED)

    def expire(self, now: float) -> list[Lease]:
        """Refund every lease in flight whose deadline has passed."""
        expired = []
        for lease_id, record in self._outstanding[LeaseState.IN_FLIGHT].items():
            if record.expires_at > now:
                break
            expired.append(lease_id)
        return [self.refund(lease_id, Refund.EXPIRED) for lease_id in expired]

    def holder_lost(self, holder: str) -> list[Lease]:
        """Refund every lease in flight of a holder that died."""
        in_flight = self._outstanding[LeaseState.IN_FLIGHT]
        return self.lose([lease_id for lease_id, record in in_flight.items() if record.holder == holder])

    def lose(self, lease_ids: Iterable[int]) -> list[Lease]:
        """Refund leases in flight that their holder can no longer deliver."""
        return [self.refund(lease_id, Refund.LOST) for lease_id in lease_ids]

    def refund(self, lease_id: int, reason: Refund) -> Lease:
        """Give the credit back; queue the prompt again unless it was filtered. Sets ``fatal`` at ``max_attempts``."""
        record = self._move(lease_id, LeaseState.REFUNDED)
        self._close(lease_id, delivered=reason in (Refund.FILTERED, Refund.EVICTED))
        self.refunds[reason] += 1
        lease = record.lease
        if reason is Refund.FILTERED:
            self._done.add(lease.prompt)
        else:
            losses = record.losses + (reason in BLAMED)
            self._reissue.append(_Pending(lease.prompt, lease.attempt + 1, losses))
            if reason in BLAMED and losses >= self.max_attempts:
                self.fatal = self.fatal or (
                    f"prompt {lease.prompt} failed, expired or was lost {losses} times "
                    f"(last: {reason} at {record.holder}); buffer.max_attempts={self.max_attempts}"
                )
        self._check()
        return lease

    def hand_out(self, step: int, lease_ids: Iterable[int]) -> None:
        """Ready groups go to the trainer as the batch of ``step``."""
        assert step not in self._steps, f"step {step} is handed out already"
        ids = list(lease_ids)
        for lease_id in ids:
            self._move(lease_id, LeaseState.HANDED_OUT)
        self._steps[step] = ids
        self._check()

    def hand_back(self, step: int) -> list[int]:
        """The consumer of ``step`` is gone before its acknowledgement: the groups are ready again.

        Only for a consumer that is known to be dead: a slow one may still train on the batch.
        """
        ids = self._steps.pop(step)
        for lease_id in ids:
            self._move(lease_id, LeaseState.READY)
        self._check()
        return ids

    def acknowledge(self, step: int) -> list[int]:
        """The optimizer step that used the batch is done: its groups are consumed. Again: nothing happens, ``[]``.

        Raises ``KeyError`` for a step that was never handed out.
        """
        if step not in self._steps:
            if step <= self._last_step:
                return []
            raise KeyError(f"step {step} was acknowledged but never handed out")
        ids = self._steps.pop(step)
        for lease_id in ids:
            record = self._move(lease_id, LeaseState.CONSUMED)
            self._close(lease_id, delivered=True)
            self.consumed += 1
            self.duplicates_trained += not self._done.add(record.lease.prompt)
        self._last_step = max(self._last_step, step)
        self._check()
        return ids

    # Inside -----------------------------------------------------------------------------------------------------------

    def _issue(self, holder: str, now: float) -> Lease:
        if self._reissue:
            pending = self._reissue.popleft()
            self.reissued += 1
        else:
            pending = _Pending(self._cursor, 0, 0)
            self._cursor += 1
        lease = Lease(self.issued, pending.prompt, self.group_size, pending.attempt, self.lease_timeout_s)
        record = Record(lease, holder, self.published, now + self.lease_timeout_s, pending.losses)
        self._outstanding[LeaseState.IN_FLIGHT][lease.id] = record
        self.issued += 1
        return lease

    def _judge(self, lease_id: int) -> Delivery:
        if lease_id in self._outstanding[LeaseState.IN_FLIGHT]:
            return Delivery.ACCEPTED
        if not 0 <= lease_id < self.issued:
            return Delivery.UNKNOWN
        if self.find(lease_id) or self._closed.get(lease_id, False):
            return Delivery.DUPLICATE
        return Delivery.LATE

    def _move(self, lease_id: int, target: LeaseState) -> Record:
        record = self.find(lease_id)
        assert record is not None, f"lease {lease_id} is not outstanding"
        assert target in MOVES[record.state], f"lease {lease_id}: {record.state} → {target} is not in the table"
        del self._outstanding[record.state][lease_id]
        record.state = target
        if target in self._outstanding:
            self._outstanding[target][lease_id] = record
        return record

    def _close(self, lease_id: int, delivered: bool) -> None:
        self._closed[lease_id] = delivered
        if len(self._closed) > CLOSED_REMEMBERED:
            self._closed.popitem(last=False)

    def _check(self) -> None:
        assert self.issued == self.consumed + self.in_flight + self.ready + self.refunded, "ledger invariant (C1)"
        assert (
            self.issued - self.refunded <= (self.published + self.max_lag + 1) * self.groups_per_step or not self.issued
        )
