"""Baseline: a safetensors file in /dev/shm, written anew for each version, which every engine loads."""

from __future__ import annotations

from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from streamrl.bench.sync.stage import Role


class _Side:
    def __init__(self, role: Role) -> None:
        self._weights = role.weights
        self._path = f"{role.shared}/model.safetensors"

    async def open(self, address: Any) -> None: ...

    async def close(self) -> None: ...


class Source(_Side):
    async def update(self, version: int) -> dict[str, float]:
        save_file(self._weights, self._path)  # aside, then renamed over the version before
        return {}


class Target(_Side):
    async def update(self, version: int) -> dict[str, float]:
        with safe_open(self._path, framework="pt") as file:
            for name, tensor in self._weights.items():
                tensor.copy_(file.get_tensor(name))
        return {}
