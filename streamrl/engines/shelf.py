"""Weights on their way into the processes of vLLM and SGLang, which map an anonymous file of the actor's.

Where all weights lie in such a file already, as those of ``sync/arena.py`` do on the host of the trainer, the engine's
processes read them there. Else they are copied into one of our own.

As in ``sync/arena.py`` it is a memfd, which the kernel frees with its last process; here it holds one version at a
time, without digests: the tensors were verified when they were staged, and nobody reads while they are written.
"""

from __future__ import annotations

import mmap
import os
import re
import threading
import warnings
from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

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
        self._writing = threading.Lock()
        """Of a ``put`` that nobody waits for any more, its thread goes on."""

    def put(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Where each of ``tensors`` lies, as plain data for ``views``, after a copy where that is needed. Blocking.

        They must stay as they are for as long as they are read.
        """
        return _in_one_file(tensors) or self._copied(tensors)

    def _copied(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        places, size = [], 0
        for name, tensor in tensors.items():
            places.append((name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."), size))
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        with self._writing:
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
        self._fd = os.memfd_create("streamrl-weights-for-engine", os.MFD_CLOEXEC)
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


class _Mapping(NamedTuple):
    """A stretch of a process's memory that is part of an anonymous file, shared with whoever else maps it."""

    start: int
    """Address."""
    end: int
    offset: int
    """In the file."""
    inode: int


def _in_one_file(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any] | None:
    """As ``Shelf.put``; None where they do not lie in one file, each in one piece."""
    mappings, inodes, places = _mappings(), set(), []
    for name, tensor in tensors.items():
        shape, dtype = list(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        if not tensor.nbytes:
            places.append((name, shape, dtype, 0))
            continue
        start = tensor.data_ptr() if tensor.device.type == "cpu" and tensor.is_contiguous() else 0
        index = bisect_right(mappings, start, key=lambda each: each.start) - 1
        if index < 0 or start + tensor.nbytes > mappings[index].end:
            return None
        offset = start - mappings[index].start + mappings[index].offset
        if offset % tensor.itemsize:
            return None
        inodes.add(mappings[index].inode)
        places.append((name, shape, dtype, offset))
    if len(inodes) != 1:
        return None
    fd, size = _open_file(inodes.pop())
    return {"path": f"/proc/{os.getpid()}/fd/{fd}", "size": size, "places": places} if size else None


def _mappings() -> list[_Mapping]:
    """Of this process, by address."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, offset, _, inode, *path = line.split(maxsplit=5)
        if access[3] == "s" and path and path[0].startswith("/memfd:"):
            start, end = (int(each, 16) for each in addresses.split("-"))
            found.append(_Mapping(start, end, int(offset, 16), int(inode)))
    return sorted(found)


def _open_file(inode: int) -> tuple[int, int]:
    """Descriptor and size of an anonymous file that this process maps: ``mmap.mmap`` keeps one open. (-1, 0): none."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(entry).startswith("/memfd:") and (found := entry.stat()).st_ino == inode:
                return int(entry.name), found.st_size
        except OSError:  # closed meanwhile
            continue
    return -1, 0


def _map(path: str, size: int) -> torch.Tensor:
    if not _SHELF.fullmatch(path):
        raise ValueError(f"weights lie at /proc/PID/fd/FD, got {path!r}")
    # On another host such a path may be a pipe, whose opening waits for somebody to write to it.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
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
