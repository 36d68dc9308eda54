"""The queue server's side for trainer ranks: batches, acknowledgements, and columns of single groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from streamrl.buffers.held import Held
from streamrl.buffers.offer import Offer
from streamrl.buffers.wire.messages import (
    AcknowledgeRequest,
    Batch,
    BatchGroup,
    BatchRequest,
    Fetched,
    FetchRequest,
    GroupMeta,
    LostRequest,
    Refusal,
    Status,
    Stored,
)
from streamrl.buffers.wire.payload import Frame, narrow
from streamrl.errors import StreamRLError

if TYPE_CHECKING:
    from streamrl.buffers.queue.message_server import Asker
    from streamrl.buffers.queue.server import QueueServer

METADATA = "metadata"
"""The pseudo-column under which a consumer asks for the metadata of trajectories."""


class BatchDesk:
    """Rank 0 leads: its step and version decide, the others must ask for the same."""

    def __init__(self, server: QueueServer) -> None:
        self._server = server
        self._buffer = server.buffer
        self._requests: dict[int, tuple[Asker, BatchRequest]] = {}
        self.deadline: float | None = None
        """When the batch that is handed out is offered again."""
        if self._buffer.offer is not None:  # restored: whoever trains on it gets the whole time again
            self.deadline = server.now + self._buffer.config.buffer.acknowledge_timeout_s

    @property
    def waiting(self) -> list[int]:
        return sorted(self._requests)

    # Requests ---------------------------------------------------------------------------------------------------------

    def ask(self, asker: Asker, body: BatchRequest) -> None:
        if body.rank >= body.ranks:
            raise StreamRLError(f"rank {body.rank} of {body.ranks} asked for a batch")
        if body.step <= self._buffer.ledger.last_step:
            raise StreamRLError(
                f"rank {body.rank} asked for step {body.step}, but step {self._buffer.ledger.last_step} is acknowledged"
            )
        offer = self._buffer.offer
        if offer is not None and (body.rank == 0 or body.step <= offer.step):
            if (body.step, body.version, body.ranks) != (offer.step, offer.version, offer.ranks):
                raise StreamRLError(
                    f"rank {body.rank} of {body.ranks} asked for step {body.step} at version {body.version}, but step "
                    f"{offer.step} at version {offer.version} is handed out to {offer.ranks} ranks"
                )
            self._send_part(asker, body, offer)
        else:
            self._requests[body.rank] = (asker, body)

    def acknowledge(self, asker: Asker, body: AcknowledgeRequest) -> None:
        offer = self._buffer.offer
        if offer is not None and offer.step == body.step and offer.version != body.version:
            raise StreamRLError(
                f"step {body.step} was acknowledged at version {body.version}, but handed out at {offer.version}"
            )
        self._buffer.acknowledge(body.step, body.attempt, body.durable, body.ess, body.tokens)
        if self._buffer.offer is None:
            self.deadline = None
        self._server.recycle()
        self._server.answer_when_synced(asker, Status("consumed"))

    def lost(self, asker: Asker, body: LostRequest) -> None:
        """A rank could not read these groups of its batch: their rollouter is gone, and with it their payload."""
        for lease in self._buffer.drop(body.step, body.attempt, body.leases):
            self._server.tell("payload_lost", [lease], sender=asker.name, step=body.step, reason=body.leases[lease.id])
        self._server.answer(asker, Status("dropped"))

    def fetch(self, asker: Asker, body: FetchRequest) -> None:
        stored: list[Stored] = []
        frames: list[Frame] = []
        for lease in body.leases:
            held = self._buffer.held(lease)
            if held is not None and held.payload is not None:
                columns, payload = narrow(held.group.columns, held.payload, body.columns)
                stored.append(Stored(lease, columns, len(payload.frames)))
                frames += payload.frames
        self._server.answer(asker, Fetched(stored), frames)

    def consumer_lost(self) -> int:
        """The trainer group died. Number of groups that are ready again."""
        self._requests.clear()
        self.deadline = None
        return self._buffer.hand_back()

    def expire(self, now: float) -> None:
        """Offer a batch again that nobody acknowledged in time."""
        if self.deadline is not None and now >= self.deadline:
            self.deadline = None
            offer = self._buffer.offer
            assert offer is not None
            groups = self._buffer.hand_back()
            fields = {"step": offer.step, "version": offer.version, "offer": offer.attempt, "groups": groups}
            self._server.report("batch_reoffered", fields)

    # Answers ----------------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Hand out a batch once rank 0 waits for one and there is one, and answer all ranks that wait for it."""
        if 0 not in self._requests or self._buffer.offer is not None:
            return
        _, leader = self._requests[0]
        offer = self._buffer.next_batch(leader.step, leader.version, leader.ranks)
        if offer is None:
            return
        offer.stats.update(self._server.transport_statistics())
        self.deadline = self._server.now + self._buffer.config.buffer.acknowledge_timeout_s
        self._server.deadline_changed()
        requests, self._requests = self._requests, {}
        for asker, body in requests.values():
            try:
                self.ask(asker, body)
            except StreamRLError as error:
                self._server.answer(asker, Refusal(str(error), malformed=False))

    def _send_part(self, asker: Asker, body: BatchRequest, offer: Offer) -> None:
        micro_batches = offer.parts[body.rank]
        leases = dict.fromkeys(part.lease for parts in micro_batches for part in parts)
        groups: list[BatchGroup] = []
        frames: list[Frame] = []
        for lease in leases:
            held = self._buffer.held(lease)
            if held is None:
                continue  # dropped since: its payload is gone
            group, payload = _wanted(held, body.columns)
            groups.append(BatchGroup(group, len(payload), held.reference))
            frames += payload
        parts = [[part for part in parts if self._buffer.held(part.lease)] for parts in micro_batches]
        batch = Batch(offer.step, offer.version, offer.attempt, offer.oldest_allowed, parts, groups, offer.stats)
        self._server.answer(asker, batch, frames)


def _wanted(held: Held, names: list[str]) -> tuple[GroupMeta, list[Frame]]:
    """The description that travels with a batch, and the frames of the wanted columns where they are held here."""
    group, frames = held.group, []
    if held.payload is not None and all(column.name in names for column in group.columns):
        frames = held.payload.frames
    elif held.payload is not None:
        columns, payload = narrow(group.columns, held.payload, names)
        group = msgspec.structs.replace(group, columns=columns, nbytes=payload.nbytes)
        frames = payload.frames
    if METADATA not in names and any(trajectory.metadata for trajectory in group.trajectories):
        bare = [msgspec.structs.replace(trajectory, metadata={}) for trajectory in group.trajectories]
        group = msgspec.structs.replace(group, trajectories=bare)
    return group, frames
