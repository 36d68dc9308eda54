"""The two ends of the TransferQueue outside the buffer: producers (rollouters) and consumers (trainer ranks).

No call has a time limit of its own: each is ended by its answer, by cancellation, or by ``close``, which raises
``StreamRLError`` in every waiter. Calls may overlap. A refused request raises ``StreamRLError``, a malformed one
``WireError``. A buffer that dies and comes back is not noticed but for the time it takes.
"""

from __future__ import annotations

from collections.abc import Collection

from streamrl.buffers.links.link_keys import LinkKeys
from streamrl.buffers.links.link_zmq import ClientLink, Context
from streamrl.buffers.queue.places import Place, Source
from streamrl.buffers.wire.fields import TRACEBACK_CHARACTERS
from streamrl.buffers.wire.groups import STANDARD, pack_group, unpack_part
from streamrl.buffers.wire.messages import (
    AcknowledgeRequest,
    Batch,
    BatchRequest,
    Body,
    FailRequest,
    Fetched,
    FetchRequest,
    GroupMeta,
    LeaseRequest,
    Leases,
    LostRequest,
    PublishedRequest,
    PutRequest,
    ReserveRequest,
    ReturnRequest,
    Status,
)
from streamrl.buffers.wire.payload import Payload, Row, unpack_columns
from streamrl.clock import Clock, RealClock
from streamrl.errors import WireError
from streamrl.types import Group, Lease, RankBatch

LEASES_REMEMBERED = 1 << 14
"""Whose promise is kept: far more than a rollouter has at once."""


def _leases(body: Leases) -> list[Lease]:
    return [Lease(x.id, x.prompt, x.group_size, x.attempt, x.deadline_s, x.nbytes) for x in body.leases]


def _status(body: Body) -> str:
    if not isinstance(body, Status):
        raise WireError(f"expected a status, got {type(body).__name__}")
    return body.status


class QueueProducer:
    """What a rollouter talks to. ``name`` is the holder of its leases: the actor's name.

    ``place``: where payloads go when they do not travel with their group; closed with the producer.
    """

    def __init__(
        self,
        endpoint: str,
        name: str,
        *,
        clock: Clock | None = None,
        context: Context | None = None,
        keys: LinkKeys | None = None,
        checksum: bool = False,
        place: Place | None = None,
    ) -> None:
        self._spare: list[Lease] = []
        self._promised: dict[int, int] = {}
        """Payload bytes that the leases held here may carry."""
        self._place = place
        self._link = ClientLink(
            endpoint, name, (clock or RealClock()).now,
            context=context, unclaimed=self._keep, keys=keys, checksum=checksum,
        )  # fmt: skip
        if place is not None:
            place.attach(self._link)

    def statistics(self) -> dict[str, float]:
        """The ``queue/`` keys of this end, and those of its place, since it was made."""
        own = {"queue/resent": float(self._link.resent), "queue/reconnects": float(self._link.reconnects)}
        return own | (self._place.statistics() if self._place is not None else {})

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
        self._promised.update((lease.id, lease.nbytes) for lease in leases)
        while len(self._promised) > LEASES_REMEMBERED:  # those that timed out here are neither put nor failed
            del self._promised[next(iter(self._promised))]
        return leases

    async def put(self, group: Group) -> str:
        """Deliver a group; returns a ``PutStatus`` once the buffer has taken responsibility for it.

        Waits for room where its columns make it larger than its lease promised. The group's arrays must not be written
        to before it returns. Raises ``WireError`` when the group breaks the schema or does not fit its lease, which
        then stays in flight: ``fail`` it.
        """
        meta, payload = pack_group(group)
        what = f"put of lease {group.lease}"
        if 0 < self._promised.pop(group.lease, 0) < payload.nbytes:  # 0: the payload does not go to the buffer
            await self._link.request(ReserveRequest(group.lease, payload.nbytes), what=f"room for the {what}")
        if self._place is None:
            header, _ = await self._link.request(PutRequest(meta), payload, what=what)
        else:
            reference = await self._place.write(meta, payload)
            header, _ = await self._link.request(PutRequest(meta, reference), what=what)
        return _status(header.body)

    async def fail(self, lease_id: int, reason: str, traceback: str) -> str:
        """Give a lease back that cannot be fulfilled: ``failed``, or ``late`` when it was not in flight any more."""
        self._promised.pop(lease_id, None)
        body = FailRequest(lease_id, reason[-TRACEBACK_CHARACTERS:], traceback[-TRACEBACK_CHARACTERS:])
        header, _ = await self._link.request(body, what=f"failure of lease {lease_id}")
        return _status(header.body)

    async def give_back(self, lease_id: int, *, lost: bool) -> str:
        """Return a lease that nobody plays any more: ``returned``, or ``late`` when it was not in flight any more.

        ``lost``: it was being played, which counts against its prompt; else it was never begun.
        """
        self._promised.pop(lease_id, None)
        header, _ = await self._link.request(ReturnRequest(lease_id, lost), what=f"return of lease {lease_id}")
        return _status(header.body)

    def close(self) -> None:
        if self._place is not None:
            self._place.close()
        self._link.close()


class QueueConsumer:
    """What one trainer rank talks to. Rank 0 leads: its step and version decide, others must ask for the same.

    ``source``: where payloads are read that do not travel with their batch; closed with the consumer.
    """

    def __init__(
        self,
        endpoint: str,
        rank: int,
        ranks: int,
        *,
        clock: Clock | None = None,
        context: Context | None = None,
        keys: LinkKeys | None = None,
        source: Source | None = None,
    ) -> None:
        self._rank = rank
        self._ranks = ranks
        self._source = source
        self._attempts: dict[int, int] = {}
        """Offer of the step under way: an acknowledgement names it."""
        self._link = ClientLink(endpoint, f"trainer-{rank}", (clock or RealClock()).now, context=context, keys=keys)

    async def next_batch(self, step: int, version: int, columns: Collection[str] = ()) -> RankBatch:
        """This rank's part of the batch of ``step`` for a trainer at ``version``, as soon as it is planned.

        Of the user's columns only ``columns`` travel, and metadata only if ``metadata`` is among them. Asking again
        before the acknowledgement returns the same part. Groups whose payload is gone, because their rollouter died,
        are reported and left out; their weight stays in the denominators.
        """
        names = [*STANDARD, *columns]
        body = BatchRequest(self._rank, self._ranks, step, version, names)
        header, payload = await self._link.request(body, what=f"the batch of step {step}")
        batch = header.body
        if not isinstance(batch, Batch):
            raise WireError(f"expected a batch, got {type(batch).__name__}")
        self._attempts = {step: batch.attempt}
        found = await self._payloads(batch, payload, names)
        micro_batches = [
            [unpack_part(part, *found[part.lease], columns) for part in parts if part.lease in found]
            for parts in batch.micro_batches
        ]
        return RankBatch(batch.step, batch.version, batch.oldest_allowed, micro_batches, batch.stats)

    async def _payloads(self, batch: Batch, inline: Payload, names: list[str]) -> dict[int, tuple[GroupMeta, Payload]]:
        """Description and payload of every group of the batch that can be read."""
        found: dict[int, tuple[GroupMeta, Payload]] = {}
        at = 0
        for each in batch.groups:
            if each.frames or not each.group.nbytes:
                found[each.group.lease] = (each.group, Payload(inline.frames[at : at + each.frames]))
            at += each.frames
        elsewhere = [each for each in batch.groups if each.group.lease not in found]
        if elsewhere:
            assert self._source is not None, "a payload lies elsewhere, but the consumer has no source"
            read = await self._source.read(elsewhere, names)
            found |= read.groups
            if read.lost:
                reasons = {lease: reason[:TRACEBACK_CHARACTERS] for lease, reason in read.lost.items()}
                body = LostRequest(batch.step, batch.attempt, reasons)
                await self._link.request(body, what=f"report of {len(reasons)} lost groups of step {batch.step}")
        return found

    async def fetch(self, leases: Collection[int], columns: Collection[str]) -> dict[int, list[Row]]:
        """Columns of groups that the buffer holds by value: per lease, per trajectory, arrays by name.

        Leases that it does not hold (any more) are left out.
        """
        header, payload = await self._link.request(
            FetchRequest(list(leases), list(columns)), what=f"columns of {len(leases)} groups"
        )
        if not isinstance(header.body, Fetched):
            raise WireError(f"expected columns, got {type(header.body).__name__}")
        rows: dict[int, list[Row]] = {}
        at = 0
        for each in header.body.groups:
            rows[each.lease] = unpack_columns(each.columns, Payload(payload.frames[at : at + each.frames]))
            at += each.frames
        return rows

    async def acknowledge(
        self, step: int, version: int, durable: int | None = None, *, ess: float = 0.0, tokens: int = 0
    ) -> None:
        """Rank 0, after the optimizer step: the groups are consumed. ``version`` is the one of ``next_batch``.

        ``durable``: the newest step that no restart of this trainer goes behind; by default this one. ``ess`` was
        measured over so many trained ``tokens``; with ``staleness.target_ess`` it decides how many leases are granted.
        """
        durable = step if durable is None else durable
        body = AcknowledgeRequest(step, version, self._attempts.get(step, 0), durable, ess, tokens)
        await self._link.request(body, what=f"acknowledgement of step {step}")

    async def published(self, version: int) -> None:
        """Rank 0: every live rollouter has committed ``version``. Frees pacing credits."""
        await self._link.request(PublishedRequest(version), what=f"publication of version {version}")

    def close(self) -> None:
        if self._source is not None:
            self._source.close()
        self._link.close()
