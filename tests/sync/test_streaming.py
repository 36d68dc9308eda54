"""Buckets that arrive while later ones are written, each engine in its own time, on every transport."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sync_support import FakeEngine, Ring, equal, ring, small_model, weights

from streamrl.errors import WeightSyncError
from streamrl.sync.arrival import Arrival

WAYS: list[dict[str, Any]] = [
    {"transport": "shm"},
    {"transport": "zmq"},
    {"transport": "zmq", "delta": True, "anchor_every": 3},
    {"transport": "disk"},
    {"transport": "collective"},
]
IDS = ["shm", "zmq", "zmq-delta", "disk", "collective"]


@pytest.mark.parametrize("rolling", [False, True], ids=["together", "rolling"])
@pytest.mark.parametrize("stage", ["host", "none"])
@pytest.mark.parametrize("way", WAYS, ids=IDS)
def test_versions_a_b_a_b_arrive_bit_for_bit_in_every_way(way: dict[str, Any], stage: str, rolling: bool) -> None:
    async def scenario() -> None:
        async with ring(rolling=rolling, **way) as it:
            engines = [it.join(name, stage=stage) for name in ("rollouter-0", "rollouter-1")]
            it.publisher.set_members({"rollouter-0", "rollouter-1"}, set())
            for version, seed in enumerate((1, 2, 1, 2, 3)):
                it.write(version, small_model(seed))
                report = await it.publisher.publish(version)
                assert report.rollouters == 2
                assert it.events.named("version_refused") == []
                for engine in engines:
                    assert equal(engine.weights, weights(small_model(seed)))
                    assert engine.log[-3:] == ["pause", f"load {version}", "resume"]

    asyncio.run(scenario())


@given(bucket_bytes=st.integers(256, 4096))
@settings(max_examples=8, deadline=None)
@pytest.mark.parametrize("way", WAYS[:3], ids=IDS[:3])
def test_any_bucket_size_carries_the_same_weights(way: dict[str, Any], bucket_bytes: int) -> None:
    async def scenario() -> None:
        async with ring(bucket_bytes=bucket_bytes, **way) as it:
            engine = it.join("rollouter-0")
            it.publisher.set_members({"rollouter-0"}, set())
            for version in range(3):
                it.write(version, small_model(version))
                await it.publisher.publish(version)
                assert equal(engine.weights, weights(small_model(version)))

    asyncio.run(scenario())


@pytest.mark.parametrize("way", WAYS[1:], ids=IDS[1:])
def test_a_late_joiner_and_an_observer_get_whole_copies_in_every_way(way: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with ring(**way) as it:
            it.join("rollouter-0")
            updates = it.observe("evaluator").updates()
            it.publisher.set_members({"rollouter-0"}, {"evaluator"})
            for version in range(2):
                it.write(version, small_model(version))
                await it.publisher.publish(version, observe=True)
            late = it.join("rollouter-1")
            it.publisher.set_members({"rollouter-0", "rollouter-1"}, {"evaluator"})
            await it.events.wait("version_committed", version=1, members=["rollouter-1"], late=True)
            assert equal(late.weights, weights(small_model(1)))
            it.write(2, small_model(2))
            assert (await it.publisher.publish(2)).rollouters == 2
            assert equal(late.weights, weights(small_model(2)))
            for version in range(2):
                number, tensors = await anext(updates)
                assert number == version
                assert equal(tensors, weights(small_model(version)))

    asyncio.run(scenario())


def watch_checks(it: Ring, name: str) -> asyncio.Queue[int]:
    """Numbers of the buckets that a member has verified."""
    verified: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def watch(arrival: Arrival) -> None:
        check = arrival.check

        def told(index: int, code: memoryview | None) -> None:
            check(index, code)
            loop.call_soon_threadsafe(verified.put_nowait, index)

        arrival.check = told  # type: ignore[method-assign]

    it.on_arrival(name, watch)
    return verified


@pytest.mark.parametrize("way", WAYS, ids=IDS)
def test_a_bucket_is_verified_while_the_next_is_not_yet_written(way: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with ring(**way) as it:
            engine = it.join("rollouter-0")
            it.publisher.set_members({"rollouter-0"}, set())
            it.write(0, small_model(0))
            await it.publisher.publish(0)
            verified = watch_checks(it, "rollouter-0")
            named = weights(small_model(1))
            content = it.publisher.open(1)
            publish = asyncio.create_task(it.publisher.publish(1))
            with content:
                content.put({name: named.pop(name) for name in ("empty", "scale", "0.weight")})
                assert {await verified.get() for _ in range(3)} == {0, 1, 2}
                assert engine.log[-1] == "resume"
                assert engine.version == 0
                content.put(named)
            await publish
            assert equal(engine.weights, weights(small_model(1)))

    asyncio.run(scenario())


def test_a_version_whose_writing_fails_is_given_up_and_the_next_one_arrives() -> None:
    async def scenario() -> None:
        async with ring() as it:
            engine = it.join("rollouter-0")
            it.publisher.set_members({"rollouter-0"}, set())
            it.write(0, small_model(0))
            await it.publisher.publish(0)
            content = it.publisher.open(1)
            publish = asyncio.create_task(it.publisher.publish(1))
            with pytest.raises(WeightSyncError, match="version 1 lacks"), content:
                content.put({"0.weight": weights(small_model(1))["0.weight"]})
            with pytest.raises(
                WeightSyncError, match="version 1 was given up, version 0 serves: .*could not be written"
            ):
                await publish
            it.write(1, small_model(2))
            await it.publisher.publish(1)
            assert equal(engine.weights, weights(small_model(2)))
            assert engine.log == ["pause", "load 0", "resume", "pause", "load 1", "resume"]

    asyncio.run(scenario())


def test_a_version_whose_last_member_dies_while_it_is_written_has_the_digest_of_all_its_weights() -> None:
    async def scenario() -> None:
        async with ring() as it:
            engine = it.join("rollouter-0")
            it.publisher.set_members({"rollouter-0"}, set())
            it.write(0, small_model(0))
            await it.publisher.publish(0)
            content = it.publisher.open(1)
            publish = asyncio.create_task(it.publisher.publish(1))
            with content:
                await it.leave("rollouter-0")
                it.publisher.set_members(set(), set())
                assert it.publisher.current_version == 0
                content.put(small_model(0).named_parameters())
            assert (await publish).rollouters == 0
            assert it.publisher.current_version == 1
            first, second = (fields["weights"] for fields in it.events.named("version_committed"))
            assert second == first
            assert engine.version == 0

    asyncio.run(scenario())


def test_a_version_that_cannot_be_written_is_given_up_when_nobody_is_there_either() -> None:
    async def scenario() -> None:
        async with ring() as it:
            content = it.publisher.open(0)
            publish = asyncio.create_task(it.publisher.publish(0))
            with pytest.raises(WeightSyncError, match="version 0 lacks"), content:
                content.put({"scale": weights(small_model(0))["scale"]})
            with pytest.raises(WeightSyncError, match="version 0 was given up, .*could not be written"):
                await publish
            assert not it.publisher._running

    asyncio.run(scenario())


def test_a_delta_carries_only_what_changed() -> None:
    async def scenario() -> None:
        model = torch.nn.Linear(256, 64)
        async with ring(model=model, transport="zmq", delta=True, anchor_every=100, bucket_bytes=1 << 16) as it:
            engine = FakeEngine()
            engine.model = torch.nn.Linear(256, 64)
            it.join("rollouter-0", engine)
            it.publisher.set_members({"rollouter-0"}, set())
            it.write(0, model)
            assert (await it.publisher.publish(0)).delta_fraction == 1.0
            with torch.no_grad():
                model.weight[3, 5] += 1
            it.write(1, model)
            assert (await it.publisher.publish(1)).delta_fraction < 0.01
            assert equal(engine.weights, weights(model))

    asyncio.run(scenario())


def test_rolling_members_do_not_wait_for_each_other_and_the_version_waits_for_all() -> None:
    async def scenario() -> None:
        async with ring(rolling=True) as it:
            quick = it.join("rollouter-0")
            it.publisher.set_members({"rollouter-0", "rollouter-1"}, set())
            it.write(0, small_model(0))
            publish = asyncio.create_task(it.publisher.publish(0))
            await it.subscribers["rollouter-0"].wait_version(0)
            assert quick.log == ["pause", "load 0", "resume"]
            assert it.publisher.current_version == -1
            slow = it.join("rollouter-1")
            assert (await publish).rollouters == 2
            assert it.publisher.current_version == 0
            assert equal(slow.weights, weights(small_model(0)))

    asyncio.run(scenario())


def test_a_rolling_member_that_dies_in_mid_transfer_does_not_disturb_the_others() -> None:
    async def scenario() -> None:
        async with ring(rolling=True) as it:
            quick, doomed = it.join("rollouter-0"), it.join("rollouter-1")
            it.publisher.set_members({"rollouter-0", "rollouter-1"}, set())
            it.write(0, small_model(0))
            await it.publisher.publish(0)
            content = it.publisher.open(1)
            publish = asyncio.create_task(it.publisher.publish(1))
            verified, named = watch_checks(it, "rollouter-1"), weights(small_model(1))
            with content:
                content.put({"scale": named.pop("scale")})
                content.put({"0.weight": named.pop("0.weight")})
                await verified.get()
                await it.leave("rollouter-1")
                content.put(named)
            await it.subscribers["rollouter-0"].wait_version(1)
            it.publisher.set_members({"rollouter-0"}, set())
            assert (await publish).rollouters == 1
            assert equal(quick.weights, weights(small_model(1)))
            assert doomed.log == ["pause", "load 0", "resume"]
            back = it.join("rollouter-1")
            it.publisher.set_members({"rollouter-0", "rollouter-1"}, set())
            await it.events.wait("version_committed", version=1, members=["rollouter-1"], late=True)
            assert equal(back.weights, weights(small_model(1)))

    asyncio.run(scenario())
