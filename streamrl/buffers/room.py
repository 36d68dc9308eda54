"""The byte side of back-pressure (C4): what is held, what leases promise, and how large the next promise is."""

from __future__ import annotations

from collections.abc import Iterable

from streamrl.buffers.held import BYTES_PER_TRAJECTORY
from streamrl.errors import ConfigError
from streamrl.schema import Config
from streamrl.types import Lease

BYTES_PER_TOKEN = 9
"""int32 token, bool sampled, float32 behaviour log-prob."""
FILL_BYTES = 3 * 64
"""Between the columns of a payload."""


class Room:
    """Held and promised bytes never exceed ``buffer.max_bytes``.

    A lease promises what a group takes at most without user columns. A group with larger columns reserves the rest
    before it is sent (``reserve``), and from then on every lease promises as much as the largest group seen.
    """

    def __init__(self, config: Config) -> None:
        self.limit = config.buffer.max_bytes
        self.held = 0
        self.promised = 0
        self._group = config.group
        self.by_lease: dict[int, int] = {}
        """Bytes promised to each lease in flight, its description included."""
        by_value = config.queue.backend == "zmq"  # else payloads stay with the rollouter, whose arena is bounded
        self.promise = config.group.size * config.model.max_length * BYTES_PER_TOKEN + FILL_BYTES if by_value else 0
        """Payload bytes that the next lease may carry."""
        self._overhead = config.group.size * BYTES_PER_TRAJECTORY
        """Of each group's description."""
        batch_bytes = (self.promise + self._overhead) * config.group.per_step
        if batch_bytes > self.limit:
            raise ConfigError(
                f"buffer.max_bytes={self.limit} may not hold one batch: group.per_step={config.group.per_step} groups "
                f"of group.size={config.group.size} × model.max_length={config.model.max_length} tokens take up to "
                f"{batch_bytes} bytes; set buffer.max_bytes={batch_bytes} or more"
            )

    @property
    def free(self) -> int:
        """Bytes that are neither held nor promised."""
        return max(0, self.limit - self.held - self.promised)

    @property
    def leases(self) -> int:
        """Leases for which there is room now."""
        return self.free // (self.promise + self._overhead)

    def promise_to(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            self.by_lease[lease.id] = lease.nbytes + self._overhead
            self.promised += lease.nbytes + self._overhead

    def settle(self, lease_id: int) -> None:
        """The lease is in flight no more: nothing is promised to it."""
        self.promised -= self.by_lease.pop(lease_id, 0)

    def promised_to(self, lease_id: int) -> int:
        """Payload bytes that the group of a lease in flight may take."""
        return self.by_lease[lease_id] - self._overhead

    def fits(self, lease_id: int, payload_bytes: int) -> bool:
        """Whether there is room now for a group whose payload takes more than its lease promised.

        Raises ``ConfigError`` where a batch of such groups could never be held.
        """
        nbytes = payload_bytes + self._overhead
        if nbytes * self._group.per_step > self.limit:
            batch_bytes = nbytes * self._group.per_step
            raise ConfigError(
                f"buffer.max_bytes={self.limit} cannot hold one batch: with its columns the group of lease {lease_id} "
                f"takes {nbytes} bytes, group.per_step={self._group.per_step} of them {batch_bytes}; "
                f"set buffer.max_bytes={batch_bytes} or more"
            )
        return nbytes - self.by_lease[lease_id] <= self.free

    def reserve(self, lease_id: int, payload_bytes: int) -> None:
        """Keep room for such a group, for which there is some."""
        more = max(0, payload_bytes + self._overhead - self.by_lease[lease_id])
        self.by_lease[lease_id] += more
        self.promised += more
        self.promise = max(self.promise, payload_bytes)

    def restore(self, promise: int, by_lease: dict[int, int]) -> None:
        """What was promised before the death of the process."""
        self.promise, self.by_lease, self.promised = promise, by_lease, sum(by_lease.values())
