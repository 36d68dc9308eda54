"""What changed in a bucket since an older version: a lossless code of positions and values. Pure; numpy, no torch.

bf16 weights hardly move between two steps of RL: with lr 1e-6 most updates are smaller than half the distance to the
next number. A bucket is compared with its *base*, the same bucket of an older version, as words of bits, so that NaN
payloads and -0.0 come through. A payload is a header of 32 bytes and one of two codes, whichever is shorter::

    GAPS     one byte per changed word: words since the last one (255: more, see below) | far gaps, uint32 | values
    BITMAP   one bit per word, the first word in the highest bit | values

GAPS is the shorter up to one changed word in eight. From 15 in 16 changed words of two bytes on, the bucket itself is
the shortest. The caller compares what was decoded with the digest of the bucket, and sees to it that both sides mean
the same base.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from streamrl.errors import WeightSyncError
from streamrl.sync.manifest import ITEM_BYTES, Bucket, Manifest

CHUNK_WORDS = 1 << 18
"""Words looked at together: what one step leaves for the next stays in the cache."""
FAR = 255
"""In the bytes of GAPS: the gap is this or more, and stands in the list of far gaps."""
MOST_WORDS = 1 << 32
"""Of a bucket, as a far gap has four bytes."""
_WORDS = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}
_POSITION = np.dtype("<u4")
_HEADER = struct.Struct("<BBxxxxxxQQQ")


class Code(IntEnum):
    GAPS = 0
    BITMAP = 1


@dataclass(frozen=True)
class Header:
    """How a payload stands for the ``nbytes`` bytes of a bucket."""

    code: int
    width: int
    """Bytes of a word: 1, 2, 4 or 8."""
    nbytes: int
    changed: int
    """Words that differ from the base."""
    far: int
    """Far gaps of GAPS."""

    def pack(self) -> bytes:
        return _HEADER.pack(self.code, self.width, self.nbytes, self.changed, self.far)

    @staticmethod
    def of(payload: memoryview) -> Header:
        """Raises ``WeightSyncError`` for a payload that has no such header, or another length than it says."""
        if payload.nbytes < _HEADER.size:
            raise WeightSyncError(f"delta: expected a header of {_HEADER.size} bytes, got {payload.nbytes} in all")
        header = Header(*_HEADER.unpack_from(payload))
        if header.width not in _WORDS or header.nbytes % header.width or header.code not in tuple(Code):
            raise WeightSyncError(f"delta: {header} makes no sense")
        where = header.changed + header.far * _POSITION.itemsize
        if header.code == Code.BITMAP:
            where = -(-header.nbytes // header.width // 8)
        expected = _HEADER.size + where + header.changed * header.width
        if payload.nbytes != expected:
            raise WeightSyncError(f"delta: expected a payload of {expected} bytes, got {payload.nbytes}")
        return header


def word_bytes(manifest: Manifest, bucket: Bucket) -> int:
    """Bytes of the bucket's smallest elements: what ``encode`` best compares by."""
    return min(ITEM_BYTES[manifest.tensors[piece.tensor].dtype] for piece in bucket.pieces)


def encode(base: memoryview, new: memoryview, width: int) -> memoryview | None:
    """The shorter code of ``new`` against ``base``, which are of one length; None where ``new`` itself is no longer.

    ``width``: bytes of the words that are compared: 1, 2, 4 or 8; 1 is taken where the length is no multiple of it.
    Takes memory for three times the payload. Releases the interpreter lock most of the time.
    """
    assert base.nbytes == new.nbytes, f"a base of {base.nbytes} bytes for {new.nbytes}"
    width = 1 if new.nbytes % width else width
    old, words = np.frombuffer(base, _WORDS[width]), np.frombuffer(new, _WORDS[width])
    assert len(words) <= MOST_WORDS, f"a bucket of {len(words)} words"
    bitmap_bytes = -(-len(words) // 8)
    positions: list[np.ndarray] = [np.empty(0, _POSITION)]
    values: list[np.ndarray] = []
    changed = 0
    for start, differs in _comparisons(old, words):
        found = np.flatnonzero(differs)
        changed += len(found)
        if _HEADER.size + changed * width + min(changed, bitmap_bytes) >= new.nbytes:
            return None
        values.append(words[start : start + CHUNK_WORDS][found])
        positions.append((found + start).astype(_POSITION))
    gaps = np.diff(np.concatenate(positions), prepend=_POSITION.type(0))
    far = gaps[gaps >= FAR]
    code, where = Code.GAPS, [np.minimum(gaps, FAR).astype(np.uint8), far.view(np.uint8)]
    if changed + far.nbytes > bitmap_bytes:
        code, far = Code.BITMAP, far[:0]
        where = [np.packbits(differs) for _, differs in _comparisons(old, words)]
    header = np.frombuffer(Header(code, width, new.nbytes, changed, len(far)).pack(), np.uint8)
    payload = np.concatenate([header, *where, *(part.view(np.uint8) for part in values)])
    return payload.data if payload.nbytes < new.nbytes else None


def decode(payload: memoryview, base: memoryview, out: memoryview) -> None:
    """Write to ``out`` what ``payload`` stands for; ``out`` may be ``base`` itself, or other memory of its length.

    Raises ``WeightSyncError`` for a payload that is no code of a bucket of this length; ``out`` then holds nothing of
    use. Releases the interpreter lock most of the time.
    """
    header = Header.of(payload)
    if not header.nbytes == base.nbytes == out.nbytes:
        raise WeightSyncError(f"delta: expected one of a bucket of {out.nbytes} bytes, got one of {header.nbytes}")
    if out is not base:
        np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(base, np.uint8))
    words = np.frombuffer(out, _WORDS[header.width])
    rest = np.frombuffer(payload, np.uint8)[_HEADER.size :]
    split = rest.nbytes - header.changed * header.width
    where, values = rest[:split], rest[split:].view(_WORDS[header.width])
    if header.code == Code.GAPS:
        words[_positions(header, where, len(words))] = values
    else:
        _fill(words, where, values)


def _comparisons(base: np.ndarray, new: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(first word, which words differ) of each chunk."""
    for start in range(0, len(new), CHUNK_WORDS):
        yield start, base[start : start + CHUNK_WORDS] != new[start : start + CHUNK_WORDS]


def _positions(header: Header, where: np.ndarray, words: int) -> np.ndarray:
    gaps = where[: header.changed].astype(np.int64)
    is_far = gaps == FAR
    if np.count_nonzero(is_far) != header.far:
        raise WeightSyncError(f"delta: {header.far} far gaps are listed, {np.count_nonzero(is_far)} are used")
    gaps[is_far] = where[header.changed :].view(_POSITION)
    positions = np.cumsum(gaps, out=gaps)
    if len(positions) and positions[-1] >= words:
        raise WeightSyncError(f"delta: gaps lead to word {positions[-1]} of {words}")
    return positions


def _fill(words: np.ndarray, bitmap: np.ndarray, values: np.ndarray) -> None:
    used = 0
    for start in range(0, len(words), CHUNK_WORDS):
        chunk = words[start : start + CHUNK_WORDS]
        bits = bitmap[start // 8 : -(-(start + len(chunk)) // 8)]
        places = np.flatnonzero(np.unpackbits(bits, count=len(chunk)).view(bool))  # a mask takes four times as long
        if used + len(places) > len(values):
            break
        chunk[places] = values[used : used + len(places)]
        used += len(places)
    else:
        if used == len(values):
            return
    raise WeightSyncError(f"delta: expected as many bits as values, which are {len(values)}")
