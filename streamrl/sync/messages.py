"""The wire of the weight sync: tagged msgspec structs in msgpack, one frame each. Weights never travel here.

::

    subscriber            publisher
        Hello       →                         at every connect, also to a publisher that was restarted
                    ←     Welcome             how buckets travel, and the plan of a version
                    ←     Stage               version v comes, with the buckets that are complete so far
                    ←     Buckets             further ones, while the rest is still gathered
        Staged      →                         all are here and verified (or StageFailed)
                    ←     Commit              every live member staged it, or nobody waits for the others (rolling)
        Committed   →                         it serves (or CommitFailed: the old weights serve)
        Rejected    →                         it serves and does not score as the trainer says
                    ←     Discard             instead of Commit, when the update was given up

An observer copies the version before it answers Staged; Commit tells it that the version is current, without an answer.
``session`` names one life of the publisher, ``update`` one attempt to bring one version to its members; replies repeat
both, so that a late word of an attempt that is over is told apart. An undecodable frame is answered with ``Refused``.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from streamrl.errors import WireError
from streamrl.sync.manifest import Manifest

WIRE_SCHEMA = 2

FRAME_LIMIT = 64 << 20
"""Bytes of one frame; ZeroMQ drops the connection of a peer that sends more. A manifest takes about 100 per tensor."""


_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class Message(msgspec.Struct, tag=True, kw_only=True, forbid_unknown_fields=True):
    schema: int = WIRE_SCHEMA


class Hello(Message):
    name: str
    pid: int
    incarnation: int
    """CLOCK_MONOTONIC at the subscriber's start in ns: of two processes with one name the larger is the newer."""


class Welcome(Message):
    session: str
    transport: str
    address: str
    """Where the transport's receivers find its sender."""
    manifest: Manifest


class BucketEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One bucket that can be fetched."""

    digest: int
    """xxh3-64 of its bytes."""
    payload_bytes: _Count
    """What travels: its bytes, or their code against the base."""
    delta: bool


class Stage(Message):
    session: str
    update: int
    version: _Count
    slot: Annotated[int, msgspec.Meta(ge=0, le=1)]
    attempt: _Count
    """Over 0: this member is staged once more."""
    private: bool
    """For this member alone. What lies in shared memory is copied out: the slot may be reused before ``Commit``."""
    base: Annotated[int, msgspec.Meta(ge=-1)]
    """Version that the codes are against, which lies in the other slot; -1 without codes."""
    buckets: list[BucketEntry]


class Buckets(Message):
    session: str
    update: int
    first: _Count
    """Number of the first of them."""
    buckets: list[BucketEntry]


class Commit(Message):
    session: str
    update: int
    scores: list[float]
    """The trainer's log-probs of the canary's tokens under this version; empty: it is not judged."""


class Discard(Message):
    session: str
    update: int


class Staged(Message):
    session: str
    update: int


class StageFailed(Message):
    session: str
    update: int
    reason: str


class Committed(Message):
    session: str
    update: int
    pause_seconds: float
    canary_rms: float
    """Root mean square of engine minus trainer on the canary, nats; 0 where it was not judged."""


class CommitFailed(Message):
    session: str
    update: int
    reason: str


class Rejected(Message):
    """The version serves, and must not: its log-probs are not the trainer's."""

    session: str
    update: int
    pause_seconds: float
    canary_rms: float
    reason: str


class Refused(Message):
    """Answer to a frame that could not be decoded; never answered itself."""

    reason: str


ToPublisher = Hello | Staged | StageFailed | Committed | CommitFailed | Rejected | Refused
Reply = Staged | StageFailed | Committed | CommitFailed | Rejected
ToSubscriber = Welcome | Stage | Buckets | Commit | Discard | Refused

OfUpdate = Stage | Buckets | Commit | Discard | Reply

_T = TypeVar("_T", bound=Message)
_ENCODER = msgspec.msgpack.Encoder()
_TO_PUBLISHER: msgspec.msgpack.Decoder[ToPublisher] = msgspec.msgpack.Decoder(ToPublisher)
_TO_SUBSCRIBER: msgspec.msgpack.Decoder[ToSubscriber] = msgspec.msgpack.Decoder(ToSubscriber)


def identity_of(name: str, incarnation: int) -> bytes:
    """ZeroMQ identity of a subscriber: unlike that of any other process, also one that went by the same name before."""
    return f"{name}#{incarnation:016x}".encode()


def readable(identity: bytes) -> str:
    return identity.decode(errors="backslashreplace")


def encode(message: Message) -> bytes:
    return _ENCODER.encode(message)


def decode_to_publisher(frame: bytes) -> ToPublisher:
    """Raises ``WireError`` for a frame that is no such message or has another schema version."""
    return _decode(_TO_PUBLISHER, frame)


def decode_to_subscriber(frame: bytes) -> ToSubscriber:
    """Raises ``WireError`` for a frame that is no such message or has another schema version."""
    return _decode(_TO_SUBSCRIBER, frame)


def _decode(decoder: msgspec.msgpack.Decoder[_T], frame: bytes) -> _T:
    try:
        message = decoder.decode(frame)
    except msgspec.MsgspecError as error:
        raise WireError(f"weight sync: a frame of {len(frame)} bytes is no message: {error}") from None
    if message.schema != WIRE_SCHEMA:
        raise WireError(f"weight sync: expected wire schema {WIRE_SCHEMA}, got {message.schema}")
    return message
