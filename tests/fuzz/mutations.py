"""Damage that knows frames: it changes one thing and often mends the rest, so that inputs get past the outer checks."""

from __future__ import annotations

import copy
import operator
import random
from collections.abc import Callable, MutableMapping, MutableSequence
from itertools import pairwise
from typing import Any

import msgspec

from streamrl.buffers.wire import codec
from streamrl.buffers.wire.dtypes import DTYPES
from streamrl.buffers.wire.messages import SCHEMA

Frames = list[bytes]
Node = MutableSequence[Any] | MutableMapping[Any, Any]

SIZES, CHECKSUM = 4, 5
"""Places in a header: [schema, request, sent_s, body, sizes, checksum]."""

MAX_PAYLOAD_BYTES = 4096
"""Payloads are mended up to here."""

VALUES: list[Any] = [
    *(0, 1, 2, 3, -1, 63, 64, 65, 255, 1 << 31, (1 << 53) - 1, 1 << 53, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1),
    *(0.0, -0.0, 1.5, float("nan"), float("inf"), 1e300, None, True, False, "", "x", "tokens", "sampled", "behaviour"),
    *("ü\U0001f600", b"", b"\xff", msgspec.msgpack.Ext(5, b"e")),
    *([], {}, [[]], [0], [0, 1 << 52, 1 << 52], [1] * 65, {"k": [1]}),
    *DTYPES,
]


def damage(data_frames: Frames, rng: random.Random, mutate_bytes: Callable[[bytes], bytes]) -> Frames:
    """The frames after one to three accidents, mended in four of five cases."""
    frames = list(data_frames)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if frames:
            rng.choice(ACCIDENTS)(frames, rng, mutate_bytes)
    return mended(frames, rng) if rng.random() < 0.8 else frames


def _bytes(frames: Frames, rng: random.Random, mutate_bytes: Callable[[bytes], bytes]) -> None:
    at = rng.randrange(len(frames))
    frames[at] = mutate_bytes(frames[at])


def _cut(frames: Frames, rng: random.Random, _: Any) -> None:
    at = rng.randrange(len(frames))
    frames[at] = frames[at][: rng.randint(0, len(frames[at]))]


def _divide(frames: Frames, rng: random.Random, _: Any) -> None:
    at = rng.randrange(len(frames))
    middle = rng.randint(0, len(frames[at]))
    frames[at : at + 1] = [frames[at][:middle], frames[at][middle:]]


def _drop(frames: Frames, rng: random.Random, _: Any) -> None:
    del frames[rng.randrange(len(frames))]


def _repeat(frames: Frames, rng: random.Random, _: Any) -> None:
    frames.insert(rng.randrange(len(frames)), rng.choice(frames))


def _swap(frames: Frames, rng: random.Random, _: Any) -> None:
    a, b = rng.randrange(len(frames)), rng.randrange(len(frames))
    frames[a], frames[b] = frames[b], frames[a]


def _header(frames: Frames, rng: random.Random, _: Any) -> None:
    """Replace, remove or repeat one value anywhere in a header."""
    at = rng.randrange(len(frames)) if rng.random() < 0.2 else 0
    header = _decoded(frames[at])
    places = list(_places(header))
    if not places:
        return
    node, key = rng.choice(places)
    match rng.randrange(6):
        case 0:
            del node[key]
        case 1:
            other, other_key = rng.choice(places)
            node[key] = other[other_key]
        case 2 if isinstance(node, list):
            node.insert(rng.randint(0, len(node)), copy.deepcopy(node[key]))
        case 3 if type(node[key]) is int:
            node[key] += rng.choice((-64, -1, 1, 64))
        case _:
            node[key] = copy.deepcopy(rng.choice(VALUES))
    try:
        frames[at] = msgspec.msgpack.encode(header)
    except (RecursionError, OverflowError, TypeError):
        return  # a value now holds itself, left 64 bits, or became a key


ACCIDENTS = [_bytes, _cut, _divide, _drop, _repeat, _swap, *[_header] * 8]


def mended(frames: Frames, rng: random.Random) -> Frames:
    """With sizes and checksums that fit, and often with columns and payload that fit each other."""
    starts = [at for at, frame in enumerate(frames) if _is_header(_decoded(frame))]
    result: Frames = frames[: starts[0]] if starts else list(frames)
    for start, end in pairwise([*starts, len(frames)]):
        header, payload = _decoded(frames[start]), frames[start + 1 : end]
        if rng.random() < 0.7:
            payload = _fit_columns(header, payload, rng)
        _put(header, SIZES, [len(frame) for frame in payload])
        if len(header) > CHECKSUM and header[CHECKSUM] is not None:
            header[CHECKSUM] = codec.checksum_of(payload)
        try:
            result += [msgspec.msgpack.encode(header), *payload]
        except (RecursionError, OverflowError, TypeError):
            result += frames[start:end]
    return result


def _fit_columns(header: list[Any], payload: Frames, rng: random.Random) -> Frames:
    group = header[3].get("group") if isinstance(header[3], dict) else None
    columns = group[5] if isinstance(group, list) and len(group) > 6 else None
    if not isinstance(columns, list):
        return payload
    end = 0
    try:
        for column in columns:
            column[2] = end
            count = sum(_product(shape) for shape in column[3] if shape is not None)
            end += -(-count * DTYPES[column[1]].itemsize // 64) * 64
    except (TypeError, KeyError, IndexError):
        return payload
    if not 0 <= end <= MAX_PAYLOAD_BYTES:
        return payload
    group[6] = end
    data = b"".join(payload)[:end].ljust(end, b"\0")
    middle = rng.randint(0, end) if rng.random() < 0.1 else end
    return [frame for frame in (data[:middle], data[middle:]) if frame]


def _product(shape: list[int]) -> int:
    product = 1
    for size in shape:
        product = min(product * operator.index(size), 1 << 62)
    return product


def _decoded(frame: bytes) -> Any:
    try:
        return msgspec.msgpack.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError):
        return None


def _is_header(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 3 and value[0] == SCHEMA


def _put(header: list[Any], at: int, value: Any) -> None:
    if len(header) > at:
        header[at] = value
    else:
        header.append(value)


def _places(node: Any) -> Any:
    """Every (container, key) below ``node``."""
    if isinstance(node, list):
        keys: Any = range(len(node))
    elif isinstance(node, dict):
        keys = list(node)
    else:
        return
    for key in keys:
        yield node, key
        yield from _places(node[key])
