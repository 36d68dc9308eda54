"""What producers and consumers say to the buffer: typed msgspec headers (C3). Tensors travel beside them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

SCHEMA = 1
"""Version of everything in this file and of the columns in ``codec.py``; both ends must have the same."""

TRACEBACK_CHARACTERS = 8192
"""Of a failure's traceback, the last ones are sent."""

Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
Name = Annotated[str, Meta(max_length=512)]
Text = Annotated[str, Meta(max_length=TRACEBACK_CHARACTERS)]


class LeaseRequest(Struct, tag="lease"):
    """Answered with ``Leases`` once at least one can be granted."""

    count: Annotated[int, Meta(ge=1, le=1 << 20)]


class LeaseItem(Struct, array_like=True):
    """``types.Lease`` on the wire."""

    id: Count
    prompt: Count
    group_size: Count
    attempt: Count
    deadline_s: float


class Leases(Struct, tag="leases"):
    leases: list[LeaseItem]


class Withdraw(Struct, tag="withdraw"):
    """Whoever waited for these leases is gone; ``request`` is answered with no leases if it still waits."""

    request: Count


class PutRequest(Struct, tag="put"):
    """A group; its trajectories are the columns."""

    lease: int
    prompt: int
    env: Name
    metrics: list[dict[str, float]] = []
    """Per trajectory; empty when no trajectory has any."""


class FailRequest(Struct, tag="fail"):
    """The holder could not generate the group."""

    lease: int
    reason: Text
    traceback: Text


class Status(Struct, tag="status"):
    """The buffer took responsibility for what was sent."""

    status: str


class BatchRequest(Struct, tag="batch"):
    """Answered with ``Batch`` once the step is planned."""

    rank: Count
    ranks: Annotated[int, Meta(ge=1, le=1 << 20)]
    step: Count
    version: Count


class Batch(Struct, tag="rank_batch"):
    """A ``types.RankBatch``; its trajectories are the columns, in the order of ``micro_batches``."""

    step: Count
    version: Count
    oldest_allowed: int
    micro_batches: list[list[tuple[int, Name, Count]]]
    """Per micro-batch and group: (lease, environment, number of trajectories)."""
    stats: dict[str, float]
    metrics: list[dict[str, float]] = []


class AcknowledgeRequest(Struct, tag="acknowledge"):
    step: Count
    version: Count


class PublishedRequest(Struct, tag="published"):
    version: Count


class Refusal(Struct, tag="refusal"):
    """The request was not carried out."""

    error: str
    malformed: bool
    """The message broke the schema, rather than the order of the conversation."""


Body = (
    LeaseRequest | Leases | Withdraw | PutRequest | FailRequest | Status | BatchRequest | Batch
    | AcknowledgeRequest | PublishedRequest | Refusal
)  # fmt: skip


class Header(Struct, array_like=True):
    """First frame of every message; one further frame per entry of ``tensors``, in order."""

    schema: int
    request: int
    """Chosen by the client, repeated in the answer; −1 where the server could not read it."""
    sent_s: float
    """``time.monotonic`` of the sender: comparable on one host only."""
    body: Body
    tensors: list[tuple[str, str, list[int]]] = []
    """(name, dtype, shape) of each frame that follows."""


class Prefix(Struct, array_like=True):
    """The part of a header that every schema version begins with."""

    schema: int
    request: int


decoder = msgspec.msgpack.Decoder(Header)
prefix_decoder = msgspec.msgpack.Decoder(Prefix)
encoder = msgspec.msgpack.Encoder()
