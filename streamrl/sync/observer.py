"""Whoever wants some versions for itself, such as the evaluator: copies them out and holds nobody up."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

from streamrl.sync import messages as wire
from streamrl.sync.arrival import Arrival
from streamrl.sync.link import Link, OnEvent, same
from streamrl.sync.staging import Tensors

PENDING_VERSIONS = 8
PENDING_BYTES = 256 << 20
"""What an ``Observer`` keeps for its caller at most, though never less than one version."""


@dataclass(frozen=True)
class _Kept:
    stage: wire.Stage
    tensors: Tensors


class Observer:
    """Copies out the versions that are published with ``observe=True``, in order and none left out.

    A version is handed out only when it has become current. Those that wait to be taken are bounded: 8 versions or 256
    MiB, whichever is less, but at least one. When that many wait, the next Stage is not answered before one is taken,
    and ``publish`` waits for the answer.
    """

    def __init__(self, endpoint: str, name: str, on_event: OnEvent, *, timeout_s: float = 60.0) -> None:
        self._link = Link(endpoint, name, timeout_s, on_event)
        self._staged: _Kept | None = None
        self._waiting: deque[_Kept] = deque()
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        """Receive until cancelled: a task of the evaluator's TaskGroup."""
        await self._link.run(self._handle)

    async def updates(self) -> AsyncIterator[tuple[int, Tensors]]:
        """(version, private tensors by name) of each observed version, for as long as the caller asks."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._waiting)
                taken = self._waiting.popleft()
                self._changed.notify_all()
            yield taken.stage.version, taken.tensors

    async def _handle(self, message: wire.Stage | wire.Commit | wire.Discard) -> None:
        match message:
            case wire.Stage():
                await self._stage(message)
            case wire.Commit():
                await self._keep(message)
            case wire.Discard():
                if self._staged and same(self._staged.stage, message):
                    self._staged = None
                await self._link.discard(message)

    async def _stage(self, stage: wire.Stage) -> None:
        if self._staged is not None and same(self._staged.stage, stage):
            await self._link.send(wire.Staged(session=stage.session, update=stage.update))
        else:
            self._staged = None
            await self._link.begin(stage, self._take_in)

    async def _take_in(self, arrival: Arrival) -> None:
        async with self._changed:
            await self._changed.wait_for(self._has_room)
        tensors = await self._link.take_in(arrival)
        if not arrival.private_memory:  # the next version would be staged over it
            tensors = await asyncio.to_thread(lambda: {name: tensor.clone() for name, tensor in tensors.items()})
        self._staged = _Kept(arrival.stage, tensors)
        await self._link.send(wire.Staged(session=arrival.stage.session, update=arrival.stage.update))

    def _has_room(self) -> bool:
        versions = min(PENDING_VERSIONS, PENDING_BYTES // max(1, self._link.payload_bytes))
        return len(self._waiting) < max(1, versions)

    async def _keep(self, commit: wire.Commit) -> None:
        """The staged version is current now."""
        staged, self._staged = self._staged, None
        if staged and same(staged.stage, commit):
            async with self._changed:
                self._waiting.append(staged)
                self._changed.notify_all()
