"""Host memory of one process for two versions, and slots of bytes seen as named tensors."""

from __future__ import annotations

import mmap
import warnings

import torch
import xxhash

from streamrl.errors import WeightSyncError
from streamrl.sync.manifest import Manifest, PlacedTensor

Tensors = dict[str, torch.Tensor]


class HostStaging:
    """Two slots of anonymous memory (double buffering): one serves or is the base of the next, one is filled."""

    def __init__(self, manifest: Manifest) -> None:
        self._slots = [slot_memory(manifest), slot_memory(manifest)]

    def memory(self, slot: int) -> memoryview:
        return self._slots[slot]

    def close(self) -> None:
        """Let go of it; it is freed with the last tensor that views it. Idempotent."""
        self._slots = [memoryview(b""), memoryview(b"")]


def slot_memory(manifest: Manifest) -> memoryview:
    """Zeroed private memory for one version. Its pages are taken when they are first written to."""
    return memoryview(mmap.mmap(-1, max(1, manifest.slot_bytes)))[: manifest.slot_bytes]


def bucket_of(manifest: Manifest, memory: memoryview, index: int) -> memoryview:
    """The bytes of one bucket in a slot."""
    bucket = manifest.buckets[index]
    return memory[bucket.offset : bucket.offset + bucket.nbytes]


def digest_of(memory: memoryview) -> int:
    """xxh3-64. Releases the interpreter lock."""
    return xxhash.xxh3_64_intdigest(memory)


def require_digest(manifest: Manifest, version: int, index: int, own: int, expected: int) -> None:
    """``WeightSyncError`` that names the bucket where its digest is not that of what was sent."""
    if own != expected:
        names = ", ".join(manifest.tensors[piece.tensor].name for piece in manifest.buckets[index].pieces[:3])
        raise WeightSyncError(
            f"version {version}: bucket {index} of {len(manifest.buckets)} ({names}, …) is corrupted: "
            f"digest {own:016x}, expected {expected:016x}"
        )


def tensors_in(manifest: Manifest, memory: memoryview) -> Tensors:
    """Every tensor of a slot by name, as a view. A view of read-only memory must not be written to: SIGSEGV."""
    flat = as_tensor(memory)
    return {tensor.name: view_of(flat, tensor) for tensor in manifest.tensors}


def as_tensor(memory: memoryview) -> torch.Tensor:
    """The bytes as a flat uint8 tensor that shares and keeps them."""
    if not memory.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        # torch knows no read-only tensors and warns that this one must not be written to.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)


def view_of(flat: torch.Tensor, place: PlacedTensor) -> torch.Tensor:
    dtype = getattr(torch, place.dtype)
    if not place.nbytes:
        return torch.empty(place.shape, dtype=dtype)
    return flat[place.offset : place.offset + place.nbytes].view(dtype).view(place.shape)
