"""What changed in a bucket since an older version: a lossless code of differences. Pure; numpy, no torch.

bf16 weights hardly move between two steps of RL: with lr 1e-6 most updates are smaller than half the distance to the
next number, and a value that moves becomes its neighbour. A bucket is compared with its *base*, the same bucket of an
older version, as words of bits, so that NaN payloads and -0.0 come through. A payload is a header, one ``Entry`` for
each chunk of ``CHUNK_BYTES``, and the chunks, each in the code that is shortest for it and padded to 8 bytes::

    GAPS     list                     words that changed
    BITMAP   bits | values            one bit per word, the first word in the highest bit
    STEPS    symbols | list           new minus old of every word as a signed number of few bits; words that are
                                      further off are listed
    WHOLE    values                   all words
    list     far gaps, uint32 | values | one byte per word: words since the last one (255: see the far gaps)

Words from a chunk's first part have the lowest bits of a symbol word, those from its last part the highest: with
``lanes`` symbols in a word, symbol word ``i`` stands for words i, i + n, i + 2n, … of the ``lanes × n`` in the chunk.

A chunk is coded and decoded while it is in the processor's cache. The caller compares what was decoded with the digest
of the bucket, and sees to it that both sides mean the same base.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import xxhash

from streamrl.errors import WeightSyncError
from streamrl.sync.manifest import ITEM_BYTES, Bucket, Manifest

CHUNK_BYTES = 1 << 19
"""Coded together: what one step leaves for the next stays in the cache."""
FAR = 255
"""In the bytes of a list: the gap is this or more, and stands among the far gaps."""
SYMBOL_BITS = (2, 4, 8, 16, 32)
"""That a step may take, where it is fewer than a word has."""
SAMPLED_WORDS = 1024
"""Of a chunk, looked at to choose its code."""
_PAD = 8
_WORDS = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}
_SIGNED = {width: np.dtype(f"<i{width}") for width in (1, 2, 4, 8)}
_BYTES = np.dtype(np.uint8)
_FAR_GAP = np.dtype("<u4")
HEADER = struct.Struct("<B7xQ")
"""Bytes of a word; bytes of the bucket."""
ENTRY = struct.Struct("<BB6xII")


class Code(IntEnum):
    GAPS = 0
    BITMAP = 1
    STEPS = 2
    WHOLE = 3


class Entry(NamedTuple):
    """How one chunk is coded."""

    code: int
    bits: int
    """Of a symbol of STEPS, else 0."""
    listed: int
    """Values that the chunk brings."""
    far: int
    """Far gaps of its list."""


Coded = tuple[Entry, list[np.ndarray]]
"""A chunk's entry and its parts, in the order in which they stand in the payload."""


def word_bytes(manifest: Manifest, bucket: Bucket) -> int:
    """Bytes of the bucket's smallest elements: what ``encode`` best compares by."""
    return min(ITEM_BYTES[manifest.tensors[piece.tensor].dtype] for piece in bucket.pieces)


def encode(base: memoryview, new: memoryview, width: int) -> memoryview | None:
    """The code of ``new`` against ``base``, which are of one length; None where ``new`` itself is no longer.

    ``width``: bytes of the words that are compared: 1, 2, 4 or 8; 1 is taken where the length is no multiple of it.
    Takes memory for the payload and some chunks. Releases the interpreter lock most of the time.
    """
    assert base.nbytes == new.nbytes, f"a base of {base.nbytes} bytes for {new.nbytes}"
    width = 1 if new.nbytes % width else width
    old, words = np.frombuffer(base, _WORDS[width]), np.frombuffer(new, _WORDS[width])
    spans = list(_chunks(len(words), width))
    used = HEADER.size + len(spans) * ENTRY.size
    if used >= new.nbytes:
        return None
    # Pages of its own, taken as they are written to: what the payload does not need is never there.
    payload = np.frombuffer(mmap.mmap(-1, new.nbytes), _BYTES)
    HEADER.pack_into(payload.data, 0, width, new.nbytes)
    coder = _Coder(width)
    for index, span in enumerate(spans):
        entry, parts = coder.code(old[span], words[span])
        ENTRY.pack_into(payload.data, HEADER.size + index * ENTRY.size, *entry)
        if used + sum(part.nbytes for part in parts) + _PAD > new.nbytes:
            return None
        for part in parts:
            payload[used : used + part.nbytes] = part.view(_BYTES)
            used += part.nbytes
        used += -used % _PAD
    return payload[:used].data


def decode(payload: memoryview, base: memoryview, out: memoryview) -> int:
    """Write to ``out`` what ``payload`` stands for, and return its xxh3-64, taken while it is in the cache.

    Raises ``WeightSyncError`` for a payload that is no code of a bucket of this length; ``out`` then holds nothing of
    use. Releases the interpreter lock most of the time.
    """
    assert base.nbytes == out.nbytes, f"a base of {base.nbytes} bytes for {out.nbytes}"
    reader = _Reader(payload)
    width, nbytes = HEADER.unpack(reader.take(HEADER.size, _BYTES).data)
    if width not in _WORDS or nbytes != out.nbytes or nbytes % width:
        raise WeightSyncError(
            f"delta: expected one of a bucket of {out.nbytes} bytes, got one of {nbytes} bytes in words of {width}"
        )
    old, words = np.frombuffer(base, _WORDS[width]), np.frombuffer(out, _WORDS[width])
    spans = list(_chunks(len(words), width))
    entries = reader.take(len(spans) * ENTRY.size, _BYTES).data
    digest, scratch = xxhash.xxh3_64(), np.empty(CHUNK_BYTES // width, _WORDS[width])
    for span, fields in zip(spans, ENTRY.iter_unpack(entries), strict=True):
        _decode_chunk(Entry(*fields), reader, old[span], words[span], scratch)
        reader.skip_padding()
        digest.update(words[span].data)
    reader.require_end()
    return digest.intdigest()


def _chunks(words: int, width: int) -> Iterator[slice]:
    size = CHUNK_BYTES // width
    for start in range(0, words, size):
        yield slice(start, min(start + size, words))


# Coding ---------------------------------------------------------------------------------------------------------------


class _Coder:
    """Codes chunks one after the other, in memory that stays."""

    def __init__(self, width: int) -> None:
        words = CHUNK_BYTES // width
        self._width = width
        self._mask = np.empty(words, np.bool_)
        self._steps = np.empty(words, _WORDS[width])
        self._moved = np.empty(words, _WORDS[width])

    def code(self, old: np.ndarray, new: np.ndarray) -> Coded:
        changed = np.not_equal(old, new, out=self._mask[: len(new)])
        count = int(np.count_nonzero(changed))
        code, bits = Code.GAPS, 0
        if count * (1 + self._width) > len(new) * SYMBOL_BITS[0] / 8:  # else any other code is longer
            steps = np.subtract(new, old, out=self._steps[: len(new)])
            code, bits = self._shortest(steps, count)
        if code == Code.WHOLE:
            return Entry(code, 0, len(new), 0), [new]
        if code == Code.BITMAP:
            return Entry(code, 0, count, 0), [np.packbits(changed), new[np.flatnonzero(changed)]]
        if code == Code.GAPS:
            far, listed = _list(changed, new)
            return Entry(code, 0, count, far), listed
        return self._code_steps(new, bits)

    def _shortest(self, steps: np.ndarray, changed: int) -> tuple[Code, int]:
        """The code that is likely the shortest, by some of the steps."""
        words, item = len(steps), 1 + self._width
        sizes: dict[tuple[Code, int], float] = {
            (Code.WHOLE, 0): words * self._width,
            (Code.BITMAP, 0): words / 8 + changed * self._width,
            (Code.GAPS, 0): changed * item,
        }
        sample = steps[:: words // SAMPLED_WORDS | 1]  # odd: rows of weights are of even length
        for bits in SYMBOL_BITS:
            if bits < 8 * self._width:
                further = np.count_nonzero(sample + _half(bits) >= 2 * _half(bits)) / len(sample)
                sizes[Code.STEPS, bits] = words * bits / 8 + words * further * item
        return min(sizes, key=lambda each: sizes[each])

    def _code_steps(self, new: np.ndarray, bits: int) -> Coded:
        """Of the steps that ``code`` left."""
        lanes, columns = _symbols(len(new), self._width, bits)
        padded, moved = self._steps[: lanes * columns], self._moved[: lanes * columns]
        padded[len(new) :] = 0
        half = _half(bits)
        np.add(padded, half, out=moved)  # of unsigned words, so that the steps from -half on come first
        further = np.greater_equal(moved[: len(new)], 2 * half, out=self._mask[: len(new)])
        symbols = np.bitwise_and(padded, 2 * half - 1, out=moved).reshape(lanes, columns)
        np.multiply(symbols, _factors(symbols.dtype, [bits * lane for lane in range(lanes)]), out=symbols)
        far, listed = _list(further, new)
        entry = Entry(Code.STEPS, bits, listed[1].size, far)
        return entry, [np.bitwise_or.reduce(symbols, axis=0), *listed]


def _list(which: np.ndarray, new: np.ndarray) -> tuple[int, list[np.ndarray]]:
    """(far gaps, the parts of a list) of some words."""
    positions = np.flatnonzero(which)
    gaps = positions.astype(_FAR_GAP)
    gaps[1:] -= gaps[:-1].copy()
    far = gaps[gaps >= FAR]
    return len(far), [far, new[positions], np.minimum(gaps, FAR).astype(_BYTES)]


def _half(bits: int) -> int:
    """Steps from minus this to one less than this are symbols."""
    return 1 << (bits - 1)


def _symbols(words: int, width: int, bits: int) -> tuple[int, int]:
    """(symbols in a word, words of symbols) of a chunk."""
    lanes = 8 * width // bits
    return lanes, -(-words // lanes)


def _factors(dtype: np.dtype, shifts: list[int]) -> np.ndarray:
    """What shifts each row of symbols to the left: a product takes half the time of a shift."""
    return np.array([[1 << shift] for shift in shifts], dtype)


# Decoding -------------------------------------------------------------------------------------------------------------


class _Reader:
    """The parts of a payload, one after the other."""

    def __init__(self, payload: memoryview) -> None:
        self._bytes = np.frombuffer(payload, _BYTES)
        self._used = 0

    def take(self, count: int, dtype: np.dtype) -> np.ndarray:
        """Raises ``WeightSyncError`` where the payload is too short for it."""
        end = self._used + count * dtype.itemsize
        if end > len(self._bytes):
            raise WeightSyncError(f"delta: expected a payload of at least {end} bytes, got {len(self._bytes)}")
        part = self._bytes[self._used : end].view(dtype)
        self._used = end
        return part

    def skip_padding(self) -> None:
        self.take(-self._used % _PAD, _BYTES)

    def require_end(self) -> None:
        if self._used != len(self._bytes):
            raise WeightSyncError(f"delta: expected a payload of {self._used} bytes, got {len(self._bytes)}")


def _decode_chunk(entry: Entry, reader: _Reader, old: np.ndarray, out: np.ndarray, scratch: np.ndarray) -> None:
    width = out.itemsize
    bits = SYMBOL_BITS if entry.code == Code.STEPS else (0,)
    if entry.code not in tuple(Code) or entry.bits not in bits or entry.bits >= 8 * width or entry.listed > len(out):
        raise WeightSyncError(f"delta: {entry} of {len(out)} words makes no sense")
    if entry.code == Code.WHOLE:
        out[:] = reader.take(len(out), out.dtype)
    elif entry.code == Code.BITMAP:
        np.copyto(out, old)
        bitmap = np.unpackbits(reader.take(-(-len(out) // 8), _BYTES), count=len(out))
        positions = np.flatnonzero(bitmap.view(np.bool_))  # a mask takes four times as long
        if len(positions) != entry.listed:
            raise WeightSyncError(f"delta: expected {entry.listed} bits, as many as values, got {len(positions)}")
        out[positions] = reader.take(entry.listed, out.dtype)
    else:
        if entry.code == Code.GAPS:
            np.copyto(out, old)
        else:
            _add_steps(entry.bits, reader, old, out, scratch)
        _put_listed(entry, reader, out)


def _add_steps(bits: int, reader: _Reader, old: np.ndarray, out: np.ndarray, scratch: np.ndarray) -> None:
    width = out.itemsize
    lanes, columns = _symbols(len(out), width, bits)
    symbols = reader.take(columns, out.dtype)
    steps = scratch[: lanes * columns].reshape(lanes, columns)
    rest = 8 * width - bits
    # Each symbol goes to the highest bits of its word, and back down with its sign.
    np.multiply(symbols, _factors(out.dtype, [rest - bits * lane for lane in range(lanes)]), out=steps)
    signed = steps.view(_SIGNED[width])
    np.right_shift(signed, rest, out=signed)
    np.add(old, steps.reshape(-1)[: len(out)], out=out)


def _put_listed(entry: Entry, reader: _Reader, out: np.ndarray) -> None:
    far = reader.take(entry.far, _FAR_GAP)
    values = reader.take(entry.listed, out.dtype)
    gaps = reader.take(entry.listed, _BYTES).astype(np.int64)
    if not entry.listed and not entry.far:
        return
    is_far = gaps == FAR
    if np.count_nonzero(is_far) != entry.far:
        raise WeightSyncError(f"delta: {entry.far} far gaps are listed, {np.count_nonzero(is_far)} are used")
    gaps[is_far] = far
    positions = np.cumsum(gaps, out=gaps)
    if positions[-1] >= len(out):
        raise WeightSyncError(f"delta: gaps lead to word {positions[-1]} of {len(out)}")
    out[positions] = values
