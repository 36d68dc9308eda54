"""The training steps of a run, read back from its journal: same groups, same order, same plan (``buffer.keep: all``).

Only reads, also beside a live writer. A plan is a pure function of the groups in their order, the trainer's version and
the number of ranks (``offer.py``), and payloads lie in the journal, so that a rank gets the very micro-batches that it
trained on. What was handed out and not acknowledged was never trained, and is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from streamrl import staleness
from streamrl.buffers import records
from streamrl.buffers.journal.writer import Position, read_journal
from streamrl.buffers.offer import Planner
from streamrl.buffers.step_statistics import StepStatistics, lag_statistics
from streamrl.buffers.wire.groups import unpack_part
from streamrl.buffers.wire.messages import GroupMeta
from streamrl.buffers.wire.payload import Payload
from streamrl.errors import JournalError
from streamrl.types import RankBatch


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One acknowledged step, and what was handed out for it."""

    step: int
    version: int
    """Of the trainer while it consumed the batch."""
    ranks: int
    groups: list[GroupMeta]
    """In the order in which they were planned."""
    payloads: dict[int, Payload]
    """By lease. Those of dropped groups are missing: the step was trained without them, its weights count them."""
    stats: dict[str, float]
    """The ``reward/`` and ``length/`` keys, over the groups that arrived since the hand-out before."""


def recorded_steps(folder: Path, epochs: int) -> Iterator[RecordedStep]:
    """Every acknowledged step from the first on; ``epochs`` is ``buffer.epochs_per_group``.

    Memory holds the groups that were live in the buffer, as views of the journal's files. Raises ``JournalError`` where
    nothing was journaled or the first segments are missing, and at damage once the steps before it were given.
    """
    held: dict[int, tuple[GroupMeta, Payload]] = {}
    trained: Counter[int] = Counter()
    statistics = StepStatistics()
    offered: records.HandedOut | None = None
    dropped: set[int] = set()
    stats: dict[str, float] = {}
    done = 0
    for position, body, payload in read_journal(folder):
        over: set[int] = set()
        match record := _decode(folder, position, body):
            case records.Arrived():
                held[record.group.lease] = (record.group, Payload([payload]))
                statistics.add(record.group)
            case records.Refunded():
                over = set(record.leases)
            case records.HandedOut():
                offered, dropped = record, set()
                stats = statistics.take(held[lease][0] for lease in record.leases)
            case records.Dropped():
                dropped |= set(record.leases)
            case records.HandedBack():
                over = dropped
            case records.Acknowledged():
                done += 1
                if offered is None or record.step != offered.step or record.step != done:
                    raise JournalError(
                        f"{folder}: expected the acknowledgement of step {done}, got that of step {record.step}; "
                        "only a history without gaps can be replayed"
                    )
                groups = [held[lease][0] for lease in offered.leases]
                payloads = {lease: held[lease][1] for lease in offered.leases if lease not in dropped}
                yield RecordedStep(record.step, offered.version, offered.ranks, groups, payloads, stats)
                trained.update(payloads.keys())
                over = dropped | {lease for lease in payloads if trained[lease] == epochs}
                offered, dropped = None, set()
        for lease in over:
            held.pop(lease, None)
            trained.pop(lease, None)


def rank_batch(
    recorded: RecordedStep, planner: Planner, rank: int, max_lag: int, columns: Collection[str] = ()
) -> RankBatch:
    """What ``rank`` trained on in that step, where ``planner`` has the run's settings; of the user's columns those
    named."""
    described = {group.lease: group for group in recorded.groups}

    parts = planner.parts(recorded.groups, recorded.version, recorded.ranks)[rank]
    micro_batches = [
        [
            unpack_part(part, described[part.lease], recorded.payloads[part.lease], columns)
            for part in some
            if part.lease in recorded.payloads
        ]
        for some in parts
    ]
    stats = recorded.stats | lag_statistics(recorded.groups, recorded.version, max_lag)
    oldest_allowed = staleness.oldest_allowed(recorded.version, max_lag)
    return RankBatch(recorded.step, recorded.version, oldest_allowed, micro_batches, stats)


def count_steps(folder: Path, epochs: int) -> tuple[int, JournalError | None]:
    """Number of acknowledged steps, and the damage behind them that ends the history early, if there is any."""
    count = 0
    try:
        for _ in recorded_steps(folder, epochs):
            count += 1
    except JournalError as error:
        return count, error
    return count, None


def _decode(folder: Path, position: Position, body: bytes) -> records.Record:
    try:
        return records.decode(body)
    except msgspec.DecodeError as error:  # ValidationError included
        raise JournalError(
            f"{folder}: the record at {position.offset} of segment {position.segment} is not one that this version "
            f"reads: {error}; use the streamrl that wrote it"
        ) from None
