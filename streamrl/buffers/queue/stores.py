"""The clients of stores: rollouters write payloads, trainer ranks read columns, the buffer says what is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from itertools import groupby

from streamrl.buffers.ledger import Ledger
from streamrl.buffers.links.link_zmq import ClientLink
from streamrl.buffers.queue.places import Found
from streamrl.buffers.wire.messages import (
    BatchGroup,
    Fetched,
    FetchRequest,
    FreeRequest,
    GroupMeta,
    StoreRequest,
)
from streamrl.buffers.wire.payload import Payload
from streamrl.errors import WireError


class StorePlace:
    """A producer's side. ``links``: one per store, in the order of the shards."""

    def __init__(self, links: Sequence[ClientLink]) -> None:
        self._links = links

    def attach(self, link: ClientLink) -> None:
        """The stores need nothing from the buffer."""

    async def write(self, group: GroupMeta, payload: Payload) -> None:
        """Return once the lease's store has taken responsibility for the payload."""
        link = self._links[group.lease % len(self._links)]
        await link.request(StoreRequest(group.lease, group.columns), payload, what=f"payload of lease {group.lease}")

    def statistics(self) -> dict[str, float]:
        """The stores report their own."""
        return {}

    def close(self) -> None:
        for link in self._links:
            link.close()


class StoreSource:
    """A consumer's side."""

    def __init__(self, links: Sequence[ClientLink]) -> None:
        self._links = links

    async def read(self, groups: Sequence[BatchGroup], names: Sequence[str]) -> Found:
        """Lost: what a store does not hold, because its disk lost power before the payload was forced to it."""

        def shard(each: BatchGroup) -> int:
            return each.group.lease % len(self._links)

        found = Found()
        parts = [(index, list(part)) for index, part in groupby(sorted(groups, key=shard), key=shard)]
        await asyncio.gather(*(self._read(self._links[index], part, names, found) for index, part in parts))
        for each in groups:
            if each.group.lease not in found.groups:
                found.lost.setdefault(each.group.lease, f"store {shard(each)} does not hold its payload")
        return found

    async def _read(self, link: ClientLink, groups: list[BatchGroup], names: Sequence[str], found: Found) -> None:
        described = {each.group.lease: each.group for each in groups}
        request = FetchRequest(list(described), list(names))
        header, payload = await link.request(request, what=f"payloads of {len(groups)} groups")
        if not isinstance(header.body, Fetched):
            raise WireError(f"expected columns, got {type(header.body).__name__}")
        at = 0
        for each in header.body.groups:
            frames = payload.frames[at : at + each.frames]
            at += each.frames
            if each.lease in described:
                found.add(described[each.lease], each.columns, Payload(frames))

    def close(self) -> None:
        for link in self._links:
            link.close()


class StoreJanitor:
    """The buffer's side: tells every store which leases are closed, one request per store at a time."""

    def __init__(self, links: Sequence[ClientLink], ledger: Ledger) -> None:
        self._links = links
        self._ledger = ledger
        oldest = self._oldest()
        outstanding = ledger.records
        # What a buffer closed just before it died may not have reached the stores.
        self._closed = [lease for lease in range(oldest, ledger.issued) if lease not in outstanding]
        self._changed = asyncio.Event()
        self._changed.set()

    def close_lease(self, lease: int) -> None:
        self._closed.append(lease)
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            closed, self._closed = self._closed, []
            await asyncio.gather(*(self._free(index, closed) for index in range(len(self._links))))

    async def _free(self, index: int, closed: Collection[int]) -> None:
        own = [lease for lease in closed if lease % len(self._links) == index]
        await self._links[index].request(FreeRequest(own, self._oldest()), what=f"store {index} to free payloads")

    def _oldest(self) -> int:
        return min(self._ledger.records, default=self._ledger.issued)

    def close(self) -> None:
        for link in self._links:
            link.close()
