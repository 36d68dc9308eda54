"""The weight sync with the real embedded engine behind the subscriber."""

from __future__ import annotations

import asyncio

from sync_support import equal, ring, weights
from tiny_transformer import tied_transformer
from transformers import Qwen3ForCausalLM

from streamrl.engines.embedded import EmbeddedEngine
from streamrl.sync.content import Content
from streamrl.types import SamplingParams


def test_a_request_in_flight_survives_updates_and_the_engine_serves_each_version_exactly() -> None:
    async def scenario() -> None:
        a, b = tied_transformer(1), tied_transformer(2)
        served = tied_transformer(3)
        engine = EmbeddedEngine(served, slots=2, max_length=128)
        await engine.start()
        params = SamplingParams(max_tokens=100)
        async with ring(model=a) as it:
            it.join("rollouter-0", engine)
            it.publisher.set_members({"rollouter-0"}, set())
            it.write(0, a)
            await it.publisher.publish(0)
            in_flight = asyncio.create_task(engine.generate([1, 2, 3], params))
            scores = []
            for version, model in enumerate((a, b, a, b)):
                if version:
                    it.write(version, model)
                    await it.publisher.publish(version)
                assert engine.version == version
                assert equal(weights(served), weights(model))
                scores.append(await engine.score([1, 2, 3, 4, 5]))
            assert scores[0].tolist() == scores[2].tolist() != scores[1].tolist() == scores[3].tolist()

            generation = await in_flight
            versions = [version for version, _ in generation.versions]
            assert versions == sorted(set(versions))
            assert sum(count for _, count in generation.versions) == len(generation.token_ids) == 100
            assert (await engine.generate([1, 2, 3], params)).versions == [(3, 100)]
        await engine.close()

    asyncio.run(scenario())


def test_64_requests_in_flight_survive_updates_that_stream_in_and_say_exactly_which_version_sampled_what() -> None:
    async def scenario() -> None:
        versions = [tied_transformer(seed) for seed in (1, 2, 1, 2)]
        served = tied_transformer(3)
        engine = EmbeddedEngine(served, slots=64, max_length=128)
        await engine.start()
        async with ring(model=versions[0], bucket_bytes=4096, rolling=True) as it:
            it.join("rollouter-0", engine)
            it.publisher.set_members({"rollouter-0"}, set())
            it.write(0, versions[0])
            await it.publisher.publish(0)
            params = [SamplingParams(max_tokens=120, seed=seed) for seed in range(64)]
            in_flight = [asyncio.create_task(engine.generate([1, 2, 3], each)) for each in params]
            for version, model in enumerate(versions[1:], start=1):
                content = it.publisher.open(version)
                publish = asyncio.create_task(it.publisher.publish(version))
                await asyncio.to_thread(write_within, content, model)
                await publish
                assert equal(weights(served), weights(model))
            for generation in await asyncio.gather(*in_flight):
                assert len(generation.token_ids) == sum(count for _, count in generation.versions) == 120
                order = [version for version, _ in generation.versions]
                assert order == sorted(set(order))
                assert generation.token_ids.min() >= 0
                assert generation.token_ids.max() < 32
        await engine.close()

    asyncio.run(scenario())


def write_within(content: Content, model: Qwen3ForCausalLM) -> None:
    with content:
        content.put(model.named_parameters())
