"""The arrays of a group as one run of bytes that whoever stores or forwards it need not read.

A *column* is one named array per trajectory, all of one dtype, one after the other; arrays may differ in shape from
trajectory to trajectory, and a trajectory may lack a column. Columns follow each other, each filled up to a multiple of
64 bytes, so that a column is one range of bytes and any choice of columns is a payload again::

    offset 0                     64·a                      64·b
    | tokens: t0 t1 t2 … | fill | sampled: t0 t1 … | fill | router: t0 t1 … | fill |

The bytes lie in *frames*, and offsets count through all of them: small arrays are gathered in one frame with one copy,
an array of ``OWN_FRAME_BYTES`` and more is a frame of its own and never copied. A payload cut into other frames is the
same payload as long as no array is cut.

**How long the bytes live.** A sender's own frames *are* the arrays that it gave: it must not write to them before the
message is acknowledged. A receiver's arrays are read-only views that keep their frame alive, and thereby every column
in it: a process that keeps one array of a message for long copies it. Frames are never reused or written to after they
arrived, so a view stays right for as long as it is kept.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from streamrl.buffers.wire.dtypes import MAX_DIMENSIONS, NAMES, as_array, dtype_named
from streamrl.buffers.wire.messages import Column
from streamrl.errors import WireError

Frame = bytes | memoryview
Row = dict[str, np.ndarray]

ALIGNMENT = 64
"""Bytes; a cache line, and enough for every dtype and vector instruction."""
OWN_FRAME_BYTES = 1 << 20
"""From here on a frame costs less than a copy."""
MAX_NAME_CHARACTERS = 512
"""What ``messages.Name`` accepts."""
MAX_VALUES = 1 << 53
"""What the sizes of one shape may multiply to, zeros left out: numpy refuses more even where a zero empties it."""

_FILL = bytes(ALIGNMENT)


class Payload:
    """Frames read as one run of ``nbytes`` bytes."""

    __slots__ = ("_starts", "frames", "nbytes")

    def __init__(self, frames: Sequence[Frame]) -> None:
        self.frames = list(frames)
        """Flat buffers of bytes, in order."""
        ends = list(accumulate(map(len, self.frames), initial=0))
        self._starts = ends[:-1]
        self.nbytes = ends[-1]

    def view(self, offset: int, nbytes: int) -> memoryview:
        """A range of bytes, not copied. Raises ``WireError`` where it does not lie within one frame."""
        found = self.find(offset, nbytes)
        if found is None:
            raise WireError(f"payload: expected {nbytes} bytes from {offset} in one frame, but a frame ends among them")
        return found

    def find(self, offset: int, nbytes: int) -> memoryview | None:
        """A range of bytes, not copied; ``None`` where several frames hold it. Raises ``WireError`` beyond the end."""
        self._check(offset, nbytes)
        if not nbytes:
            return memoryview(b"")
        index = bisect_right(self._starts, offset) - 1
        start = offset - self._starts[index]
        if start + nbytes > len(self.frames[index]):
            return None
        return memoryview(self.frames[index])[start : start + nbytes]

    def slices(self, offset: int, nbytes: int) -> list[Frame]:
        """A range of bytes as the frames and parts of frames that it covers, not copied. Raises ``WireError``."""
        self._check(offset, nbytes)
        parts: list[Frame] = []
        index, end = bisect_right(self._starts, offset) - 1, offset + nbytes
        while offset < end:
            frame, start = self.frames[index], offset - self._starts[index]
            count = min(len(frame) - start, end - offset)
            if count:
                parts.append(frame if count == len(frame) else memoryview(frame)[start : start + count])
            offset += count
            index += 1
        return parts

    def _check(self, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise WireError(f"payload: expected a range within {self.nbytes} bytes, got {nbytes} from {offset}")


# Packing ------------------------------------------------------------------------------------------------------------


def pack_columns(rows: Sequence[Mapping[str, ArrayLike]]) -> tuple[list[Column], Payload]:
    """Columns of one mapping per trajectory, in order of first appearance, and the bytes they describe.

    Values: whatever ``dtypes.as_array`` takes. Raises ``WireError`` for those it refuses, a column that changes its
    dtype between trajectories, and a name that is empty or too long.
    """
    columns = []
    writer = _Writer()
    for name, arrays in _by_column(rows).items():
        dtype = _common_dtype(name, arrays)
        shapes = [None if array is None else list(array.shape) for array in arrays]
        columns.append(Column(name, NAMES[dtype], writer.begin_column(), shapes))
        for array in arrays:
            if array is not None:
                writer.add(array)
        writer.fill()
    return columns, Payload(writer.finish())


def write_into(payload: Payload, destination: memoryview) -> None:
    """Copy all bytes of the payload to the start of ``destination``, flat, writable and at least as long."""
    start = 0
    for frame in payload.frames:
        destination[start : start + len(frame)] = frame
        start += len(frame)


class _Writer:
    """Turns arrays into frames: a *slab* collects small ones until a large one or a badly placed column ends it."""

    def __init__(self) -> None:
        self._frames: list[Frame] = []
        self._offset = 0
        self._slab: list[Any] = []  # contiguous arrays and bytes
        self._slab_start = 0

    def begin_column(self) -> int:
        # A slab that began in the middle of a column would place the arrays of the next one at odd addresses.
        if self._slab and self._slab_start % ALIGNMENT:
            self._end_slab()
        return self._offset

    def add(self, array: np.ndarray) -> None:
        if array.nbytes < OWN_FRAME_BYTES:
            self._gather(array if array.flags.c_contiguous else array.tobytes(), array.nbytes)
        else:
            self._end_slab()
            self._frames.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            self._offset += array.nbytes

    def fill(self) -> None:
        missing = -self._offset % ALIGNMENT
        if missing:
            self._gather(_FILL[:missing], missing)

    def finish(self) -> list[Frame]:
        self._end_slab()
        return self._frames

    def _gather(self, data: np.ndarray | bytes, nbytes: int) -> None:
        if not self._slab:
            self._slab_start = self._offset
        self._slab.append(data)
        self._offset += nbytes

    def _end_slab(self) -> None:
        if self._slab:
            slab = b"".join(self._slab)
            self._slab = []
            if slab:
                self._frames.append(slab)


def _by_column(rows: Sequence[Mapping[str, ArrayLike]]) -> dict[str, list[np.ndarray | None]]:
    columns: dict[str, list[np.ndarray | None]] = {}
    for index, row in enumerate(rows):
        for name, value in row.items():
            column = columns.get(name)
            if column is None:
                if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARACTERS:
                    raise WireError(
                        f"column {str(name)[:40]!r}: expected a name of 1 to {MAX_NAME_CHARACTERS} characters"
                    )
                column = columns[name] = [None] * len(rows)
            column[index] = as_array(value, name)
    return columns


def _common_dtype(name: str, arrays: Iterable[np.ndarray | None]) -> np.dtype:
    found: dict[np.dtype, list[int]] = {}
    for index, array in enumerate(arrays):
        if array is not None:
            found.setdefault(array.dtype, []).append(index)
    if len(found) > 1:
        got = ", ".join(f"{NAMES[dtype]} in trajectories {str(rows)[:40]}" for dtype, rows in found.items())
        raise WireError(f"column {name[:40]!r}: expected one dtype for all trajectories of a group, got {got}")
    return next(iter(found))


# Unpacking ----------------------------------------------------------------------------------------------------------


class Placed(NamedTuple):
    """A column of which everything is checked that can be told without its bytes."""

    column: Column
    dtype: np.dtype
    counts: list[int]
    """Values per trajectory."""
    nbytes: int

    @property
    def filled(self) -> int:
        """Bytes up to the next column."""
        return self.nbytes + -self.nbytes % ALIGNMENT


def unpack_columns(
    columns: Sequence[Column],
    payload: Payload,
    names: Collection[str] | None = None,
    rows: Sequence[int] | None = None,
) -> list[Row]:
    """The arrays per trajectory, by name, as read-only views of the frames; copied only where a frame is misaligned.

    ``names``: the wanted columns, all by default; those that the group does not have are left out. ``rows``: the
    wanted trajectories in the wanted order. Raises ``WireError`` where columns and payload do not fit each other.
    """
    placed = place(columns, payload.nbytes)
    total = len(columns[0].shapes) if columns else 0
    wanted = range(total) if rows is None else rows
    if not all(0 <= row < total for row in wanted):
        raise WireError(f"rows: expected numbers of {total} trajectories, from 0, got {str(list(wanted))[:80]}")
    unpacked: list[Row] = [{} for _ in wanted]
    for one in placed:
        name = one.column.name
        if names is None or name in names:
            arrays = column_arrays(one, payload)
            for row, into in zip(wanted, unpacked, strict=True):
                array = arrays[row]
                if array is not None:
                    into[name] = array
    return unpacked


def place(columns: Sequence[Column], nbytes: int | None = None) -> list[Placed]:
    """Check that the columns follow each other without gap or overlap and fill ``nbytes``. Raises ``WireError``."""
    placed: list[Placed] = []
    names: set[str] = set()
    end = 0
    for column in columns:
        if column.name in names or not column.name:
            raise WireError(f"columns: expected names that differ, got {column.name[:40]!r} again or an empty one")
        names.add(column.name)
        if len(column.shapes) != len(columns[0].shapes):
            raise WireError(
                f"column {column.name[:40]!r}: expected shapes of {len(columns[0].shapes)} trajectories, "
                f"as many as the first column has, got {len(column.shapes)}"
            )
        if column.offset != end:
            raise WireError(f"column {column.name[:40]!r}: expected offset {end}, got {column.offset}")
        dtype = dtype_named(column.dtype, column.name)
        # Nearly all arrays have one dimension, and every group on its way is placed: no call for those.
        counts = [
            shape[0] if shape is not None and len(shape) == 1 else _count(shape, column.name) for shape in column.shapes
        ]
        one = Placed(column, dtype, counts, sum(counts) * dtype.itemsize)
        placed.append(one)
        end += one.filled
    if nbytes is not None and end != nbytes:
        raise WireError(f"payload: expected {end} bytes, as its columns say, got {nbytes}")
    return placed


def whole_column(one: Placed, payload: Payload) -> np.ndarray | None:
    """All values of a column in order, read-only, ``[N]``; ``None`` where several frames hold them."""
    return _values(one, payload, one.column.offset, one.nbytes)


def column_arrays(one: Placed, payload: Payload) -> list[np.ndarray | None]:
    """The array per trajectory, read-only; ``None`` where it has none. Raises ``WireError`` where a frame cuts one."""
    whole = whole_column(one, payload)
    arrays: list[np.ndarray | None] = []
    start = 0
    for shape, count in zip(one.column.shapes, one.counts, strict=True):
        if shape is None:
            arrays.append(None)
            continue
        array = whole[start : start + count] if whole is not None else _array(one, payload, start, count)
        arrays.append(array if len(shape) == 1 else array.reshape(shape))
        start += count
    return arrays


def _array(one: Placed, payload: Payload, start: int, count: int) -> np.ndarray:
    offset, nbytes = one.column.offset + start * one.dtype.itemsize, count * one.dtype.itemsize
    array = _values(one, payload, offset, nbytes)
    if array is None:
        raise WireError(f"column {one.column.name[:40]!r}: expected each array in one frame, but a frame cuts one")
    return array


def _values(one: Placed, payload: Payload, offset: int, nbytes: int) -> np.ndarray | None:
    found = payload.find(offset, nbytes)
    if found is None:
        return None
    array = np.frombuffer(found, dtype=one.dtype)
    if not array.flags.aligned:
        array = array.copy()
    array.setflags(write=False)
    if array.dtype.kind == "b" and nbytes and array.view(np.uint8).max() > 1:
        # numpy and torch take such bytes for numbers: counts would come out wrong.
        raise WireError(f"column {one.column.name[:40]!r}: expected bytes 0 or 1 as bool, got a larger one")
    return array


def _count(shape: list[int] | None, name: str) -> int:
    if shape is None:
        return 0
    if len(shape) > MAX_DIMENSIONS or math.prod(size for size in shape if size) > MAX_VALUES:
        raise WireError(f"column {name[:40]!r}: expected a shape that an array can have, got {str(shape)[:80]}")
    return math.prod(shape)


# Column-wise access -------------------------------------------------------------------------------------------------


def ranges(columns: Sequence[Column], names: Collection[str]) -> list[tuple[int, int]]:
    """(offset, bytes) of each wanted column, fill included; read in this order they are the payload of ``rebase``.

    Columns that the group does not have are left out. Raises ``WireError`` where the columns contradict themselves.
    """
    return [(one.column.offset, one.filled) for one in place(columns) if one.column.name in names]


def rebase(columns: Sequence[Column], names: Collection[str]) -> list[Column]:
    """The wanted columns with the offsets that they have in a payload of their own."""
    rebased, end = [], 0
    for one in place(columns):
        column = one.column
        if column.name in names:
            rebased.append(Column(column.name, column.dtype, end, column.shapes))
            end += one.filled
    return rebased


def narrow(columns: Sequence[Column], payload: Payload, names: Collection[str]) -> tuple[list[Column], Payload]:
    """The wanted columns and only their bytes, as parts of the same frames: nothing is copied."""
    place(columns, payload.nbytes)
    joined: list[tuple[int, int]] = []
    for offset, nbytes in ranges(columns, names):
        if joined and sum(joined[-1]) == offset:
            offset, nbytes = joined[-1][0], joined.pop()[1] + nbytes
        joined.append((offset, nbytes))
    frames = [frame for offset, nbytes in joined for frame in payload.slices(offset, nbytes)]
    return rebase(columns, names), Payload(frames)
