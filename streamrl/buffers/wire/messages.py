"""What producers and consumers say to the buffer: typed msgspec headers (C3). Payloads travel beside them.

A group travels in two parts. Its **description** (``GroupMeta``: rewards, lengths, versions) goes into the header: the
ledger and the batch plan need nothing else. Its **payload** (tokens, masks, log-probs, user columns) is raw bytes that
the buffer stores and forwards unread (``buffers/wire/payload.py``).
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from streamrl.buffers.wire.engine_messages import Generated, GenerateRequest, Watched, WatchRequest
from streamrl.buffers.wire.fields import Count, Name, Spans, Text
from streamrl.buffers.wire.reference import Reference

SCHEMA = 3
"""Version of everything in this file and of the columns in ``payload.py``; both ends must have the same."""


# Groups -------------------------------------------------------------------------------------------------------------


class Column(Struct, array_like=True, frozen=True):
    """One named array per trajectory, all of one dtype, one after the other in the payload from ``offset``."""

    name: Name
    dtype: Name
    """As ``dtypes.py`` names it: ``int32``, ``bfloat16``."""
    offset: Count
    """Bytes from the start of the payload, a multiple of 64."""
    shapes: list[list[Count] | None]
    """Per trajectory; ``None`` where a trajectory does not have this column."""


class TrajectoryMeta(Struct, array_like=True):
    """What planning and statistics need to know of one trajectory."""

    length: Count
    """Tokens, prompt included."""
    spans: Spans
    reward: float
    turns: Count
    truncated: bool
    metrics: dict[str, float] = {}
    metadata: dict[str, Any] = {}
    episode: Count = 0
    """Which episode of the group it belongs to."""
    turn_rewards: list[float] = []
    """Per run of sampled tokens; they are part of ``reward``. Empty: there are none."""

    @property
    def sampled(self) -> int:
        """Sampled tokens."""
        return sum(count for _, count in self.spans)


class GroupMeta(Struct, array_like=True):
    """A group without its arrays."""

    lease: Count
    prompt: Count
    env: Name
    shared: Count
    """Leading tokens that all trajectories share and none of them sampled: what a packed group computes once."""
    trajectories: list[TrajectoryMeta]
    columns: list[Column]
    nbytes: Count
    """Size of the payload."""

    @property
    def oldest_version(self) -> int:
        return min(version for trajectory in self.trajectories for version, _ in trajectory.spans)

    @property
    def newest_version(self) -> int:
        return max(version for trajectory in self.trajectories for version, _ in trajectory.spans)


class InArena(Struct, array_like=True, frozen=True):
    """A payload that lies in the memory of the rollouter that sampled it (``link_nixl.py``)."""

    reference: Reference
    metadata: bytes
    """Of the arena, for a consumer that does not know it yet."""


class Part(Struct, array_like=True):
    """A group, or as much of it as one micro-batch holds."""

    lease: Count
    rows: list[Count]
    """Which trajectories of the group."""
    advantages: list[float]
    """Per row."""
    token_weights: list[float]
    """Per row: weight of one token's loss, with the global denominator in it."""


MicroBatches = list[list[Part]]


# Producer → buffer --------------------------------------------------------------------------------------------------


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
    nbytes: Count


class Leases(Struct, tag="leases"):
    leases: list[LeaseItem]


class Withdraw(Struct, tag="withdraw"):
    """Whoever waited for these leases, or for this continuation, is gone; ``request`` is answered without if it still
    waits."""

    request: Count


class ReserveRequest(Struct, tag="reserve"):
    """The group of this lease takes more bytes than the lease promised; answered once there is room for them."""

    lease: Count
    nbytes: Count


class PutRequest(Struct, tag="put"):
    """A group. Its payload follows as frames, or lies in a store or an arena already."""

    group: GroupMeta
    reference: InArena | None = None


class FailRequest(Struct, tag="fail"):
    """The holder could not generate the group."""

    lease: int
    reason: Text
    traceback: Text


class ReturnRequest(Struct, tag="return"):
    """The holder is alive, but whoever played the lease for it is gone. Answered with a ``Status``."""

    lease: int
    lost: bool
    """It was being played: the prompt is blamed (``buffer.max_attempts``). False: it was handed back unused."""


class ReleaseRequest(Struct, tag="release"):
    """A producer holds payloads of these leases in its arena; answered with ``Released`` once some are not needed."""

    leases: list[Count]


class Released(Struct, tag="released"):
    leases: list[Count]


# Consumer → buffer --------------------------------------------------------------------------------------------------


class BatchRequest(Struct, tag="batch"):
    """Answered with ``Batch`` once the step is planned."""

    rank: Count
    ranks: Annotated[int, Meta(ge=1, le=1 << 20)]
    step: Count
    version: Count
    columns: list[Name]
    """The columns that this rank wants; the others do not travel."""


class BatchGroup(Struct, array_like=True):
    """A group of a batch, and where its payload is: in ``frames`` of this message, a reference, or else its store."""

    group: GroupMeta
    frames: Count = 0
    reference: InArena | None = None


class Batch(Struct, tag="rank_batch"):
    """What one rank trains on."""

    step: Count
    version: Count
    attempt: Count
    """How often this step was offered before: only the newest offer can be acknowledged."""
    oldest_allowed: int
    micro_batches: MicroBatches
    groups: list[BatchGroup]
    stats: dict[str, float]


class AcknowledgeRequest(Struct, tag="acknowledge"):
    """The optimizer step is done."""

    step: Count
    version: Count
    attempt: Count
    durable: Count
    """Newest step that no restart of the trainer goes behind: what it consumed need not be kept."""
    ess: float = 0.0
    """``policy/ess`` of the step, over ``tokens`` trained tokens; 0 of 0 where nothing was measured."""
    tokens: Count = 0


class LostRequest(Struct, tag="lost"):
    """Groups of a batch whose payload cannot be read: refunded, the step goes on without them."""

    step: Count
    attempt: Count
    leases: dict[Count, Text]
    """Why each cannot be read."""


class PublishedRequest(Struct, tag="published"):
    version: Count


# Any client → buffer or store ---------------------------------------------------------------------------------------


class FetchRequest(Struct, tag="fetch"):
    """Answered with ``Fetched``: these columns of groups that are held here."""

    leases: list[Count]
    columns: list[Name]


class Stored(Struct, array_like=True):
    lease: Count
    columns: list[Column]
    frames: Count


class Fetched(Struct, tag="fetched"):
    """Their payloads follow as frames, in order. Leases that are not held here are left out."""

    groups: list[Stored]


class StoreRequest(Struct, tag="store"):
    """A payload for a store, ahead of its group's description, which goes to the buffer."""

    lease: Count
    columns: list[Column]


class FreeRequest(Struct, tag="free"):
    """Buffer → store: these leases are closed, and so is every one below ``oldest``."""

    leases: list[Count]
    oldest: Count


# Rollouter → reference ----------------------------------------------------------------------------------------------


class ScoreRequest(Struct, tag="score"):
    """Trajectories to score: their token ids follow, int32, one after the other. Answered with a ``Status`` and as many
    log-probs, float32."""

    lengths: list[Annotated[int, Meta(ge=1, le=1 << 24)]]


# Environment → reward model -----------------------------------------------------------------------------------------


class RewardRequest(Struct, tag="reward"):
    """A conversation to score, as (role, content) of each message. Answered with ``Rewarded``."""

    messages: list[tuple[Name, str]]


class Rewarded(Struct, tag="rewarded"):
    value: float


# Answers ------------------------------------------------------------------------------------------------------------


class Status(Struct, tag="status"):
    """The buffer took responsibility for what was sent."""

    status: str


class Refusal(Struct, tag="refusal"):
    """The request was not carried out."""

    error: str
    malformed: bool
    """The message broke the schema, rather than the order of the conversation."""


Body = (
    LeaseRequest | Leases | Withdraw | ReserveRequest | PutRequest | FailRequest | ReturnRequest
    | ReleaseRequest | Released | BatchRequest | Batch | AcknowledgeRequest | LostRequest | PublishedRequest
    | FetchRequest | Fetched | StoreRequest | FreeRequest | ScoreRequest | GenerateRequest | Generated
    | WatchRequest | Watched | RewardRequest | Rewarded | Status | Refusal
)  # fmt: skip


class Header(Struct, array_like=True):
    """First frame of every message; ``len(sizes)`` payload frames follow."""

    schema: int
    request: int
    """Chosen by the client, repeated in the answer; −1 where the server could not read it."""
    sent_s: float
    """``time.monotonic`` of the sender: comparable on one host only."""
    body: Body
    sizes: list[Count] = []
    """Bytes of each payload frame that follows."""
    checksum: Count | None = None
    """xxh3 (64 bit, top 11 bits dropped) over the payload frames in order; ``None``: not computed."""


class Prefix(Struct, array_like=True):
    """The part of a header that every schema version begins with."""

    schema: int
    request: int


decoder = msgspec.msgpack.Decoder(Header)
prefix_decoder = msgspec.msgpack.Decoder(Prefix)
encoder = msgspec.msgpack.Encoder()
