"""What the journal says: one record per change of the replay buffer, and the snapshot that stands for all before it.

Replaying the records through ``ReplayBuffer.restore`` gives the buffer that wrote them, because the buffer is a pure
function of them. ``streamrl replay`` reads the same records to train again in the recorded order.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import Struct

from streamrl.buffers.journal.writer import Position
from streamrl.buffers.lease import LedgerState, Refund
from streamrl.buffers.wire.messages import GroupMeta, InArena
from streamrl.buffers.wire.payload import Payload


class Granted(Struct, tag="granted", array_like=True):
    holder: str
    count: int
    nbytes: int
    """Promised to each lease."""
    asked: str
    """Client and number of the request, by which it is known when it comes again."""


class Reserved(Struct, tag="reserved", array_like=True):
    """A group takes more bytes than its lease promised."""

    lease: int
    nbytes: int


class Arrived(Struct, tag="arrived", array_like=True):
    """A group was taken; its payload is the record's, unless it lies in a store or an arena."""

    group: GroupMeta
    reference: InArena | None
    priority: float


class Refunded(Struct, tag="refunded", array_like=True):
    """Leases in flight or ready that came to nothing, or are trained on no further."""

    leases: list[int]
    reason: Refund


class HandedOut(Struct, tag="handed_out", array_like=True):
    step: int
    version: int
    ranks: int
    leases: list[int]


class HandedBack(Struct, tag="handed_back", array_like=True):
    step: int


class Dropped(Struct, tag="dropped", array_like=True):
    """Groups of a handed-out step whose payload was gone: the step was trained without them."""

    step: int
    leases: list[int]


class Acknowledged(Struct, tag="acknowledged", array_like=True):
    step: int
    durable: int
    """Newest step that no restart of the trainer goes behind."""
    ess: float = 0.0
    """Effective sample size of the step, over ``tokens`` trained tokens."""
    tokens: int = 0


class Published(Struct, tag="published", array_like=True):
    version: int


class HeldGroup(Struct, array_like=True):
    """A ready or handed-out group in a snapshot."""

    group: GroupMeta
    reference: InArena | None
    position: Position | None
    """Of the record with its payload."""
    priority: float


class Snapshot(Struct, tag="snapshot", array_like=True):
    ledger: LedgerState
    held: list[HeldGroup]
    offers: int
    """Hand-outs so far."""
    spent: list[tuple[int, Position]]
    """Step and record of consumed groups that the trainer may yet go behind."""
    promise: int
    """Payload bytes that the next lease may carry."""
    promised: dict[int, int]
    """Bytes promised to each lease in flight."""
    offered: HandedOut | None = None
    """The hand-out that waits for its acknowledgement."""
    dropped: list[GroupMeta] = []
    """Groups that were dropped from it: its weights count them still."""


Record = (
    Granted | Reserved | Arrived | Refunded | HandedOut | HandedBack | Dropped | Acknowledged | Published | Snapshot
)

WriteDown = Callable[[Record, Payload | None], Position | None]
"""Journals a change; raises where it cannot, and the change does not happen."""

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Record).decode
