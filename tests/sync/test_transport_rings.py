"""The whole weight plane over every transport: publisher, subscribers, late joiners, damage and deltas."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from sync_support import equal, flip_byte, ring, small_model, weights
from transport_support import NIXL

TRANSPORTS = ("shm", "zmq", "collective", "disk", NIXL)
TRAVELLING = ("zmq", "collective")
"""Those that carry deltas."""


def hardly_changed(model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        model[0].weight[3, 5] += 1.0  # type: ignore[index]
    return model


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_versions_in_turn_arrive_bit_for_bit_at_every_rollouter(transport: str) -> None:
    async def scenario() -> None:
        a, b = small_model(1), small_model(2)
        async with ring(transport=transport) as it:
            engines = [it.join("rollouter-0"), it.join("rollouter-1")]
            it.publisher.set_members({"rollouter-0", "rollouter-1"}, set())
            for version, model in enumerate((a, b, a, b)):
                it.write(version, model)
                report = await it.publisher.publish(version)
                assert report.rollouters == 2
                assert all(equal(engine.weights, weights(model)) for engine in engines)

    asyncio.run(scenario())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_late_joiner_gets_the_current_version_and_then_follows(transport: str) -> None:
    async def scenario() -> None:
        a, b = small_model(1), small_model(2)
        async with ring(transport=transport) as it:
            it.join("rollouter-0")
            it.publisher.set_members({"rollouter-0"}, set())
            it.write(0, a)
            await it.publisher.publish(0)
            late = it.join("rollouter-1")
            it.publisher.set_members({"rollouter-0", "rollouter-1"}, set())
            async with asyncio.timeout(20):
                await it.subscribers["rollouter-1"].wait_version(0)
            assert equal(late.weights, weights(a))
            it.write(1, b)
            assert (await it.publisher.publish(1)).rollouters == 2
            assert equal(late.weights, weights(b))

    asyncio.run(scenario())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_observer_gets_its_copy_of_what_it_observes(transport: str) -> None:
    async def scenario() -> None:
        a = small_model(1)
        async with ring(transport=transport) as it:
            it.join("rollouter-0")
            observer = it.observe("evaluator")
            it.publisher.set_members({"rollouter-0"}, {"evaluator"})
            it.write(0, a)
            await it.publisher.publish(0, observe=True)
            version, tensors = await anext(observer.updates())
            assert version == 0
            assert equal(tensors, weights(a))

    asyncio.run(scenario())


@pytest.mark.parametrize("transport", [name for name in TRANSPORTS if name != "shm"])
def test_a_bucket_that_was_damaged_on_its_way_is_refused_and_comes_again(transport: str) -> None:
    async def scenario() -> None:
        a, b = small_model(1), small_model(2)
        async with ring(transport=transport) as it:
            engine = it.join("rollouter-0")
            it.publisher.set_members({"rollouter-0"}, set())
            it.write(0, a)
            await it.publisher.publish(0)
            receiver: Any = it.subscribers["rollouter-0"]._link._receiver
            fetch = receiver.fetch

            async def damaging(bucket: Any, out: memoryview) -> None:
                await fetch(bucket, out)
                if bucket.index == 1 and bucket.attempt == 0:
                    out[100] ^= 1

            receiver.fetch = damaging
            it.write(1, b)
            await it.publisher.publish(1)
            (refusal,) = it.events.named("version_refused")
            assert "bucket 1 of" in refusal["reason"]
            assert "is corrupted" in refusal["reason"]
            assert equal(engine.weights, weights(b))
            assert engine.log == ["pause", "load 0", "resume", "pause", "load 1", "resume"]

    asyncio.run(scenario())


@pytest.mark.parametrize("transport", TRAVELLING)
def test_only_what_changed_travels_between_two_anchors(transport: str) -> None:
    async def scenario() -> None:
        model = small_model(1)
        async with ring(transport=transport, delta=True, anchor_every=3) as it:
            engine = it.join("rollouter-0")
            it.publisher.set_members({"rollouter-0"}, set())
            fractions = []
            for version in range(7):
                it.write(version, hardly_changed(model))
                fractions.append((await it.publisher.publish(version)).delta_fraction)
                assert equal(engine.weights, weights(model))
            assert [fraction == 1 for fraction in fractions] == [True, False, False, True, False, False, True]
            assert max(fractions[1], fractions[2], fractions[4], fractions[5]) < 0.15

    asyncio.run(scenario())


@pytest.mark.parametrize("transport", TRAVELLING)
def test_a_rollouter_without_the_base_gets_the_whole_version(transport: str) -> None:
    async def scenario() -> None:
        model = small_model(1)
        async with ring(transport=transport, delta=True) as it:
            it.join("rollouter-0")
            it.publisher.set_members({"rollouter-0"}, set())
            for version in range(2):
                it.write(version, hardly_changed(model))
                await it.publisher.publish(version)
            late = it.join("rollouter-1")
            it.publisher.set_members({"rollouter-0", "rollouter-1"}, set())
            it.write(2, hardly_changed(model))
            await it.publisher.publish(2)
            assert equal(late.weights, weights(model))

    asyncio.run(scenario())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_damage_in_the_shared_memory_itself_stops_the_version_on_every_transport(transport: str) -> None:
    async def scenario() -> None:
        async with ring(transport=transport) as it:
            engine = it.join("rollouter-0")
            it.publisher.set_members({"rollouter-0"}, set())
            it.write(0, small_model(1))
            await asyncio.sleep(0)
            content = it.publisher._slab.content(0)
            assert content is not None
            for index in range(len(it.publisher._slab.manifest.buckets)):
                await content.bucket(index)
            flip_byte(it.publisher._slab._arena, content.slot, 4)
            with pytest.raises(Exception, match="is corrupted"):
                await it.publisher.publish(0)
            assert engine.log == []

    asyncio.run(scenario())
