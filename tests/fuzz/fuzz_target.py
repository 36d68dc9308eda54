"""What fuzzed bytes are put through: everything that a receiver does with frames, and what must hold of the outcome.

An input is a run of frames, each 4 bytes of length (little-endian, cut to what is left) and its content. So frames
begin at any address, as they may in a receive buffer.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from streamrl.buffers.wire import codec
from streamrl.buffers.wire.groups import STANDARD, check_group, pack_group, unpack_group
from streamrl.buffers.wire.messages import Column, GroupMeta, PutRequest, StoreRequest
from streamrl.buffers.wire.payload import Frame, Payload, narrow, ranges, unpack_columns, write_into
from streamrl.errors import WireError
from streamrl.types import Group


def to_bytes(frames: Iterable[Frame]) -> bytes:
    return b"".join(len(frame).to_bytes(4, "little") + bytes(frame) for frame in frames)


def from_bytes(data: bytes) -> list[memoryview]:
    frames, rest = [], memoryview(data)
    while rest:
        end = 4 + int.from_bytes(rest[:4], "little")
        frames.append(rest[4:end])
        rest = rest[end:]
    return frames


def receive(data: bytes) -> int:
    """Take a bundle; the number of messages that were accepted. Anything but a ``WireError`` inside is a bug."""
    accepted = 0
    for frames in codec.split(from_bytes(data)):
        codec.request_id(frames)
        try:
            _take(frames)
        except WireError as error:
            assert str(error) and "\n" not in str(error)
            assert len(str(error)) < 2000
        else:
            accepted += 1
    return accepted


def _take(frames: Sequence[Frame]) -> None:
    header, received = codec.decode(frames)
    payload = Payload(received)
    match header.body:
        case PutRequest(group=meta, reference=None):
            try:
                check_group(meta, payload)
            except WireError:
                _read_columns(meta.columns, payload)
                raise
            _read_columns(meta.columns, payload)
            with no_wire_error():
                _read_group(meta, payload)
        case StoreRequest(columns=columns):
            _read_columns(columns, payload)
    with no_wire_error():
        sent = codec.encode(
            header.body,
            header.request,
            header.sent_s,
            received,
            checksum=header.checksum is not None,
        )
        assert repr(codec.decode(sent)[0]) == repr(header)


@contextlib.contextmanager
def no_wire_error() -> Iterator[None]:
    """For what must succeed once the frames were accepted."""
    try:
        yield
    except WireError as error:
        raise AssertionError(f"refused after it was accepted: {error}") from error


def _read_group(meta: GroupMeta, payload: Payload) -> None:
    """What was accepted keeps its promises, and packed again it is the same group."""
    group = unpack_group(meta, payload)
    for one in group.trajectories:
        assert len(one.tokens) == len(one.sampled) == len(one.behaviour) == one.length
        assert sum(count for _, count in one.versions) == one.sampled_count
        assert math.isfinite(one.reward) and np.isfinite(one.behaviour).all() and (one.tokens >= 0).all()
        assert all(version >= 0 and count > 0 for version, count in one.versions)
    again, packed = pack_group(group)
    check_group(again, packed)
    assert again.shared == meta.shared
    _same_group(unpack_group(again, packed), group)
    backwards = range(len(meta.trajectories))[::-1]
    for one, row in zip(unpack_group(meta, payload, (), backwards).trajectories, backwards, strict=True):
        assert one.tokens.tobytes() == group.trajectories[row].tokens.tobytes() and not one.columns


def _read_columns(columns: Sequence[Column], payload: Payload) -> None:
    """A choice of columns is the same by view, by narrowed payload, and by ranges of plain memory."""
    rows = unpack_columns(columns, payload)
    assert sum(array.nbytes for row in rows for array in row.values()) <= payload.nbytes
    names = [column.name for index, column in enumerate(columns) if index % 4]  # neighbours and gaps
    memory = bytearray(payload.nbytes)
    with no_wire_error():
        write_into(payload, memoryview(memory))
        read = b"".join(memory[offset : offset + nbytes] for offset, nbytes in ranges(columns, names))
        chosen, part = narrow(columns, payload, names)
        expected = [{name: array for name, array in row.items() if name in names} for row in rows] if chosen else []
        for got in (unpack_columns(chosen, part), unpack_columns(chosen, Payload([read]))):
            _same_rows(got, expected)


def _same_rows(got: Sequence[dict[str, np.ndarray]], expected: Sequence[dict[str, np.ndarray]]) -> None:
    assert [list(row) for row in got] == [list(row) for row in expected]
    for a, b in zip(got, expected, strict=True):
        for name, array in a.items():
            assert array.dtype == b[name].dtype and array.shape == b[name].shape
            assert array.tobytes() == b[name].tobytes()
            assert not array.flags.writeable
            assert array.dtype.kind != "b" or not array.size or array.view(np.uint8).max() <= 1


def _same_group(got: Group, expected: Group) -> None:
    def described(group: Group) -> str:  # as text, in which NaN equals NaN
        return repr([
            (group.lease, group.prompt, group.env, one.versions, one.reward, one.turns, one.truncated, one.metrics,
             one.metadata)
            for one in group.trajectories
        ])  # fmt: skip

    assert described(got) == described(expected)
    for a, b in zip(got.trajectories, expected.trajectories, strict=True):
        columns = [{name: getattr(one, name) for name in STANDARD} | one.columns for one in (a, b)]
        _same_rows([dict(sorted(columns[0].items()))], [dict(sorted(columns[1].items()))])
