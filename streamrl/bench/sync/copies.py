"""The floor: the copies that cannot be avoided where engines keep parameters of their own, and nothing else.

One into shared memory, which stays mapped, then one out of it in each engine, all at once. No digest, no message.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from typing import Any

import torch

from streamrl.bench.sync.stage import Role, memory_file
from streamrl.bench.sync.weights import nbytes


class _Side:
    def __init__(self, role: Role) -> None:
        self._weights = role.weights
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _map(self, fd: int) -> None:
        self._memory = torch.frombuffer(mmap.mmap(fd, nbytes(self._weights)), dtype=torch.uint8)

    def _parts(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """(of the weights, of the memory) for each tensor, as bytes."""
        flat = [tensor.view(-1).view(torch.uint8) for tensor in self._weights.values()]
        return zip(flat, self._memory.split([tensor.nbytes for tensor in flat]), strict=True)

    async def close(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)


class Source(_Side):
    async def open(self, address: Any) -> str:
        self._fd = memory_file("streamrl-bench", nbytes(self._weights))
        self._map(self._fd)
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    async def update(self, version: int) -> dict[str, float]:
        for own, shared in self._parts():
            shared.copy_(own)
        return {}

    async def close(self) -> None:
        await super().close()
        os.close(self._fd)


class Target(_Side):
    async def open(self, address: str) -> None:
        fd = os.open(address, os.O_RDWR | os.O_CLOEXEC)
        self._map(fd)
        os.close(fd)

    async def update(self, version: int) -> dict[str, float]:
        for own, shared in self._parts():
            own.copy_(shared)
        return {}
