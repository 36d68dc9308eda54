"""Stores: payloads apart from their descriptions, kept over the death of a store, freed when their lease is closed."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from buffer_support import group, settings, start

from streamrl.buffers.ledger import Ledger
from streamrl.buffers.links.link_zmq import ClientLink
from streamrl.buffers.queue.store_server import StoreServer
from streamrl.buffers.queue.stores import StoreJanitor, StorePlace, StoreSource
from streamrl.buffers.wire.groups import pack_group
from streamrl.buffers.wire.messages import BatchGroup, FetchRequest, FreeRequest, GroupMeta, Status, StoreRequest
from streamrl.buffers.wire.payload import Payload
from streamrl.clock import ManualClock
from streamrl.errors import StreamRLError, WireError
from streamrl.types import Lease

NAMES = ("tokens", "sampled", "behaviour")


class Store:
    """One store on a socket, which can die and come back."""

    def __init__(self, folder: Path) -> None:
        self.events: list[str] = []
        self.fatal: list[StreamRLError] = []
        folder.mkdir()
        self.endpoint = f"ipc://{folder}/store"
        self._journal = folder / "journal"
        self.server: StoreServer
        self._task: asyncio.Task[Any] | None = None

    async def begin(self) -> None:
        self.server = StoreServer(
            self.endpoint, settings().buffer, ManualClock(), lambda name, fields: self.events.append(name),
            self.fatal.append, folder=self._journal,
        )  # fmt: skip
        self._task = start(self.server.run())

    async def end(self) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def restart(self) -> None:
        await self.end()
        await self.begin()

    def link(self, name: str = "rollouter-0") -> ClientLink:
        return ClientLink(self.endpoint, name, lambda: 0.0)


@contextlib.asynccontextmanager
async def stores(count: int = 1) -> AsyncIterator[list[Store]]:
    with tempfile.TemporaryDirectory() as folder:
        served = [Store(Path(folder, str(index))) for index in range(count)]
        for store in served:
            await store.begin()
        try:
            async with asyncio.timeout(10):
                yield served
        finally:
            for store in served:
                await store.end()


def packed(lease: int) -> tuple[GroupMeta, Payload]:
    return pack_group(group(Lease(lease, lease, 2, 0, 1.0)))


def described(*leases: int) -> list[BatchGroup]:
    return [BatchGroup(packed(lease)[0]) for lease in leases]


def held(store: Store) -> float:
    return store.server.statistics()["store/payloads"]


def test_each_payload_lies_in_the_store_of_its_lease_and_is_read_from_there() -> None:
    async def main() -> None:
        async with stores(2) as both:
            place = StorePlace([store.link() for store in both])
            for lease in range(5):
                await place.write(*packed(lease))
            assert [held(store) for store in both] == [3, 2]
            source = StoreSource([store.link("trainer-0") for store in both])
            found = await source.read(described(4, 1, 0), NAMES)
            assert (set(found.groups), found.lost) == ({0, 1, 4}, {})
            meta, payload = found.groups[1]
            np.testing.assert_array_equal(payload.view(0, 20), packed(1)[1].view(0, 20))
            assert meta.columns == packed(1)[0].columns
            place.close()
            source.close()

    asyncio.run(main())


def test_a_store_that_dies_has_every_payload_again_and_answers_what_was_asked_meanwhile() -> None:
    async def main() -> None:
        async with stores() as (store,):
            place = StorePlace([store.link()])
            await place.write(*packed(0))
            await place.write(*packed(1))
            source = StoreSource([store.link("trainer-0")])
            await source.read(described(0), NAMES)
            await store.end()
            reading, writing = start(source.read(described(0, 1, 2), NAMES)), start(place.write(*packed(3)))
            await store.begin()
            found = await reading
            await writing
            assert (set(found.groups), set(found.lost)) == ({0, 1}, {2})
            assert held(store) == 3
            assert "store_restored" in store.events
            place.close()
            source.close()

    asyncio.run(main())


def test_a_closed_lease_is_freed_for_good_also_when_its_payload_comes_late() -> None:
    async def main() -> None:
        async with stores() as (store,):
            link = store.link("buffer")
            for lease in (0, 1, 2):
                meta, payload = packed(lease)
                await link.request(StoreRequest(lease, meta.columns), payload)
            await link.request(FreeRequest([2], oldest=1))
            for _ in range(2):
                assert held(store) == 1
                for late in (0, 2):
                    meta, payload = packed(late)
                    header, _ = await link.request(StoreRequest(late, meta.columns), payload)
                    assert header.body == Status("late")
                await store.restart()
            link.close()

    asyncio.run(main())


def test_the_buffer_tells_the_stores_what_it_closed_also_what_it_closed_before_it_died() -> None:
    async def main() -> None:
        async with stores() as (store,):
            link = store.link()
            for lease in (0, 1, 2):
                meta, payload = packed(lease)
                await link.request(StoreRequest(lease, meta.columns), payload)
            ledger = Ledger(groups_per_step=4, max_lag=1, group_size=2, lease_timeout_s=10.0, max_attempts=3)
            ledger.publish(0)
            ledger.grant("rollouter-0", 3, 0.0)
            ledger.deliver(1)
            ledger.hand_out(1, [1])
            ledger.acknowledge(1)
            janitor = StoreJanitor([store.link("buffer")], ledger)  # as after a restart of the buffer
            running = start(janitor.run())
            while held(store) != 2:
                await link.request(FetchRequest([], []))
            ledger.deliver(0)
            ledger.hand_out(2, [0])
            ledger.acknowledge(2)
            janitor.close_lease(0)
            while held(store) != 1:
                await link.request(FetchRequest([], []))
            running.cancel()
            janitor.close()
            link.close()

    asyncio.run(main())


def test_columns_that_do_not_fit_their_payload_are_refused_and_the_store_lives_on() -> None:
    async def main() -> None:
        async with stores() as (store,):
            link = store.link()
            meta, payload = packed(0)
            with pytest.raises(WireError, match="payload: expected"):
                await link.request(StoreRequest(0, meta.columns), Payload([*payload.frames, b"x"]))
            assert (held(store), store.events) == (0, ["malformed_frame"])
            await link.request(StoreRequest(0, meta.columns), payload)
            assert held(store) == 1
            link.close()

    asyncio.run(main())
