"""Payloads by reference (``queue.backend: nixl``): rollouters keep them in an arena, trainer ranks read them there.

A slot is written before its group's description goes to the buffer, and freed when the buffer says that the lease is
closed, whatever became of it. A full arena makes ``write`` wait: back-pressure without a byte in the buffer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from streamrl.buffers.links.link_nixl import ArenaReader, ArenaWriter
from streamrl.buffers.links.link_zmq import ClientLink
from streamrl.buffers.queue.places import Found
from streamrl.buffers.wire.messages import BatchGroup, GroupMeta, InArena, Released, ReleaseRequest
from streamrl.buffers.wire.payload import Payload, ranges, rebase
from streamrl.buffers.wire.reference import Reference, ReferenceLost
from streamrl.errors import StreamRLError, WireError


class ArenaPlace:
    """A producer's arena of ``nbytes`` bytes. Raises ``ConfigError`` where NIXL is not installed."""

    def __init__(self, name: str, nbytes: int) -> None:
        self._writer = ArenaWriter(name, nbytes)
        self._held: dict[int, Reference] = {}
        """By lease."""
        self._changed = asyncio.Event()
        self._releasing: asyncio.Task[None] | None = None
        self._link: ClientLink | None = None

    def attach(self, link: ClientLink) -> None:
        self._link = link

    async def write(self, group: GroupMeta, payload: Payload) -> InArena:
        """Copy the payload into a slot; waits while the arena is full. ``ConfigError`` if it can never fit."""
        if self._releasing is None:
            self._releasing = asyncio.create_task(self._release(), name="arena: release of closed leases")
        if self._releasing.done():
            self._releasing.result()
            raise StreamRLError("the arena is closed")
        reference = await self._writer.write(payload.frames, payload.nbytes)
        self._held[group.lease] = reference
        self._changed.set()
        return InArena(reference, self._writer.metadata)

    async def _release(self) -> None:
        """Free slots as leases are closed. The request is made anew whenever there are more slots to ask for."""
        assert self._link is not None
        while True:
            await self._changed.wait()
            while self._held:
                self._changed.clear()
                asked = asyncio.ensure_future(
                    self._link.request(ReleaseRequest(list(self._held)), what="leases to be closed")
                )
                changed = asyncio.ensure_future(self._changed.wait())
                try:
                    await asyncio.wait((asked, changed), return_when=asyncio.FIRST_COMPLETED)
                    if asked.done():
                        self._free(asked.result()[0].body)
                finally:
                    asked.cancel()
                    changed.cancel()

    def _free(self, answer: object) -> None:
        if not isinstance(answer, Released):
            raise WireError(f"expected released leases, got {type(answer).__name__}")
        for lease in answer.leases:
            if (reference := self._held.pop(lease, None)) is not None:
                self._writer.free(reference)

    def statistics(self) -> dict[str, float]:
        return self._writer.statistics()

    def close(self) -> None:
        if self._releasing is not None:
            self._releasing.cancel()
        self._writer.close()


class ArenaSource:
    """A consumer's side: one-sided reads of the wanted columns."""

    def __init__(self, name: str) -> None:
        self._reader = ArenaReader(name)

    async def read(self, groups: Sequence[BatchGroup], names: Sequence[str]) -> Found:
        """Lost: groups whose rollouter is gone, or whose slot holds something else by now."""
        wanted: list[tuple[Reference, list[tuple[int, int]]]] = []
        for each in groups:
            assert each.reference is not None
            reference, metadata = each.reference.reference, each.reference.metadata
            if not self._reader.knows(reference.agent):
                self._reader.add(reference.agent, metadata)
            wanted.append((reference, ranges(each.group.columns, names)))
        found = Found()
        for each, result in zip(groups, await self._reader.read_many(wanted), strict=True):
            if isinstance(result, ReferenceLost):
                found.lost[each.group.lease] = str(result)
            else:
                found.add(each.group, rebase(each.group.columns, names), Payload(list(result)))
        return found

    def close(self) -> None:
        self._reader.close()
