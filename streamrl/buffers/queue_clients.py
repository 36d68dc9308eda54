"""The two ends of the transfer queue outside the buffer: producers (rollouters) and consumers (trainer ranks).

No call has a time limit of its own: each is ended by its answer, by cancellation, or by ``close``, which raises
``StreamRLError`` in every waiter. Calls may overlap. A refused request raises ``StreamRLError``, a malformed one
``WireError``.
"""

from __future__ import annotations

import zmq.asyncio

from streamrl.buffers import codec
from streamrl.buffers.link_zmq import ClientLink
from streamrl.buffers.messages import (
    TRACEBACK_CHARACTERS,
    AcknowledgeRequest,
    Batch,
    BatchRequest,
    Body,
    FailRequest,
    LeaseRequest,
    Leases,
    PublishedRequest,
    Status,
)
from streamrl.clock import Clock, RealClock
from streamrl.errors import WireError
from streamrl.types import Group, Lease, RankBatch


def _leases(body: Leases) -> list[Lease]:
    return [Lease(item.id, item.prompt, item.group_size, item.attempt, item.deadline_s) for item in body.leases]


def _status(body: Body) -> str:
    if not isinstance(body, Status):
        raise WireError(f"expected a status, got {type(body).__name__}")
    return body.status


class QueueProducer:
    """What a rollouter talks to. ``name`` is the holder of its leases: the actor's name."""

    def __init__(
        self, endpoint: str, name: str, *, clock: Clock | None = None, context: zmq.asyncio.Context | None = None
    ) -> None:
        self._spare: list[Lease] = []
        self._link = ClientLink(endpoint, name, (clock or RealClock()).now, context, self._keep)

    def _keep(self, body: Body) -> None:
        """Leases that were granted while their waiter was being cancelled: the next ``lease`` returns them."""
        if isinstance(body, Leases):
            self._spare += _leases(body)

    async def lease(self, count: int) -> list[Lease]:
        """1 to ``count`` leases, as soon as credits and the byte limit allow at least one."""
        while not self._spare:
            header, _ = await self._link.request(LeaseRequest(count), what=f"{count} leases")
            if not isinstance(header.body, Leases):
                raise WireError(f"expected leases, got {type(header.body).__name__}")
            self._spare += _leases(header.body)
        leases, self._spare = self._spare[:count], self._spare[count:]
        return leases

    async def put(self, group: Group) -> str:
        """Deliver a group; returns a ``PutStatus`` once the buffer has taken responsibility for it.

        Raises ``WireError`` when the group breaks the schema or does not fit its lease, which then stays in flight:
        ``fail`` it.
        """
        body, tensors = codec.pack_group(group)
        header, _ = await self._link.request(body, tensors, what=f"put of lease {group.lease}")
        return _status(header.body)

    async def fail(self, lease_id: int, reason: str, traceback: str) -> str:
        """Give a lease back that cannot be fulfilled: ``failed``, or ``late`` when it was not in flight any more."""
        body = FailRequest(lease_id, reason[-TRACEBACK_CHARACTERS:], traceback[-TRACEBACK_CHARACTERS:])
        header, _ = await self._link.request(body, what=f"failure of lease {lease_id}")
        return _status(header.body)

    def close(self) -> None:
        self._link.close()


class QueueConsumer:
    """What one trainer rank talks to. Rank 0 leads: its step and version decide, others must ask for the same."""

    def __init__(
        self,
        endpoint: str,
        rank: int,
        ranks: int,
        *,
        clock: Clock | None = None,
        context: zmq.asyncio.Context | None = None,
    ) -> None:
        self._rank = rank
        self._ranks = ranks
        self._link = ClientLink(endpoint, f"trainer-{rank}", (clock or RealClock()).now, context)

    async def next_batch(self, step: int, version: int) -> RankBatch:
        """This rank's part of the batch of ``step`` for a trainer at ``version``, as soon as it is planned.

        Asking again before the acknowledgement returns the same part.
        """
        body = BatchRequest(self._rank, self._ranks, step, version)
        header, tensors = await self._link.request(body, what=f"the batch of step {step}")
        if not isinstance(header.body, Batch):
            raise WireError(f"expected a batch, got {type(header.body).__name__}")
        return codec.unpack_batch(header.body, tensors)

    async def acknowledge(self, step: int, version: int) -> None:
        """Rank 0, after the optimizer step: the groups are consumed. ``version`` is the one of ``next_batch``."""
        await self._link.request(AcknowledgeRequest(step, version), what=f"acknowledgement of step {step}")

    async def published(self, version: int) -> None:
        """Rank 0: every live rollouter has committed ``version``. Frees pacing credits."""
        await self._link.request(PublishedRequest(version), what=f"publication of version {version}")

    def close(self) -> None:
        self._link.close()
