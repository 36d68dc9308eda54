"""Work on buckets in several threads: nothing out of order, nothing after the end, and failures name their reason."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sync_support import FakeEngine, equal, flip_byte, ring, small_model, weights

from streamrl.errors import WeightSyncError
from streamrl.sync import slab as slab_module
from streamrl.sync import workers
from streamrl.sync.content import Content
from streamrl.sync.workers import Crew, finished, worker_count

THREADS = 3


@pytest.fixture(autouse=True)
def several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads as on a machine of many cores."""
    monkeypatch.setattr(workers, "worker_count", lambda: THREADS)
    monkeypatch.setattr(slab_module, "worker_count", lambda: THREADS)


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (4, 2), (7, 3), (16, 8), (192, 8)])
def test_half_of_the_cores_work_on_buckets(monkeypatch: pytest.MonkeyPatch, cores: int, threads: int) -> None:
    monkeypatch.setattr(workers.os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert worker_count() == threads


def test_a_crew_works_at_once_in_so_many_threads_and_its_block_ends_after_them() -> None:
    together = threading.Barrier(THREADS)
    done: list[int] = []

    def work(index: int) -> None:
        together.wait(30)
        done.append(index)

    async def scenario() -> None:
        async with Crew() as crew:
            for index in range(2 * THREADS):
                await crew.give(lambda index=index: work(index))
        assert sorted(done) == list(range(2 * THREADS))

    asyncio.run(scenario())


def test_work_that_fails_ends_the_block_at_once_with_its_error_and_after_the_others() -> None:
    failed, others = threading.Event(), []

    def fail() -> None:
        failed.set()
        raise WeightSyncError("bucket 0 is corrupted")

    def other() -> None:
        assert failed.wait(30)
        others.append("ended")

    async def scenario() -> None:
        async with Crew() as crew:
            await crew.give(other)
            await crew.give(fail)
            await asyncio.Event().wait()  # a bucket that never comes

    with pytest.raises(WeightSyncError, match="^bucket 0 is corrupted$"):
        asyncio.run(asyncio.wait_for(scenario(), 30))
    assert others == ["ended"]


def test_a_cancelled_block_ends_after_its_threads() -> None:
    began, go_on, ended = threading.Event(), threading.Event(), []

    def work() -> None:
        began.set()
        assert go_on.wait(30)
        ended.append(True)

    async def block() -> None:
        async with Crew() as crew:
            await crew.give(work)

    async def scenario() -> None:
        running = asyncio.create_task(block())
        await asyncio.to_thread(began.wait, 30)
        running.cancel()
        await asyncio.sleep(0)
        assert not running.done()
        go_on.set()
        await asyncio.wait({running})
        assert running.cancelled()
        assert ended == [True]

    asyncio.run(scenario())


def test_work_that_is_cancelled_twice_still_ends_before_whoever_waits_for_it() -> None:
    """As when an update is discarded and the run ends: whoever comes next may write to the memory that it reads."""

    async def scenario() -> None:
        go_on = asyncio.Event()
        waiting = asyncio.create_task(finished(go_on.wait()))
        for _ in range(3):
            await asyncio.sleep(0)
            waiting.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        go_on.set()
        await asyncio.wait({waiting})
        assert waiting.cancelled()

    asyncio.run(asyncio.wait_for(scenario(), 30))


def digest_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("weights-digest")]


@pytest.fixture
def reversed_digests(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Of each three buckets the last is digested first; the order in which they were."""
    order: list[int] = []
    turn = threading.Condition()
    digest = Content._digest

    def last_first(self: Content, index: int) -> None:
        after = {each for each in range(index + 1, index // THREADS * THREADS + THREADS) if each < buckets(self)}
        with turn:
            assert turn.wait_for(lambda: after <= set(order), 30)
            digest(self, index)
            order.append(index)
            turn.notify_all()

    monkeypatch.setattr(Content, "_digest", last_first)
    yield order


def buckets(content: Content) -> int:
    return len(content._arena.manifest.buckets)


@pytest.mark.parametrize("settings", [{}, {"transport": "zmq", "delta": True}], ids=["full", "delta"])
def test_buckets_are_offered_in_order_however_the_threads_take_turns(
    reversed_digests: list[int], settings: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with ring(bucket_bytes=512, **settings) as it:
            engine = it.join("rollouter-0")
            it.publisher.set_members({"rollouter-0"}, set())
            for version in range(3):
                reversed_digests.clear()
                it.write(version, small_model(version // 2))
                await it.publisher.publish(version)
                assert reversed_digests[:THREADS] == [2, 1, 0]
                assert equal(engine.weights, weights(small_model(version // 2)))
        assert digest_threads() == []

    asyncio.run(scenario())


def test_a_thread_that_fails_fails_the_version_with_its_reason_and_the_next_one_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digest = Content._digest

    def fail(self: Content, index: int) -> None:
        if self.number == 1 and index == 2:
            raise MemoryError("no room for a code")
        digest(self, index)

    async def scenario() -> None:
        async with ring(bucket_bytes=512) as it:
            engine = it.join("rollouter-0")
            it.publisher.set_members({"rollouter-0"}, set())
            it.write(0, small_model(0))
            await it.publisher.publish(0)
            monkeypatch.setattr(Content, "_digest", fail)
            with pytest.raises(MemoryError):
                it.write(1, small_model(1))
            with pytest.raises(WeightSyncError, match="version 1 could not be written: no room for a code"):
                await it.publisher.publish(1)
            it.write(2, small_model(2))
            await it.publisher.publish(2)
            assert equal(engine.weights, weights(small_model(2)))
        assert digest_threads() == []

    asyncio.run(scenario())


def test_no_thread_reads_a_slot_after_its_writing_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    going, go_on, ended = threading.Event(), threading.Event(), []
    digest = Content._digest

    def slow(self: Content, index: int) -> None:
        going.set()
        assert go_on.wait(30)
        digest(self, index)
        ended.append(index)

    async def scenario() -> None:
        async with ring() as it:
            monkeypatch.setattr(Content, "_digest", slow)
            content = it.publisher.open(0)

            def write() -> None:
                with content:
                    content.put({"scale": weights(small_model(0))["scale"]})
                    content.put({"0.weight": weights(small_model(0))["0.weight"]})
                    assert going.wait(30)
                    threading.Timer(0, go_on.set).start()
                    raise WeightSyncError("a rank is gone")

            with pytest.raises(WeightSyncError, match="a rank is gone"):
                await asyncio.to_thread(write)
            seen = list(ended)
            assert seen
            assert not any(digesting.running() for digesting in content._digesting)

    asyncio.run(scenario())


def test_the_first_damaged_bucket_is_named_though_all_are_verified_at_once() -> None:
    async def scenario() -> None:
        model = torch.nn.Linear(64, 64, bias=False)
        async with ring(model=model, bucket_bytes=2048) as it:
            engine = FakeEngine()
            engine.model = torch.nn.Linear(64, 64, bias=False)
            it.write(0, model)
            flip_byte(it.publisher._slab._arena, 0, 3 * 2048 + 5)
            it.join("rollouter-0", engine)
            it.publisher.set_members({"rollouter-0"}, set())
            with pytest.raises(WeightSyncError, match=r"version 0: bucket 3 of 8 \(weight, …\) is corrupted"):
                await it.publisher.publish(0)

    asyncio.run(scenario())
