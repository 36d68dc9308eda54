"""Messages to frames and back: a msgspec header, then raw payload frames that nobody on the way reads or copies (C3).

Several messages may travel one after the other as one *bundle*: each header says how many frames follow it, so a
receiver splits the bundle and handles each message alone, and one that is malformed harms no other.

``decode`` checks the header against its schema, the number and sizes of the frames against the header, and the checksum
where the sender computed one; what the frames mean is for ``payload.py`` and ``groups.py``. Whatever is wrong raises
``WireError`` in one line. Frames come back as they were received: they live as long as anyone keeps them or a view of
them (``payload.py`` says more).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
import xxhash

from streamrl.buffers.wire.messages import SCHEMA, Body, Count, Header, decoder, encoder, prefix_decoder
from streamrl.buffers.wire.payload import Frame
from streamrl.errors import WireError

MAX_HEADER_BYTES = 1 << 24
"""About 100,000 trajectories. Decoded, a hostile header takes up to 64 times as much: ``MAX_MESSAGE_BYTES``."""
MAX_FRAME_BYTES = 1 << 29
"""The largest frame is one array, or all small arrays of a group together."""
MAX_MESSAGE_BYTES = 1 << 30
"""What one message may make the receiver allocate: the default ``buffer.max_bytes``, for a batch that is all of it."""
MAX_FRAMES = 1 << 14
"""Payload frames of one message: a batch of 16,384 groups without large arrays."""
COPY_BELOW_BYTES = 1 << 16
"""A link copies smaller frames: cheaper than tracking their owner, and a view would pin the whole receive buffer."""

CHECKSUM_BITS = (1 << 53) - 1
"""What every msgpack reader keeps exactly, and ``messages.Count`` accepts."""


class _Outline(msgspec.Struct, array_like=True):
    """As much of a header as splitting a bundle needs; the body is skipped, not built."""

    schema: int
    request: int
    sent_s: float
    body: msgspec.Raw
    sizes: list[Count] = []


_outline_decoder = msgspec.msgpack.Decoder(_Outline)
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def encode(
    body: Body,
    request: int,
    sent_s: float,
    payload: Sequence[Frame] = (),
    *,
    checksum: bool = False,
) -> list[Frame]:
    """Frames of one message, header first, the payload's as they are: flat buffers of bytes.

    Raises ``WireError`` when it is over a size limit, or holds text that is not Unicode or numbers over 64 bits.
    """
    digest = checksum_of(payload) if checksum else None
    header = Header(SCHEMA, request, sent_s, body, [len(frame) for frame in payload], digest)
    try:
        encoded = encoder.encode(header)
    except (UnicodeEncodeError, OverflowError, RecursionError) as error:
        raise WireError(f"header: expected Unicode text and 64-bit numbers, got {error}") from None
    frames = [encoded, *payload]
    check_sizes(frames)
    return frames


def decode(frames: Sequence[Frame]) -> tuple[Header, list[Frame]]:
    """Header and payload frames of one message. Raises ``WireError``."""
    check_sizes(frames)
    header = _decode_header(frames[0])
    payload = list(frames[1:])
    if len(header.sizes) != len(payload):
        raise WireError(f"message: expected {len(header.sizes)} payload frames as its header says, got {len(payload)}")
    for index, (size, frame) in enumerate(zip(header.sizes, payload, strict=True)):
        if size != len(frame):
            raise WireError(f"payload frame {index}: expected {size} bytes as the header says, got {len(frame)}")
    if header.checksum is not None and header.checksum != checksum_of(payload):
        raise WireError("payload: expected the checksum of its header, got another; bytes changed on the way")
    return header, payload


def split(frames: Sequence[Frame]) -> Iterator[list[Frame]]:
    """The messages of a bundle, each for ``decode``.

    After a header that cannot be read nobody knows where the next message begins: the rest comes as one message, which
    ``decode`` refuses.
    """
    start = 0
    while start < len(frames):
        end = start + 1 + _payload_frames(frames[start], len(frames))
        yield list(frames[start:end])
        start = end


def check_sizes(frames: Sequence[Frame]) -> int:
    """Bytes of a message; ``WireError`` when a frame, the header or the whole is over its limit."""
    sizes = [len(frame) for frame in frames]
    if not sizes or len(sizes) > MAX_FRAMES + 1:
        raise WireError(f"message: expected 1 to {MAX_FRAMES + 1} frames, got {len(sizes)}")
    total = sum(sizes)
    for what, got, limit in (
        ("header", sizes[0], MAX_HEADER_BYTES),
        ("largest frame", max(sizes), MAX_FRAME_BYTES),
        ("message", total, MAX_MESSAGE_BYTES),
    ):
        if got > limit:
            raise WireError(f"{what}: expected at most {limit} bytes, got {got}; use shorter or fewer trajectories")
    return total


def request_id(frames: Sequence[Frame]) -> int:
    """Request id of a message that ``decode`` refused, as far as it can be read; −1 otherwise."""
    try:
        return prefix_decoder.decode(frames[0]).request
    except (*_UNREADABLE, IndexError):
        return -1


def _payload_frames(header: Frame, otherwise: int) -> int:
    if len(header) > MAX_HEADER_BYTES:
        return otherwise
    try:
        outline = _outline_decoder.decode(header)
    except _UNREADABLE:
        return otherwise
    return len(outline.sizes) if outline.schema == SCHEMA else otherwise


def checksum_of(payload: Iterable[Frame]) -> int:
    digest = xxhash.xxh3_64()
    for frame in payload:
        digest.update(frame)
    return digest.intdigest() & CHECKSUM_BITS


def _decode_header(frame: Frame) -> Header:
    try:
        header = decoder.decode(frame)
    except _UNREADABLE as error:
        _check_schema(frame)
        raise WireError(f"header: {str(error).splitlines()[0]}") from None
    if header.schema != SCHEMA:
        _check_schema(frame)
    return header


def _check_schema(frame: Frame) -> None:
    try:
        schema = prefix_decoder.decode(frame).schema
    except _UNREADABLE:
        return
    if schema != SCHEMA:
        raise WireError(f"header: expected schema {SCHEMA}, got {schema}; run the same streamrl on both ends")
