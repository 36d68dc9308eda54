"""Weights on their way into vLLM's processes: one anonymous file that the actor writes and they map.

As in ``sync/arena.py`` it is a memfd, which the kernel frees with its last process; here it holds one version at a
time, without digests: the tensors were verified when they were staged, and nobody reads while they are written.
"""

from __future__ import annotations

import mmap
import os
import re
import warnings
from collections.abc import Mapping
from typing import Any

import torch

_ALIGNMENT = 256
"""Bytes."""
_SHELF = re.compile(r"/proc/\d+/fd/\d+")


class Shelf:
    """The writing end."""

    def __init__(self) -> None:
        self._fd = -1
        self._size = 0
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def put(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Copy ``tensors`` in; where each lies, as plain data for ``views``. Blocking."""
        places, size = [], 0
        for name, tensor in tensors.items():
            places.append((name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."), size))
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if size != self._size:
            self._make(size)
        for tensor, (_, shape, dtype, offset) in zip(tensors.values(), places, strict=True):
            _view(self._bytes, shape, dtype, offset).copy_(tensor.detach())
        return {"path": f"/proc/{os.getpid()}/fd/{self._fd}", "size": size, "places": places}

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            self._bytes = torch.empty(0, dtype=torch.uint8)
            os.close(self._fd)
            self._fd, self._size = -1, 0

    def _make(self, size: int) -> None:
        self.close()
        self._fd = os.memfd_create("streamrl-vllm-weights", os.MFD_CLOEXEC)
        os.posix_fallocate(self._fd, 0, size)  # a host without the memory says so here, and not by SIGBUS
        self._bytes = torch.frombuffer(mmap.mmap(self._fd, size), dtype=torch.uint8)
        self._size = size


class ShelfReader:
    """The reading end. It may outlive the writer, whose path may then name another file."""

    def __init__(self) -> None:
        self._known: tuple[str, int, int] = ("", 0, 0)
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def views(self, path: str, size: int, places: list[tuple[str, list[int], str, int]]) -> dict[str, torch.Tensor]:
        """Read-only tensors by name, without a copy; they show what the writer puts there next."""
        found = (path, size, os.stat(path).st_ino)
        if found != self._known:
            self._bytes = _map(path, size)
            self._known = found
        return {name: _view(self._bytes, shape, dtype, offset) for name, shape, dtype, offset in places}


def _map(path: str, size: int) -> torch.Tensor:
    if not _SHELF.fullmatch(path):
        raise ValueError(f"weights lie at /proc/PID/fd/FD, got {path!r}")
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(fd, size, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)


def _view(memory: torch.Tensor, shape: list[int], dtype: str, offset: int) -> torch.Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    count = torch.Size(shape).numel()
    return memory[offset : offset + count * kind.itemsize].view(kind).view(shape)
