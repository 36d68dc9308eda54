"""The ledger: who may generate which prompt until when, and what became of it (C1 pacing, C2 delivery).

Life of a lease::

    state       entered by                         left by
    IN_FLIGHT   grant                              deliver → READY; refund(FAILED | EXPIRED | LOST) → REFUNDED
    READY       deliver, hand_back, acknowledge    hand_out → HANDED_OUT;
                (while epochs are left)            refund(FILTERED | EVICTED | LOST) → REFUNDED, once trained CONSUMED
    HANDED_OUT  hand_out                           acknowledge → CONSUMED or READY; hand_back → READY;
                                                   refund(LOST) → REFUNDED, once trained CONSUMED
    CONSUMED    acknowledge of the last epoch, or  final
                refund of a group that was trained
    REFUNDED    any reason in ``Refund``           final; all reasons but FILTERED issue the prompt again, at the front

``issued = consumed + in_flight + ready + refunded`` (``ready`` includes handed-out ones) is asserted after every
operation. Everything is pure: time is an argument, nothing is sent. Records live only while a lease is outstanding, so
memory is bounded by pacing; lease ids only grow, so an id that is below the next one and not outstanding is closed for
good. ``snapshot`` and ``restore`` carry a ledger over the death of its process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from streamrl.buffers.lease import (
    BLAMED,
    MOVES,
    OUTSTANDING,
    Delivery,
    LeaseState,
    LedgerState,
    Pending,
    Record,
    Refund,
    Tally,
)
from streamrl.staleness import credits
from streamrl.steering import Headroom, admissible, steer
from streamrl.types import Lease

CLOSED_REMEMBERED = 1 << 14
"""Closed leases whose fate is kept, only to tell a duplicate from a late delivery; both are refused without it too."""


class Ledger:
    """See the module's table. ``now`` arguments are monotonic seconds and must not decrease."""

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_lag: int,
        group_size: int,
        lease_timeout_s: float,
        max_attempts: int,
        epochs_per_group: int = 1,
        target_ess: float = 0.0,
    ) -> None:
        self.groups_per_step = groups_per_step
        self.max_lag = max_lag
        self.group_size = group_size
        self.lease_timeout_s = lease_timeout_s
        self.max_attempts = max_attempts
        self.epochs_per_group = epochs_per_group
        self.target_ess = target_ess
        """0: pacing alone decides; else ``steering.py`` lowers its budget while the ESS is under this."""
        self.headroom = Headroom()
        self.published = -1
        self.issued = 0
        self.consumed = 0
        self.reissued = 0
        self.refunds: Counter[Refund] = Counter()
        self.refused: Counter[Delivery] = Counter()
        self.duplicates_trained = 0
        self.forfeited = 0
        self.absent = 0
        self.fatal = ""
        self.last_step = -1
        self.cursor = 0
        self.steps: dict[int, list[int]] = {}
        self.dropped: dict[int, int] = {}
        self.reissue: list[Pending] = []
        self.done = Tally()
        self.closed: dict[int, bool] = {}
        self._outstanding: dict[LeaseState, dict[int, Record]] = {state: {} for state in OUTSTANDING}

    def snapshot(self) -> LedgerState:
        """The state now; it shares containers with the ledger, so encode it at once."""
        return LedgerState(**{name: getattr(self, name) for name in LedgerState.__struct_fields__})

    def restore(self, state: LedgerState, now: float) -> None:
        """Take over the state of a ledger that died. Leases in flight get their whole time again, from ``now``."""
        for name in LedgerState.__struct_fields__:
            if name != "records":
                setattr(self, name, getattr(state, name))
        self.refunds, self.refused = Counter(state.refunds), Counter(state.refused)
        for lease_id in sorted(state.records):
            record = state.records[lease_id]
            self._outstanding[record.state][lease_id] = record
        self.renew(now)
        self._check()

    def renew(self, now: float) -> None:
        """Leases in flight get their whole time again: nobody could deliver while the ledger was away."""
        for record in self._outstanding[LeaseState.IN_FLIGHT].values():
            record.expires_at = now + self.lease_timeout_s

    # Numbers ----------------------------------------------------------------------------------------------------------

    @property
    def records(self) -> dict[int, Record]:
        """Every outstanding lease by id."""
        return {lease_id: record for records in self._outstanding.values() for lease_id, record in records.items()}

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
        """Leases that pacing allows now, and steering where it is on."""
        granted_net = self.issued - self.refunded
        paced = credits(
            granted_net, self.published, self.max_lag, self.groups_per_step, self.epochs_per_group, self._unused
        )
        if not self.target_ess:
            return paced
        steered = admissible(self.published, self.headroom, self.max_lag, self.groups_per_step) - granted_net
        return max(0, min(paced, steered))

    @property
    def _unused(self) -> int:
        """Epochs that groups gave up, less places in batches that no group took."""
        return self.forfeited - self.absent - sum(self.dropped.values())

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
        pending = {entry.prompt for entry in self.reissue}
        for records in self._outstanding.values():
            pending.update(record.lease.prompt for record in records.values())
        started = range(self.done.watermark, self.cursor)
        return sum(1 for prompt in started if prompt not in self.done and prompt not in pending)

    def granted_versions(self) -> list[int]:
        """Published version at the grant of each lease in flight."""
        return [record.granted_version for record in self._outstanding[LeaseState.IN_FLIGHT].values()]

    def judge(self, lease_id: int) -> Delivery:
        """What a delivery for this lease would be."""
        if lease_id in self._outstanding[LeaseState.IN_FLIGHT]:
            return Delivery.ACCEPTED
        if not 0 <= lease_id < self.issued:
            return Delivery.UNKNOWN
        if self.find(lease_id) or self.closed.get(lease_id, False):
            return Delivery.DUPLICATE
        return Delivery.LATE

    def is_in_flight(self, lease_id: int) -> bool:
        return lease_id in self._outstanding[LeaseState.IN_FLIGHT]

    def granted_to(self, asked: str) -> list[Lease]:
        """Leases in flight that answered this request."""
        return [record.lease for record in self._outstanding[LeaseState.IN_FLIGHT].values() if record.asked == asked]

    def find(self, lease_id: int) -> Record | None:
        """The record of an outstanding lease."""
        for records in self._outstanding.values():
            if lease_id in records:
                return records[lease_id]
        return None

    def statistics(self) -> dict[str, float]:
        """The ``ledger/`` keys, now; handed-out groups count in ``ledger/ready``."""
        names = ("issued", "consumed", "in_flight", "ready", "refunded", "reissued")
        return {f"ledger/{name}": float(getattr(self, name)) for name in names}

    def summary(self) -> dict[str, int]:
        """``groups`` of ``summary.json``; ``duplicates_trained`` and ``lost`` are 0 or the run is wrong."""
        names = ("issued", "consumed", "refunded", "reissued", "duplicates_trained", "lost")
        return {name: getattr(self, name) for name in names}

    # Operations -------------------------------------------------------------------------------------------------------

    def steer(self, ess: float, tokens: int) -> None:
        """An optimizer step measured this effective sample size over so many tokens."""
        if self.target_ess:
            self.headroom = steer(self.headroom, ess, self.target_ess, self.max_lag, self.groups_per_step, tokens)

    def publish(self, version: int) -> None:
        """Every live rollouter has committed ``version``: its credits are free. An older version changes nothing."""
        self.published = max(self.published, version)

    def grant(self, holder: str, count: int, now: float, nbytes: int = 0, asked: str = "") -> list[Lease]:
        """Up to ``count`` leases, prompts to be re-issued first; fewer, or none, when credits run out.

        ``nbytes`` is promised to each; ``asked`` names the request that they answer.
        """
        leases = [self._issue(holder, now, nbytes, asked) for _ in range(min(count, self.credits))]
        self._check()
        return leases

    def deliver(self, lease_id: int) -> Delivery:
        """The group of a lease arrived; only ``ACCEPTED`` makes it ready, everything else is counted and dropped."""
        outcome = self.judge(lease_id)
        if outcome is Delivery.ACCEPTED:
            self._move(lease_id, LeaseState.READY)
        else:
            self.refused[outcome] += 1
        self._check()
        return outcome

    def overdue(self, now: float) -> list[int]:
        """Leases in flight whose deadline has passed."""
        expired = []
        for lease_id, record in self._outstanding[LeaseState.IN_FLIGHT].items():
            if record.expires_at > now:
                break
            expired.append(lease_id)
        return expired

    def refund(self, lease_id: int, reason: Refund) -> Lease | None:
        """Give the credit back; queue the prompt again unless it was filtered. Sets ``fatal`` at ``max_attempts``.

        A group that was trained on is consumed instead, without its further epochs: ``None``.
        """
        if (record := self.find(lease_id)) is not None and record.epochs:
            self._consume(lease_id)
            self.forfeited += self.epochs_per_group - record.epochs
            self._check()
            return None
        arrived = not self.is_in_flight(lease_id) or reason is Refund.FILTERED
        record = self._move(lease_id, LeaseState.REFUNDED)
        self._close(lease_id, delivered=arrived)
        self.refunds[reason] += 1
        lease = record.lease
        if reason is Refund.FILTERED:
            self.done.add(lease.prompt)
        else:
            losses = record.losses + (reason in BLAMED)
            self.reissue.append(Pending(lease.prompt, lease.attempt + 1, losses))
            if reason in BLAMED and losses >= self.max_attempts:
                self.fatal = self.fatal or (
                    f"prompt {lease.prompt} failed, expired or was lost {losses} times "
                    f"(last: {reason} at {record.holder}); buffer.max_attempts={self.max_attempts}"
                )
        self._check()
        return lease

    def hand_out(self, step: int, lease_ids: Iterable[int]) -> None:
        """Ready groups go to the trainer as the batch of ``step``."""
        assert step not in self.steps, f"step {step} is handed out already"
        ids = list(lease_ids)
        for lease_id in ids:
            self._move(lease_id, LeaseState.HANDED_OUT)
        self.steps[step] = ids
        self._check()

    def hand_back(self, step: int) -> list[int]:
        """The consumer of ``step`` is gone before its acknowledgement: the groups are ready again.

        Only for a consumer that is known to be dead: a slow one may still train on the batch.
        """
        ids = self.steps.pop(step)
        self.dropped.pop(step, None)  # the step is yet to come, with a full batch
        for lease_id in ids:
            self._move(lease_id, LeaseState.READY)
        self._check()
        return ids

    def acknowledge(self, step: int) -> list[int]:
        """The optimizer step that used the batch is done: groups at their last epoch are consumed, their ids returned.

        The others are ready again.
        """
        consumed = []
        for lease_id in self.steps.pop(step):
            record = self.find(lease_id)
            assert record is not None, f"lease {lease_id} is not outstanding"
            record.epochs += 1
            if record.epochs < self.epochs_per_group:
                self._move(lease_id, LeaseState.READY)
            else:
                self._consume(lease_id)
                consumed.append(lease_id)
        self.absent += self.dropped.pop(step, 0)
        self.last_step = max(self.last_step, step)
        self._check()
        return consumed

    def drop_from_step(self, step: int, lease_ids: Sequence[int]) -> list[Lease]:
        """Groups of a handed-out step that nobody can read: refunded as lost; the step goes on without them.

        Their places in the batch stay taken, or each would let one more group than the bound allows be outstanding.
        """
        self.steps[step] = [lease_id for lease_id in self.steps[step] if lease_id not in lease_ids]
        refunded = []
        for lease_id in lease_ids:
            self.dropped[step] = self.dropped.get(step, 0) + 1
            refunded.append(self.refund(lease_id, Refund.LOST))
        return [lease for lease in refunded if lease is not None]

    # Inside -----------------------------------------------------------------------------------------------------------

    def _consume(self, lease_id: int) -> Record:
        record = self._move(lease_id, LeaseState.CONSUMED)
        self._close(lease_id, delivered=True)
        self.consumed += 1
        self.duplicates_trained += not self.done.add(record.lease.prompt)
        return record

    def _issue(self, holder: str, now: float, nbytes: int, asked: str) -> Lease:
        if self.reissue:
            pending = self.reissue.pop(0)
            self.reissued += 1
        else:
            pending = Pending(self.cursor, 0, 0)
            self.cursor += 1
        lease = Lease(self.issued, pending.prompt, self.group_size, pending.attempt, self.lease_timeout_s, nbytes)
        record = Record(lease, holder, self.published, now + self.lease_timeout_s, pending.losses, asked=asked)
        self._outstanding[LeaseState.IN_FLIGHT][lease.id] = record
        self.issued += 1
        return lease

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
        self.closed[lease_id] = delivered
        if len(self.closed) > CLOSED_REMEMBERED:
            del self.closed[next(iter(self.closed))]

    def _check(self) -> None:
        assert self.issued == self.consumed + self.in_flight + self.ready + self.refunded, "ledger invariant (C1)"
        budget = (self.published + self.max_lag + 1) * self.groups_per_step + self._unused
        assert (self.issued - self.refunded) * self.epochs_per_group <= budget or not self.issued, "pacing (C1)"
