"""Baseline: one gloo broadcast per tensor, from the trainer to all engines, straight into their parameters."""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist

from streamrl.bench.sync.stage import TIMEOUT_S, Role


class _Side:
    def __init__(self, role: Role) -> None:
        self._role = role
        self._rank = 0 if role.name == "source" else 1 + int(role.name.rpartition("-")[2])

    async def open(self, address: Any) -> None:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{self._role.folder}/gloo-{self._role.options['run']}",
            rank=self._rank,
            world_size=1 + self._role.targets,
            timeout=datetime.timedelta(seconds=TIMEOUT_S / 2),
        )

    async def update(self, version: int) -> dict[str, float]:
        for tensor in self._role.weights.values():
            dist.broadcast(tensor, src=0)
        return {}

    async def close(self) -> None:
        dist.destroy_process_group()


class Source(_Side): ...


class Target(_Side): ...
