"""A payload by reference, as messages name it, and the header that its slot bears. No NIXL in here."""

from __future__ import annotations

import struct
from typing import Annotated

from msgspec import Meta, Struct

from streamrl.errors import StreamRLError

HEADER_BYTES = 64
"""Before the payload in its slot: payloads start at a multiple of 64, as their columns do."""
_HEADER = struct.Struct("<8sQQ")
STAMP_BYTES = _HEADER.size
"""Of the header, the ones in use."""

Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Name = Annotated[str, Meta(max_length=512)]


class ReferenceLost(StreamRLError):
    """The payload cannot be had: its producer is gone or does not answer, or its slot was freed."""


class Reference(Struct, array_like=True, frozen=True):
    """Where a payload lies. Means nothing without the metadata of its agent."""

    agent: Name
    address: Count
    """Of the slot, in the producer's address space."""
    nbytes: Count
    """Of the payload."""
    stamp: Count
    """Random; the slot's header has the same as long as the slot holds this payload."""


class Metadata(Struct, array_like=True, frozen=True):
    """What a reader must know of a writer, once for all its references."""

    agent: Name
    address: Count
    """Of the arena."""
    nbytes: Count
    nixl: bytes
    """How to reach the agent: NIXL's own metadata, opaque."""


def header(stamp: int, nbytes: int) -> bytes:
    """First ``STAMP_BYTES`` of the slot of a payload of ``nbytes`` bytes."""
    return _HEADER.pack(b"streamrl", stamp, nbytes)
