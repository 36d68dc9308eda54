"""The wire of the weight sync: tagged msgspec structs in msgpack, one frame each. Weights never travel here.

::

    subscriber            publisher
        Hello       →                         at every connect, also to a publisher that was restarted
                    ←     Welcome             where the memory is and how it is laid out
                    ←     Stage               version v lies in the memory, with these digests
        Staged      →                         verified (or StageFailed)
                    ←     Commit              every live member staged it
        Committed   →                         it serves (or CommitFailed: the old weights serve)
                    ←     Discard             instead of Commit, when the update was given up

An observer copies the version before it answers Staged; Commit tells it that the version is current, without an answer.
``session`` names one life of the publisher, ``update`` one attempt to bring one version to its members; replies repeat
both, so that a late word of an attempt that is over is told apart. An undecodable frame is answered with ``Refused``.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from streamrl.errors import WireError
from streamrl.sync.manifest import Manifest

WIRE_SCHEMA = 1

FRAME_LIMIT = 64 << 20
"""Bytes of one frame; ZeroMQ drops the connection of a peer that sends more. A manifest takes about 100 per tensor."""


class Message(msgspec.Struct, tag=True, kw_only=True, forbid_unknown_fields=True):
    schema: int = WIRE_SCHEMA


class Hello(Message):
    name: str
    pid: int
    incarnation: int
    """CLOCK_MONOTONIC at the subscriber's start in ns: of two processes with one name the larger is the newer."""


class Welcome(Message):
    session: str
    path: str
    manifest: Manifest


class Stage(Message):
    session: str
    update: int
    version: int
    digests: list[int]
    private: bool
    """Copy the tensors out before ``Staged``: the slot may be reused before ``Commit``."""


class Commit(Message):
    session: str
    update: int


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


class CommitFailed(Message):
    session: str
    update: int
    reason: str


class Refused(Message):
    """Answer to a frame that could not be decoded; never answered itself."""

    reason: str


ToPublisher = Hello | Staged | StageFailed | Committed | CommitFailed | Refused
Reply = Staged | StageFailed | Committed | CommitFailed
ToSubscriber = Welcome | Stage | Commit | Discard | Refused

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
