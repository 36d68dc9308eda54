"""Publisher and subscribers on one event loop, over real sockets and real shared memory: when all goes well."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch
import uvloop
from sync_support import FakeEngine, equal, ring, small_model, weights

from streamrl.sync.observer import PENDING_VERSIONS

RUNNERS = [pytest.param(asyncio.run, id="asyncio"), pytest.param(uvloop.run, id="uvloop")]


@pytest.mark.parametrize("run", RUNNERS)
def test_versions_a_b_a_b_arrive_bit_for_bit_at_every_rollouter(
    run: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    async def scenario() -> None:
        a, b = small_model(1), small_model(2)
        async with ring() as it:
            engines = [it.join("rollouter-0"), it.join("rollouter-1")]
            it.publisher.set_members({"rollouter-0", "rollouter-1"}, set())
            for version, model in enumerate((a, b, a, b)):
                it.write(version, model)
                report = await it.publisher.publish(version)
                assert (report.version, report.rollouters) == (version, 2)
                assert report.bytes == sum(tensor.nbytes for tensor in weights(model).values())
                assert 0 < report.pause_seconds <= report.seconds
                assert it.publisher.current_version == version
                for engine in engines:
                    assert equal(engine.weights, weights(model))
                    assert engine.log[-3:] == ["pause", f"load {version}", "resume"]

    run(scenario())


def test_a_tied_model_is_sent_once_and_stays_tied() -> None:
    class Tied(torch.nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.embed = torch.nn.Embedding(11, 7)
            self.head = torch.nn.Linear(7, 11, bias=False)
            self.head.weight = self.embed.weight

    class TiedEngine(FakeEngine):
        async def load(self, version: int, tensors: Any) -> None:
            self.model.load_state_dict(tensors, strict=False)

    async def scenario() -> None:
        model, engine = Tied(1), TiedEngine()
        engine.model = Tied(2)
        async with ring(model=model) as it:
            assert [tensor.name for tensor in it.publisher._slab.manifest.tensors] == ["embed.weight"]
            it.join("rollouter-0", engine)
            it.publisher.set_members({"rollouter-0"}, set())
            it.write(0, model)
            await it.publisher.publish(0)
            assert engine.model.head.weight is engine.model.embed.weight
            assert torch.equal(engine.model.head.weight, model.head.weight)

    asyncio.run(scenario())


def test_generation_is_stopped_only_for_the_load() -> None:
    async def scenario() -> None:
        async with ring() as it:
            engine = it.join("rollouter-0")
            it.join("rollouter-1")
            it.publisher.set_members({"rollouter-0", "rollouter-1", "rollouter-2"}, set())
            it.write(0, small_model(1))
            publish = asyncio.create_task(it.publisher.publish(0))
            await it.subscribers["rollouter-0"]._on_event.wait("version_staged", version=0)
            assert engine.log == []  # verified, and not paused: another member has not staged yet
            it.join("rollouter-2")
            await publish
            assert engine.log == ["pause", "load 0", "resume"]

    asyncio.run(scenario())


def test_nobody_to_publish_to_is_no_error() -> None:
    async def scenario() -> None:
        async with ring() as it:
            for version in range(3):
                it.write(version, small_model(version))
                report = await it.publisher.publish(version)
                assert (report.rollouters, report.pause_seconds) == (0, 0.0)
            assert it.publisher.current_version == 2

    asyncio.run(scenario())


def test_two_publishes_back_to_back_run_one_after_the_other() -> None:
    async def scenario() -> None:
        async with ring() as it:
            engine = it.join("rollouter-0")
            loading, release = engine.hold_load()
            it.publisher.set_members({"rollouter-0"}, set())
            it.write(0, small_model(1))
            it.write(1, small_model(2))
            first = asyncio.create_task(it.publisher.publish(0))
            second = asyncio.create_task(it.publisher.publish(1))
            await loading.wait()
            assert it.publisher.current_version == -1
            assert len(it.publisher._running) == 1
            release.set()
            assert [report.version for report in await asyncio.gather(first, second)] == [0, 1]
            assert engine.log == ["pause", "load 0", "resume", "pause", "load 1", "resume"]
            assert equal(engine.weights, weights(small_model(2)))

    asyncio.run(scenario())


def test_a_slot_that_is_still_needed_is_not_overwritten() -> None:
    async def scenario() -> None:
        async with ring() as it:
            it.write(0, small_model(1))
            await it.publisher.publish(0)
            it.publisher.set_members({"rollouter-0"}, set())
            it.write(1, small_model(2))
            publish = asyncio.create_task(it.publisher.publish(1))
            await asyncio.sleep(0)
            for version in (1, 2):  # version 1 is on its way, version 0 serves until it has arrived
                with pytest.raises(AssertionError, match=f"no slot is free for version {version}"):
                    it.write(version, small_model(3))
            it.join("rollouter-0")
            await publish
            it.write(2, small_model(3))

    asyncio.run(scenario())


def test_a_version_that_was_not_written_cannot_be_published() -> None:
    async def scenario() -> None:
        async with ring() as it:
            with pytest.raises(AssertionError, match="version 0 was not written"):
                await it.publisher.publish(0)

    asyncio.run(scenario())


def test_waiting_for_a_version_ends_when_the_engine_serves_it() -> None:
    async def scenario() -> None:
        async with ring() as it:
            it.join("rollouter-0")
            subscriber = it.subscribers["rollouter-0"]
            it.publisher.set_members({"rollouter-0"}, set())
            wait = asyncio.create_task(subscriber.wait_version(1))
            it.write(0, small_model(1))
            await it.publisher.publish(0)
            await subscriber.committed.wait()
            assert subscriber.version == 0
            assert not wait.done()
            it.write(1, small_model(2))
            await it.publisher.publish(1)
            await wait
            assert subscriber.version == 1

    asyncio.run(scenario())


# Late joiners ---------------------------------------------------------------------------------------------------------


def test_a_late_joiner_gets_the_current_version_while_an_update_is_under_way() -> None:
    async def scenario() -> None:
        async with ring() as it:
            engine = it.join("rollouter-0")
            it.publisher.set_members({"rollouter-0"}, set())
            it.write(0, small_model(1))
            await it.publisher.publish(0)

            loading, release = engine.hold_load()
            it.write(1, small_model(2))
            publish = asyncio.create_task(it.publisher.publish(1))
            await loading.wait()
            late = it.join("rollouter-1")
            it.publisher.set_members({"rollouter-0", "rollouter-1"}, set())
            await it.events.wait("version_committed", version=0, late=True)
            assert equal(late.weights, weights(small_model(1)))
            assert it.publisher.current_version == 0

            release.set()
            assert (await publish).rollouters == 1
            await it.events.wait("version_committed", version=1, late=True)
            assert equal(late.weights, weights(small_model(2)))
            it.write(2, small_model(3))
            assert (await it.publisher.publish(2)).rollouters == 2
            assert late.log == [word for v in (0, 1, 2) for word in ("pause", f"load {v}", "resume")]
            assert engine.log == late.log

    asyncio.run(scenario())


def test_a_late_joiner_whose_slot_was_overwritten_gets_the_newer_version() -> None:
    async def scenario() -> None:
        async with ring() as it:
            steady = it.join("rollouter-0")
            it.publisher.set_members({"rollouter-0"}, set())
            it.write(0, small_model(1))
            await it.publisher.publish(0)

            loading, release = steady.hold_load()
            it.write(1, small_model(2))
            publish = asyncio.create_task(it.publisher.publish(1))
            await loading.wait()

            late = it.join("rollouter-1")
            reading, read_on = it.slow_reads("rollouter-1")
            it.publisher.set_members({"rollouter-0", "rollouter-1"}, set())
            await reading.wait()
            release.set()
            await publish
            it.write(2, small_model(3))  # over version 0, which the late joiner is about to read
            read_on.set()
            await it.events.wait("version_committed", version=1, late=True)
            assert late.log == ["pause", "load 1", "resume"]
            assert equal(late.weights, weights(small_model(2)))
            refused = await it.events.wait("version_refused", member="rollouter-1", version=0)
            assert "corrupted" in refused["reason"] or "holds version 0 no more" in refused["reason"]
            assert it.unresponsive == []

    asyncio.run(scenario())


def test_a_late_joiner_that_is_slow_to_load_is_not_harmed_by_the_next_write() -> None:
    async def scenario() -> None:
        async with ring() as it:
            steady, late = it.join("rollouter-0"), FakeEngine()
            it.publisher.set_members({"rollouter-0"}, set())
            it.write(0, small_model(1))
            await it.publisher.publish(0)

            steady_loads, steady_release = steady.hold_load()
            it.write(1, small_model(2))
            publish = asyncio.create_task(it.publisher.publish(1))
            await steady_loads.wait()
            late_loads, late_release = late.hold_load()
            it.join("rollouter-1", late)
            it.publisher.set_members({"rollouter-0", "rollouter-1"}, set())
            await late_loads.wait()
            steady_release.set()
            await publish
            it.write(2, small_model(3))  # over version 0, which the late joiner is about to load

            seen = []
            late.after_load = lambda: seen.append(late.weights)
            late_release.set()
            await it.events.wait("version_committed", version=1, late=True)
            assert equal(seen[0], weights(small_model(1)))
            assert equal(seen[1], weights(small_model(2)))

    asyncio.run(scenario())


def test_a_late_joiner_that_still_stages_goes_straight_to_the_next_version() -> None:
    async def scenario() -> None:
        async with ring() as it:
            it.write(0, small_model(1))
            await it.publisher.publish(0)
            late = it.join("rollouter-0")
            reading, read_on = it.slow_reads("rollouter-0")
            it.publisher.set_members({"rollouter-0"}, set())
            await reading.wait()
            it.write(1, small_model(2))
            publish = asyncio.create_task(it.publisher.publish(1))
            await asyncio.sleep(0)
            read_on.set()
            assert (await publish).rollouters == 1
            assert late.log == ["pause", "load 1", "resume"]
            assert it.events.named("version_refused") == []

    asyncio.run(scenario())


def test_a_late_joiner_that_is_taken_out_while_it_stages_is_forgotten() -> None:
    async def scenario() -> None:
        async with ring() as it:
            it.write(0, small_model(1))
            await it.publisher.publish(0)
            late = it.join("rollouter-0")
            reading, read_on = it.slow_reads("rollouter-0")
            it.publisher.set_members({"rollouter-0"}, set())
            await reading.wait()
            it.publisher.set_members(set(), set())
            assert not it.publisher._running
            assert all(not fields["late"] for fields in it.events.named("version_committed"))
            read_on.set()
            await it.subscribers["rollouter-0"]._on_event.wait("version_staged", version=0)
            assert late.log == []

    asyncio.run(scenario())


# Observers ------------------------------------------------------------------------------------------------------------


def test_an_observer_gets_private_copies_of_the_observed_versions_only() -> None:
    async def scenario() -> None:
        async with ring() as it:
            it.join("rollouter-0")
            updates = it.observe("evaluator").updates()
            it.publisher.set_members({"rollouter-0"}, {"evaluator"})
            got = {}
            for version, observe in enumerate((True, False, True, False, False)):
                it.write(version, small_model(version))
                report = await it.publisher.publish(version, observe=observe)
                assert report.rollouters == 1
                if observe:
                    number, tensors = await anext(updates)
                    got[number] = tensors
            assert list(got) == [0, 2]
            for version, tensors in got.items():
                assert equal(tensors, weights(small_model(version)))

    asyncio.run(scenario())


def test_an_observer_that_is_behind_skips_nothing_and_holds_the_publisher_back() -> None:
    async def scenario() -> None:
        async with ring(timeout_s=3.0) as it:
            updates = it.observe("evaluator").updates()
            it.publisher.set_members(set(), {"evaluator"})
            for version in range(PENDING_VERSIONS):
                it.write(version, small_model(version))
                await it.publisher.publish(version, observe=True)
            it.write(PENDING_VERSIONS, small_model(PENDING_VERSIONS))
            publish = asyncio.create_task(it.publisher.publish(PENDING_VERSIONS, observe=True))
            await it.events.wait("sync_timeout", member="evaluator", phase="stage", version=PENDING_VERSIONS)
            assert not publish.done()
            for version in range(PENDING_VERSIONS + 1):
                number, tensors = await anext(updates)
                assert number == version
                assert equal(tensors, weights(small_model(version)))
            await publish

    asyncio.run(scenario())
