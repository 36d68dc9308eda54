"""Weights in shared memory: two slots of one manifest in an anonymous file that no ending leaves behind.

The memory is a *memfd* (``memfd_create(2)``), shared by POSIX ``mmap(MAP_SHARED)``. Readers open it through
``/proc/<pid>/fd/<fd>`` of its owner. ``shm_open`` is not used: its name in ``/dev/shm`` outlives an owner that is
killed with SIGKILL, and the memory with it. A memfd has no name; the kernel frees it with the last process that maps
it, however that process ends, and readers that mapped it before their sender died keep what they have.

Version v lies in slot v % 2 (double buffering): a reader of version v is not disturbed while v + 1 is written. Layout::

    | header, 4096 bytes: magic, fingerprint, version of slot 0, version of slot 1 | slot 0 | slot 1 |

A slot's version reads -1 while the slot is written, so that a reader that was too slow notices it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch
import xxhash

from streamrl.errors import WeightSyncError
from streamrl.sync.manifest import Manifest, PlacedTensor, TensorSpec

HEADER_BYTES = 4096
MAGIC = b"streamrl weights"
_STAMPS = slice(64, 80)
"""Header bytes of the two versions, int64."""

NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


def describe(named_tensors: NamedTensors) -> list[TensorSpec]:
    """(name, shape, dtype) of each tensor, in order: the input of ``plan_manifest``."""
    return [(name, tuple(tensor.shape), _dtype_name(tensor)) for name, tensor in _pairs(named_tensors)]


class Arena:
    """The writing side. Owns the memfd; ``path`` is what readers open, valid until this process closes it or ends.

    Raises ``WeightSyncError`` where memfd or /proc is missing (not Linux) or the memory cannot be had.
    """

    def __init__(self, manifest: Manifest) -> None:
        if not hasattr(os, "memfd_create") or not os.path.isdir("/proc/self/fd"):
            raise WeightSyncError("shared-memory weight sync needs Linux with memfd_create and a mounted /proc")
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
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._stamps = self._bytes[_STAMPS].view(torch.int64)
        self._stamps.fill_(-1)
        self._memory[: len(_identity(manifest))] = _identity(manifest)

    def write(self, version: int, named_tensors: NamedTensors) -> list[int]:
        """Copy every tensor of the manifest into the slot of ``version``; the xxh3-64 digest of each bucket.

        ``named_tensors``: a mapping, or pairs that may be produced one at a time, in any order, from any device.
        Raises ``WeightSyncError`` for a missing, unknown or repeated name, another shape or another dtype; the slot
        then holds no version.
        """
        slot = version % 2
        placed = {tensor.name: tensor for tensor in self.manifest.tensors}
        self._stamps[slot] = -1
        for name, tensor in _pairs(named_tensors):
            place = placed.pop(name, None)
            if place is None:
                raise WeightSyncError(f"tensor {name!r} is not in the manifest, or was given twice")
            _require_fit(place, tensor)
            _view(self._bytes, _slot_start(self.manifest, slot), place).copy_(tensor.detach())
        if placed:
            raise WeightSyncError(f"version {version} lacks {len(placed)} tensors, the first is {next(iter(placed))!r}")
        digests = _digests(self.manifest, self._memory, _slot_start(self.manifest, slot))
        self._stamps[slot] = version
        return digests

    def close(self) -> None:
        """Close the descriptor and drop the mapping; readers keep theirs. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            self._memory, self._bytes, self._stamps = _nothing()


class ArenaReader:
    """The reading side: one read-only mapping of an ``Arena`` in another process.

    Raises ``WeightSyncError`` when ``path`` cannot be opened or holds the weights of another manifest.
    """

    def __init__(self, path: str, manifest: Manifest) -> None:
        manifest.check()
        self.manifest = manifest
        self._memory = _map_read_only(path, HEADER_BYTES + 2 * manifest.slot_bytes)
        expected = _identity(manifest)
        if bytes(self._memory[: len(expected)]) != expected:
            raise WeightSyncError(f"{path} does not hold the weights of manifest {manifest.fingerprint}")
        with warnings.catch_warnings():
            # torch knows no read-only tensors and warns that this one must not be written to; see ``tensors``.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._stamps = self._bytes[_STAMPS].view(torch.int64)

    def holds(self, version: int) -> bool:
        """Whether the slot holds all of ``version`` at this moment."""
        return int(self._stamps[version % 2]) == version

    def verify(self, version: int, digests: Sequence[int]) -> None:
        """Compare each bucket of the slot with its digest; a ``WeightSyncError`` names the first that differs.

        Releases the interpreter lock while it reads, so it may run on a thread beside the event loop.
        """
        self._require(version)
        start = _slot_start(self.manifest, version % 2)
        _compare(self.manifest, _digests(self.manifest, self._memory, start), digests, version)

    def tensors(self, version: int) -> dict[str, torch.Tensor]:
        """Views of the slot by name, without a copy. Reading only: a write to one of them ends the process by SIGSEGV.

        They show version ``version`` until the publisher writes version + 2, which it does not do before every member
        acknowledged version + 1. They keep the mapping alive after ``close``.
        """
        start = _slot_start(self.manifest, version % 2)
        return {tensor.name: _view(self._bytes, start, tensor) for tensor in self.manifest.tensors}

    def copy(self, version: int, digests: Sequence[int]) -> dict[str, torch.Tensor]:
        """Private tensors of ``version``, verified after the copy: the slot may be reused at any time.

        Raises ``WeightSyncError`` when the slot was overwritten meanwhile or a bucket differs from its digest.
        """
        self._require(version)
        start = _slot_start(self.manifest, version % 2)
        private = self._bytes[start : start + self.manifest.slot_bytes].clone()
        _compare(self.manifest, _digests(self.manifest, private.numpy().data, 0), digests, version)
        return {tensor.name: _view(private, 0, tensor) for tensor in self.manifest.tensors}

    def close(self) -> None:
        """Drop the mapping; it goes with the last tensor that views it. Idempotent."""
        self._memory, self._bytes, self._stamps = _nothing()

    def _require(self, version: int) -> None:
        if not self.holds(version):
            found = int(self._stamps[version % 2])
            raise WeightSyncError(f"slot {version % 2} was to hold version {version}, it holds {found}")


def _pairs(named_tensors: NamedTensors) -> Iterable[tuple[str, torch.Tensor]]:
    return named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _identity(manifest: Manifest) -> bytes:
    return MAGIC + manifest.fingerprint.encode()


def _slot_start(manifest: Manifest, slot: int) -> int:
    return HEADER_BYTES + slot * manifest.slot_bytes


def _require_fit(place: PlacedTensor, tensor: torch.Tensor) -> None:
    shape, dtype = tuple(tensor.shape), _dtype_name(tensor)
    if (shape, dtype) != (place.shape, place.dtype):
        raise WeightSyncError(f"tensor {place.name!r}: expected {place.dtype} {place.shape}, got {dtype} {shape}")


def _view(memory: torch.Tensor, start: int, place: PlacedTensor) -> torch.Tensor:
    dtype = getattr(torch, place.dtype)
    if not place.nbytes:
        return torch.empty(place.shape, dtype=dtype)
    offset = start + place.offset
    return memory[offset : offset + place.nbytes].view(dtype).view(place.shape)


def _digests(manifest: Manifest, memory: memoryview, start: int) -> list[int]:
    return [
        xxhash.xxh3_64_intdigest(memory[start + bucket.offset : start + bucket.offset + bucket.nbytes])
        for bucket in manifest.buckets
    ]


def _compare(manifest: Manifest, got: Sequence[int], expected: Sequence[int], version: int) -> None:
    if len(got) != len(expected):
        raise WeightSyncError(f"version {version}: expected {len(got)} bucket digests, got {len(expected)}")
    for index, (own, sent) in enumerate(zip(got, expected, strict=True)):
        if own != sent:
            names = ", ".join(manifest.tensors[piece.tensor].name for piece in manifest.buckets[index].pieces[:3])
            raise WeightSyncError(
                f"version {version}: bucket {index} of {len(got)} ({names}, …) is corrupted: "
                f"digest {own:016x}, expected {sent:016x}"
            )


def _nothing() -> tuple[memoryview, torch.Tensor, torch.Tensor]:
    return memoryview(b""), torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.int64)


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
