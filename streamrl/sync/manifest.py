"""The bucket plan of a weight update: which bytes of which tensor lie where. Pure and deterministic; no torch.

One *slot* holds all tensors of one policy version. Its buckets lie one after the other without a gap::

    slot    | bucket 0 ............... | bucket 1 (full) | bucket 2 ............ |
    tensor    a    b    (0 elements)     c (1st piece)     c (2nd piece)   d

Every tensor and every bucket starts at a multiple of 256 bytes from the start of the slot. A tensor that does not fit
into the rest of a bucket opens the next one. A tensor larger than a bucket is cut into pieces: each but the last fills
a whole bucket, the last shares its bucket with the tensors that follow. As buckets abut, such a tensor is still one
contiguous range of the slot, so that readers need no copy to put it together. Zero-element tensors take no bytes and
have no piece. Dtypes may be mixed. Tied weights are the caller's to give once, under one name.

Both sides compute the plan from the same names, shapes and dtypes; ``fingerprint`` says whether they agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import xxhash

from streamrl.errors import ConfigError, WeightSyncError

ALIGNMENT = 256
"""Bytes; what the widest vector loads, DMA engines and RDMA registrations ask for."""

PLAN_SCHEMA = 1

ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64"), 8),
}
"""Bytes per element, by torch's name of the dtype."""

TensorSpec = tuple[str, tuple[int, ...], str]
"""(name, shape, dtype), such as ``("head.weight", (128, 32), "bfloat16")``."""


class PlacedTensor(msgspec.Struct, frozen=True):
    """One tensor and its contiguous byte range in the slot."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


class Piece(msgspec.Struct, frozen=True):
    """``nbytes`` bytes of tensor number ``tensor``, from its byte ``tensor_offset`` on, at ``offset`` in the bucket."""

    tensor: int
    tensor_offset: int
    offset: int
    nbytes: int


class Bucket(msgspec.Struct, frozen=True):
    """``nbytes`` (a multiple of 256) bytes from ``offset`` of the slot on: what carries one digest."""

    offset: int
    nbytes: int
    pieces: tuple[Piece, ...]


class Manifest(msgspec.Struct, frozen=True):
    """The plan. Build it with ``plan_manifest``; one that came over the wire is trusted after ``check``."""

    tensors: tuple[PlacedTensor, ...]
    buckets: tuple[Bucket, ...]
    bucket_bytes: int
    slot_bytes: int
    fingerprint: str
    """xxh3-128 of the plan, 32 hex digits."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of all tensors, without padding."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def specs(self) -> list[TensorSpec]:
        return [(tensor.name, tensor.shape, tensor.dtype) for tensor in self.tensors]

    def check(self) -> None:
        """Plan again from the names, shapes and dtypes; raises ``WeightSyncError`` where the result differs."""
        try:
            own = plan_manifest(self.specs, self.bucket_bytes)
        except ConfigError as error:
            raise WeightSyncError(f"manifest {self.fingerprint} cannot be planned: {error}") from None
        if own != self:
            raise WeightSyncError(
                f"manifest {self.fingerprint} does not follow from its own tensors (expected {own.fingerprint}): "
                "both processes must run the same version of streamrl"
            )


def plan_manifest(specs: Iterable[TensorSpec], bucket_bytes: int) -> Manifest:
    """Place tensors into buckets of at most ``bucket_bytes`` (rounded down to a multiple of 256), in the given order.

    Raises ``ConfigError`` for a bucket under 256 bytes, ``WeightSyncError`` for a name given twice, an unknown dtype, a
    negative dimension or no tensor at all.
    """
    limit = bucket_bytes // ALIGNMENT * ALIGNMENT
    if limit <= 0:
        raise ConfigError(f"sync.bucket_bytes: expected at least {ALIGNMENT} bytes, got {bucket_bytes}")
    sized = _sized(specs)
    tensors: list[PlacedTensor] = []
    packer = _Packer(limit)
    for index, (name, shape, dtype, nbytes) in enumerate(sized):
        tensors.append(PlacedTensor(name, shape, dtype, packer.place(index, nbytes), nbytes))
    buckets = packer.finish()
    slot_bytes = buckets[-1].offset + buckets[-1].nbytes if buckets else 0
    content = msgspec.msgpack.encode((PLAN_SCHEMA, bucket_bytes, slot_bytes, tensors, buckets))
    return Manifest(tuple(tensors), buckets, bucket_bytes, slot_bytes, xxhash.xxh3_128_hexdigest(content))


def _sized(specs: Iterable[TensorSpec]) -> list[tuple[str, tuple[int, ...], str, int]]:
    sized: list[tuple[str, tuple[int, ...], str, int]] = []
    seen: set[str] = set()
    for name, shape, dtype in specs:
        if name in seen:
            raise WeightSyncError(f"tensor {name!r} is given twice; give tied weights once, under one name")
        seen.add(name)
        sized.append((name, tuple(shape), dtype, _nbytes(name, shape, dtype)))
    if not sized:
        raise WeightSyncError("a weight update needs at least one tensor, got none")
    return sized


def _nbytes(name: str, shape: Sequence[int], dtype: str) -> int:
    if dtype not in ITEM_BYTES:
        raise WeightSyncError(f"tensor {name!r}: dtype {dtype!r} is unknown; known are {', '.join(sorted(ITEM_BYTES))}")
    if any(size < 0 for size in shape):
        raise WeightSyncError(f"tensor {name!r}: expected sizes of 0 or more, got shape {tuple(shape)}")
    return math.prod(shape) * ITEM_BYTES[dtype]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class _Packer:
    """Next-fit over buckets that abut: one bucket is open, ``start`` bytes from the start of the slot."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buckets: list[Bucket] = []
        self._start = 0
        self._used = 0
        self._pieces: list[Piece] = []

    def place(self, index: int, nbytes: int) -> int:
        """Offset in the slot of tensor number ``index``."""
        if self._used + nbytes > self._limit:
            self._close()
        offset = self._start + self._used
        done = 0
        while done < nbytes:
            size = min(nbytes - done, self._limit)
            self._pieces.append(Piece(index, done, self._used, size))
            self._used += _aligned(size)
            done += size
            if self._used == self._limit:
                self._close()
        return offset

    def finish(self) -> tuple[Bucket, ...]:
        self._close()
        return tuple(self._buckets)

    def _close(self) -> None:
        if self._used:
            self._buckets.append(Bucket(self._start, self._used, tuple(self._pieces)))
        self._start, self._used, self._pieces = self._start + self._used, 0, []
