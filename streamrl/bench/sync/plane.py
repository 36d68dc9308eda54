"""streamrl's weight plane: a ``Publisher``, and a ``Subscriber`` for an engine that is nothing but its parameters."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from streamrl.bench.sync.stage import TIMEOUT_S, Role
from streamrl.errors import StreamRLError
from streamrl.sync.arena import describe
from streamrl.sync.gather import gather
from streamrl.sync.manifest import plan_manifest
from streamrl.sync.publisher import Publisher
from streamrl.sync.slab import Slab
from streamrl.sync.subscriber import Subscriber


class ParameterEngine:
    """Serves from the tensors that it is given, as the embedded engine does, or copies them, as vLLM does.

    With ``sync.stage=device`` one that copies does so before it is paused, into a second set of its own weights.
    """

    def __init__(self, weights: dict[str, torch.Tensor], *, copies: bool) -> None:
        self._weights = weights
        self._own = dict(weights)
        self._second: dict[str, torch.Tensor] = {}
        self._staged = False
        self._copies = copies
        self.version = -1

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def stage(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        if not self._second:
            self._second = {name: torch.empty_like(tensor) for name, tensor in self._own.items()}
        await asyncio.to_thread(_copy, self._second, tensors)
        self._staged = True

    def unstage(self) -> None:
        self._staged = False

    async def load(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        if self._staged:
            serving, self._staged = dict(self._weights), False
            self._weights.update(self._second)
            self._second = serving
        elif self._copies:
            await asyncio.to_thread(_copy, self._weights, tensors)
        else:
            self._weights.update(tensors)
        self.version = version

    def close(self) -> None:
        """Let go of what was given, and of the second set."""
        self._weights.update(self._own)
        self._second = {}


def _copy(weights: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        weights[name].copy_(tensor)


class Source:
    def __init__(self, role: Role) -> None:
        self._role = role

    async def open(self, address: Any) -> str:
        endpoint = f"ipc://{self._role.folder}/sync"
        manifest = plan_manifest(describe(self._role.weights), self._role.options["bucket_bytes"])
        slab = Slab(
            manifest,
            endpoint=endpoint,
            folder=Path(self._role.shared, "weights"),
            timeout_s=TIMEOUT_S,
            transport=self._role.options["transport"],
            delta=self._role.options["delta"],
            anchor_every=1 << 30,
        )
        self._publisher = Publisher(
            endpoint,
            slab,
            timeout_s=TIMEOUT_S,
            on_event=_ignore,
            on_unresponsive=_unresponsive,
            rolling=self._role.options["rolling"],
        )
        self._publisher.set_members({f"rollouter-{index}" for index in range(self._role.targets)}, set())
        self._running = asyncio.create_task(self._publisher.run())
        return endpoint

    async def update(self, version: int) -> dict[str, float]:
        content = self._publisher.open(version)

        def write() -> None:  # as a trainer of one rank does
            with content:
                gather(self._role.weights.items(), content.filling.manifest, content.filling)

        async with asyncio.TaskGroup() as tasks:
            publishing = tasks.create_task(self._publisher.publish(version))
            await asyncio.to_thread(write)
        report = publishing.result()
        return {"pause": report.pause_seconds, "fraction": report.delta_fraction}

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        self._publisher.close()


class Target:
    def __init__(self, role: Role) -> None:
        self._role = role

    async def open(self, address: str) -> None:
        self._engine = ParameterEngine(self._role.weights, copies=self._role.options["copies"])
        engine: Any = self._engine
        stage = "device" if self._role.options["ahead"] else "host"
        self._subscriber = Subscriber(address, self._role.name, engine, _ignore, stage=stage, timeout_s=TIMEOUT_S)
        self._running = asyncio.create_task(self._subscriber.run())

    async def update(self, version: int) -> dict[str, float]:
        raise AssertionError("the source's update ends when all targets have loaded")

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        self._engine.close()


def _ignore(event: str, fields: dict[str, Any]) -> None: ...


def _unresponsive(member: str, waited_for: str) -> None:
    raise StreamRLError(f"{member} did not {waited_for} within {TIMEOUT_S:g} s")
