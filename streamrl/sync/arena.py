"""The publisher's slab: two slots of one manifest in an anonymous file that no ending leaves behind.

The memory is a *memfd* (``memfd_create(2)``), shared by POSIX ``mmap(MAP_SHARED)``. Readers on this host open it
through ``/proc/<pid>/fd/<fd>`` of its owner. ``shm_open`` is not used: its name in ``/dev/shm`` outlives an owner that
is killed with SIGKILL, and the memory with it. A memfd has no name; the kernel frees it with the last process that maps
it, however that process ends, and readers that mapped it before their sender died keep what they have.

A new version goes into the slot that does not hold the current one (double buffering): a reader of the current version
is not disturbed. Layout::

    | header, 4096 bytes: magic, fingerprint, version of slot 0, version of slot 1 | slot 0 | slot 1 |

A slot's version reads -1 while the slot is written, so that a reader that was too slow notices it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping

import torch

from streamrl.errors import WeightSyncError
from streamrl.sync.manifest import ITEM_BYTES, Manifest, PlacedTensor, TensorSpec
from streamrl.sync.staging import as_tensor, bucket_of

HEADER_BYTES = 4096
MAGIC = b"streamrl weights"
_STAMPS = slice(64, 80)
"""Header bytes of the two versions, int64."""

NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


def describe(named_tensors: NamedTensors) -> list[TensorSpec]:
    """(name, shape, dtype) of each tensor, in order: the input of ``plan_manifest``."""
    return [(name, tuple(tensor.shape), _dtype_name(tensor)) for name, tensor in named_pairs(named_tensors)]


class Arena:
    """The writing side. Owns the memfd; ``path`` is what readers open, valid until this process closes it or ends.

    Raises ``WeightSyncError`` where memfd or /proc is missing (not Linux) or the memory cannot be had.
    """

    def __init__(self, manifest: Manifest) -> None:
        if not hasattr(os, "memfd_create") or not os.path.isdir("/proc/self/fd"):
            raise WeightSyncError("weight sync needs Linux with memfd_create and a mounted /proc")
        self.manifest = manifest
        size = HEADER_BYTES + 2 * manifest.slot_bytes
        fd = os.memfd_create("streamrl-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Reserves the pages now: a host without the memory is told here and not by SIGBUS in the middle of a run.
            os.posix_fallocate(fd, 0, size)
            # No one can truncate the file under a reader's mapping, which would also end it by SIGBUS.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._memory = memoryview(mmap.mmap(fd, size, flags=mmap.MAP_SHARED))
        except OSError as error:
            os.close(fd)
            raise WeightSyncError(
                f"no shared memory of {size} bytes for two versions of the weights: {error}"
            ) from None
        self._fd: int | None = fd
        self.path = f"/proc/{os.getpid()}/fd/{fd}"
        self._stamps = as_tensor(self._memory[_STAMPS]).view(torch.int64)
        self._stamps.fill_(-1)
        self._memory[: len(_identity(manifest))] = _identity(manifest)

    def slot(self, slot: int) -> memoryview:
        """All bytes of one slot."""
        return _slot(self._memory, self.manifest, slot)

    def bucket(self, slot: int, index: int) -> memoryview:
        return bucket_of(self.manifest, self.slot(slot), index)

    def fill(self, slot: int, on_bucket: Callable[[int], None]) -> Filling:
        """Begin to write a version into ``slot``, which holds none from now on until ``seal``."""
        self._stamps[slot] = -1
        return Filling(self.manifest, self.slot(slot), on_bucket)

    def seal(self, slot: int, version: int) -> None:
        """The slot holds all of ``version``."""
        self._stamps[slot] = version

    def close(self) -> None:
        """Close the descriptor and drop the mapping; readers keep theirs. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            self._memory, self._stamps = memoryview(b""), torch.empty(0, dtype=torch.int64)


class Filling:
    """A slot while the tensors of one version are written into it, whole or in parts, in any order.

    ``on_bucket(index)`` is called on the writing thread as soon as the last byte of a bucket is there.
    """

    def __init__(self, manifest: Manifest, memory: memoryview, on_bucket: Callable[[int], None]) -> None:
        self.manifest = manifest
        self._flat = as_tensor(memory)
        self._on_bucket = on_bucket
        self._places = {tensor.name: tensor for tensor in manifest.tensors}
        self._missing = {tensor.name: tensor.nbytes for tensor in manifest.tensors}
        """Bytes that each tensor still lacks."""
        self._starts = [bucket.offset for bucket in manifest.buckets]
        self._lacking = [sum(piece.nbytes for piece in bucket.pieces) for bucket in manifest.buckets]

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Write a whole tensor. Raises ``WeightSyncError`` for an unknown or repeated name, another shape or dtype."""
        place = self._place(name)
        shape, dtype = tuple(tensor.shape), _dtype_name(tensor)
        if (shape, dtype) != (place.shape, place.dtype):
            raise WeightSyncError(f"tensor {name!r}: expected {place.dtype} {place.shape}, got {dtype} {shape}")
        self.view(name, 0, tensor.numel()).view(place.shape).copy_(tensor.detach())
        self.wrote(name, 0, tensor.numel())

    def view(self, name: str, start: int, count: int) -> torch.Tensor:
        """``count`` elements of a tensor from its element ``start`` on, flat and to be written to."""
        place = self._place(name)
        size = ITEM_BYTES[place.dtype]
        assert (start + count) * size <= place.nbytes, f"{name}: elements {start} … {start + count} of {place.shape}"
        begin = place.offset + start * size
        dtype = getattr(torch, place.dtype)
        return self._flat[begin : begin + count * size].view(dtype) if count else torch.empty(0, dtype=dtype)

    def wrote(self, name: str, start: int, count: int) -> None:
        """Those elements are final. Each element is reported once."""
        place = self._place(name)
        size = ITEM_BYTES[place.dtype]
        self._missing[name] -= count * size
        if not self._missing[name]:
            del self._missing[name]
        begin, end = place.offset + start * size, place.offset + (start + count) * size
        index = bisect_right(self._starts, begin) - 1
        while begin < end:
            bucket = self.manifest.buckets[index]
            stop = min(end, bucket.offset + bucket.nbytes)
            self._lacking[index] -= stop - begin
            if not self._lacking[index]:
                self._on_bucket(index)
            begin, index = stop, index + 1

    def finish(self, version: int) -> None:
        """Raises ``WeightSyncError`` when a tensor is missing or incomplete."""
        if self._missing:
            first = next(iter(self._missing))
            raise WeightSyncError(f"version {version} lacks {len(self._missing)} tensors, the first is {first!r}")

    def _place(self, name: str) -> PlacedTensor:
        if name not in self._missing:
            raise WeightSyncError(f"tensor {name!r} is not in the manifest, or was given twice")
        return self._places[name]


class ArenaReader:
    """The reading side: one read-only mapping of an ``Arena`` in another process.

    Raises ``WeightSyncError`` when ``path`` cannot be opened or holds the weights of another manifest.
    """

    def __init__(self, path: str, manifest: Manifest) -> None:
        self.manifest = manifest
        self._memory = _map_read_only(path, HEADER_BYTES + 2 * manifest.slot_bytes)
        expected = _identity(manifest)
        if bytes(self._memory[: len(expected)]) != expected:
            raise WeightSyncError(f"{path} does not hold the weights of manifest {manifest.fingerprint}")
        self._stamps = as_tensor(self._memory[_STAMPS]).view(torch.int64)

    def slot(self, slot: int) -> memoryview:
        """All bytes of one slot. What views them keeps the mapping alive after ``close``."""
        return _slot(self._memory, self.manifest, slot)

    def holds(self, version: int, slot: int) -> bool:
        """Whether the slot holds all of ``version`` at this moment."""
        return int(self._stamps[slot]) == version

    def close(self) -> None:
        """Drop the mapping; it goes with the last tensor that views it. ``holds`` answers as before. Idempotent."""
        self._memory, self._stamps = memoryview(b""), self._stamps.clone()


def named_pairs(named_tensors: NamedTensors) -> Iterable[tuple[str, torch.Tensor]]:
    return named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _identity(manifest: Manifest) -> bytes:
    return MAGIC + manifest.fingerprint.encode()


def _slot(memory: memoryview, manifest: Manifest, slot: int) -> memoryview:
    start = HEADER_BYTES + slot * manifest.slot_bytes
    return memory[start : start + manifest.slot_bytes]


def _map_read_only(path: str, size: int) -> memoryview:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise WeightSyncError(
            f"cannot open the publisher's memory {path}: {error.strerror}; the publisher must be alive, on this host, "
            "under the same user and in the same PID namespace"
        ) from None
    try:
        found = os.fstat(fd).st_size
        if found != size:
            raise WeightSyncError(f"{path}: expected {size} bytes of shared memory, got {found}")
        return memoryview(mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))
    finally:
        os.close(fd)
