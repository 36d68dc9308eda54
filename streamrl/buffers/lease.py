"""The life of one lease as data: its states, the moves between them, and what the ledger remembers of it."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct, field

from streamrl.steering import Headroom
from streamrl.types import Lease


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
    UNDELIVERED = "undelivered"
    """Whoever asked for the lease was gone before it was told."""


class Delivery(StrEnum):
    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    LATE = "late"
    UNKNOWN = "unknown"


BLAMED = frozenset({Refund.FAILED, Refund.EXPIRED, Refund.LOST})
"""Reasons that count towards ``max_attempts`` of a prompt."""

OUTSTANDING = (LeaseState.IN_FLIGHT, LeaseState.READY, LeaseState.HANDED_OUT)

MOVES: dict[LeaseState, frozenset[LeaseState]] = {
    LeaseState.IN_FLIGHT: frozenset({LeaseState.READY, LeaseState.REFUNDED}),
    LeaseState.READY: frozenset({LeaseState.HANDED_OUT, LeaseState.CONSUMED, LeaseState.REFUNDED}),
    LeaseState.HANDED_OUT: frozenset({LeaseState.CONSUMED, LeaseState.READY, LeaseState.REFUNDED}),
    LeaseState.CONSUMED: frozenset(),
    LeaseState.REFUNDED: frozenset(),
}


class Record(Struct):
    """One outstanding lease."""

    lease: Lease
    holder: str
    granted_version: int
    """Published version when it was granted: no token of its group is older."""
    expires_at: float
    losses: int
    """Earlier leases of the same prompt that failed, expired or were lost."""
    state: LeaseState = LeaseState.IN_FLIGHT
    epochs: int = 0
    """Acknowledged optimizer steps that trained on its group."""
    asked: str = ""
    """The request that the lease answered: when it comes again, the answer was lost."""


class Pending(Struct, frozen=True):
    """A prompt that waits to be issued again."""

    prompt: int
    attempt: int
    losses: int


class Tally(Struct):
    """A growing set of integers that is nearly contiguous from 0: a watermark and what lies above it."""

    watermark: int = 0
    above: set[int] = field(default_factory=set)

    def __contains__(self, number: int) -> bool:
        return number < self.watermark or number in self.above

    def add(self, number: int) -> bool:
        """False if ``number`` was in already."""
        if number in self:
            return False
        self.above.add(number)
        while self.watermark in self.above:
            self.above.remove(self.watermark)
            self.watermark += 1
        return True


class LedgerState(Struct):
    """Everything that a ledger must remember over the death of its process."""

    published: int = -1
    issued: int = 0
    consumed: int = 0
    reissued: int = 0
    duplicates_trained: int = 0
    headroom: Headroom = Headroom()
    """Of ``steering.py``."""
    forfeited: int = 0
    """Epochs that groups did not get because they grew too old after their first."""
    absent: int = 0
    """Groups that acknowledged steps did without, because their payload was gone."""
    last_step: int = -1
    """Newest acknowledged step."""
    cursor: int = 0
    """Next prompt that was never issued."""
    fatal: str = ""
    """Why the run cannot go on; empty while it can."""
    refunds: dict[Refund, int] = {}
    refused: dict[Delivery, int] = {}
    records: dict[int, Record] = {}
    """Outstanding leases by id, in the order in which they entered their state."""
    steps: dict[int, list[int]] = {}
    """Leases handed out and not acknowledged, by step."""
    dropped: dict[int, int] = {}
    """Number of groups that those steps have to do without."""
    reissue: list[Pending] = []
    done: Tally = field(default_factory=Tally)
    """Prompts that were trained or filtered."""
    closed: dict[int, bool] = {}
    """Of the latest closed leases, whether their group had arrived."""
