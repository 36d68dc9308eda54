"""A group in the buffer, and what a delivery can come to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from streamrl.buffers.journal.writer import Position
from streamrl.buffers.wire.messages import GroupMeta, InArena, encoder
from streamrl.buffers.wire.payload import Payload
from streamrl.errors import WireError
from streamrl.types import Lease

BYTES_PER_TRAJECTORY = 1024
"""What the description of a trajectory takes in the buffer's process, generously."""


class PutStatus(StrEnum):
    """What became of a delivered group. In every case the buffer has taken responsibility: no retry is needed."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    """This lease was delivered before."""
    LATE = "late"
    """The lease had expired, failed or been taken away; its prompt is issued again."""
    UNKNOWN = "unknown"
    """No such lease was ever granted."""
    FILTERED = "filtered"
    """All rewards are equal and ``group.drop_zero_variance`` is on."""
    STALE = "stale"
    """Under ``on_stale: wait``: it holds tokens older than its lease allows, so its sampler missed a weight update."""


@dataclass(frozen=True, slots=True)
class Held:
    """A ready or handed-out group."""

    group: GroupMeta
    payload: Payload | None
    """None where it lies in a store or an arena."""
    reference: InArena | None
    position: Position | None
    """Where the journal has the payload."""
    priority: float
    oldest: int
    newest: int
    nbytes: int
    """What it takes in this process (or its store)."""

    @classmethod
    def of(
        cls,
        group: GroupMeta,
        payload: Payload | None,
        reference: InArena | None,
        position: Position | None,
        priority: float,
    ) -> Held:
        described = len(group.trajectories) * BYTES_PER_TRAJECTORY
        described += sum(len(encoder.encode(each.metadata)) for each in group.trajectories if each.metadata)
        nbytes = described + (0 if reference else group.nbytes)
        return cls(group, payload, reference, position, priority, group.oldest_version, group.newest_version, nbytes)


def check_delivery(group: GroupMeta, lease: Lease, max_length: int) -> None:
    """Raise ``WireError`` for a group that does not fit its lease."""
    where = f"group of lease {group.lease}"
    if group.prompt != lease.prompt:
        raise WireError(f"{where}: expected prompt {lease.prompt}, got {group.prompt}")
    if not group.trajectories:
        raise WireError(f"{where}: expected trajectories of 1 to {lease.group_size} episodes, got none")
    last = max(trajectory.episode for trajectory in group.trajectories)
    if last >= lease.group_size:
        raise WireError(f"{where}: expected episodes 0 to {lease.group_size - 1}, got {last}")
    longest = max(trajectory.length for trajectory in group.trajectories)
    if longest > max_length:
        raise WireError(
            f"{where}: expected at most model.max_length={max_length} tokens, got {longest}; "
            "raise model.max_length or end the episode earlier"
        )
    if not any(trajectory.spans for trajectory in group.trajectories):
        raise WireError(f"{where}: expected a sampled token in some trajectory, got none")
