"""The embedded engine with weights staged ahead, on a CPU and, where there is one, on a GPU."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from streamrl.engines.ahead import beside_the_kernels
from streamrl.engines.embedded import EmbeddedEngine
from streamrl.errors import WeightSyncError
from streamrl.loss.head import HeadForm
from streamrl.ports import StagesWeights
from streamrl.types import SamplingParams

Build = Callable[..., PreTrainedModel]
ROW = [1, 2, 3, 4, 5]


@pytest.fixture(params=["cpu", "cuda:0"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param != "cpu" and not torch.cuda.is_available():
        pytest.skip("there is no GPU here")
    return str(request.param)


@asynccontextmanager
async def serving(model: PreTrainedModel) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(model, slots=64, max_length=128)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """In host memory, as they arrive."""
    return {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}


def held(model: PreTrainedModel) -> dict[str, bytes]:
    return {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in weights(model).items()}


async def commit(engine: EmbeddedEngine, version: int, tensors: dict[str, torch.Tensor]) -> None:
    await engine.pause()
    await engine.load(version, tensors)
    await engine.resume()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_versions_a_b_a_b_are_served_as_they_are_without_staging(build: Build, device: str, dtype: torch.dtype) -> None:
    sets = [weights(build(hidden_size=64, seed=seed).to(dtype)) for seed in (1, 2, 1, 2)]

    async def scores(*, ahead: bool) -> list[np.ndarray]:
        served = build(hidden_size=64).to(dtype).to(device)
        found = []
        async with serving(served) as engine:
            for version, tensors in enumerate(sets):
                if ahead:
                    await engine.stage(version, tensors)
                await commit(engine, version, tensors)
                assert held(served) == {
                    name: each.view(torch.uint8).numpy().tobytes() for name, each in tensors.items()
                }
                found.append(await engine.score(ROW))
        return found

    staged, plain = asyncio.run(scores(ahead=True)), asyncio.run(scores(ahead=False))
    assert [each.tolist() for each in staged] == [each.tolist() for each in plain]
    assert staged[0].tolist() == staged[2].tolist() != staged[1].tolist()


def test_the_version_that_serves_is_untouched_until_the_load(build: Build, device: str) -> None:
    served = build(seed=0).to(device)
    before, staged = held(served), weights(build(seed=1))

    async def run() -> None:
        async with serving(served) as engine:
            assert isinstance(engine, StagesWeights)
            scores = await engine.score(ROW)
            await engine.stage(0, staged)
            assert held(served) == before
            assert (await engine.score(ROW)).tolist() == scores.tolist()
            assert engine.version == -1

    asyncio.run(run())


def test_weights_that_were_staged_and_forgotten_are_not_taken_for_others_of_the_same_number(
    build: Build, device: str
) -> None:
    served = build(seed=0).to(torch.bfloat16).to(device)
    memory = weights(build(seed=1).to(torch.bfloat16))
    other = weights(build(seed=2).to(torch.bfloat16))

    async def run() -> list[list[float]]:
        async with serving(served) as engine:
            await engine.stage(0, memory)
            engine.unstage()
            for name, tensor in memory.items():
                tensor.copy_(other[name])  # the slot has another use meanwhile
            await commit(engine, 0, memory)
            first = await engine.score(ROW)
            await commit(engine, 1, other)
            return [first.tolist(), (await engine.score(ROW)).tolist()]

    first, second = asyncio.run(run())
    assert first == second


def test_weights_that_do_not_fit_are_refused_when_they_are_staged(build: Build, device: str) -> None:
    served = build(seed=0).to(device)
    good, bad = weights(build(seed=1)), weights(build(seed=2))
    bad["model.norm.weight"] = bad["model.norm.weight"][:-1]

    async def run() -> None:
        async with serving(served) as engine:
            await engine.stage(0, good)
            with pytest.raises(WeightSyncError, match=r"weight model.norm.weight: expected torch.float32 \[32\]"):
                await engine.stage(1, bad)
            await commit(engine, 0, good)
            assert held(served) == held(build(seed=1))

    asyncio.run(run())


def test_requests_in_flight_go_on_while_weights_are_staged_and_change_at_the_load_alone(
    build: Build, device: str
) -> None:
    served = build(seed=0).to(device)
    sets = [weights(build(seed=seed)) for seed in (1, 2, 1)]

    async def run() -> None:
        async with serving(served) as engine:
            params = [SamplingParams(max_tokens=100, seed=seed) for seed in range(64)]
            in_flight = [asyncio.create_task(engine.generate([1, 2, 3], each)) for each in params]
            for version, tensors in enumerate(sets):
                await engine.stage(version, tensors)
                await commit(engine, version, tensors)
            for generation in await asyncio.gather(*in_flight):
                versions = [version for version, _ in generation.versions]
                assert versions == sorted(set(versions))
                assert sum(count for _, count in generation.versions) == len(generation.token_ids) == 100

    asyncio.run(run())


def test_the_heads_weight_is_cast_before_the_pause_and_not_in_it(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    served, staged = build(seed=0).to(torch.bfloat16), weights(build(seed=1).to(torch.bfloat16))
    casts: list[str] = []
    operand = HeadForm.operand

    def cast(form: HeadForm, weight: torch.Tensor) -> torch.Tensor:
        casts.append("cast")
        return operand(form, weight)

    async def run() -> None:
        async with serving(served) as engine:
            monkeypatch.setattr(HeadForm, "operand", cast)
            await engine.stage(0, staged)
            assert casts == ["cast"]
            await commit(engine, 0, staged)
            assert casts == ["cast"]

    asyncio.run(run())


def test_what_is_written_beside_the_kernels_of_a_gpu_comes_after_them_and_is_waited_for_also_when_it_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise it would still write to memory that has another use by then."""
    order: list[str] = []

    class Stream:
        def __init__(self, device: torch.device) -> None: ...

        def wait_stream(self, other: str) -> None:
            order.append(f"after {other}")

        def synchronize(self) -> None:
            order.append("waited for")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: "the kernels")
    with pytest.raises(ValueError, match="half way"), beside_the_kernels(torch.device("cuda:0")):
        order.append("copies")
        raise ValueError("half way")
    assert order == ["after the kernels", "copies", "waited for"]


def test_a_cancelled_stage_ends_when_nobody_reads_the_tensors_any_more(build: Build) -> None:
    staged = weights(build(seed=1))

    async def run() -> None:
        async with serving(build(seed=0)) as engine:
            reading, read_on = asyncio.Event(), threading.Event()
            loop, stage = asyncio.get_running_loop(), engine._core.runner.stage

            def held(tensors: Mapping[str, object]) -> dict[str, torch.Tensor]:
                loop.call_soon_threadsafe(reading.set)
                assert read_on.wait(60)
                return stage(tensors)

            engine._core.runner.stage = held  # type: ignore[method-assign]
            staging = asyncio.create_task(engine.stage(0, staged))
            await reading.wait()
            staging.cancel()
            assert await asyncio.wait({staging}, timeout=0) == (set(), {staging})
            read_on.set()
            with pytest.raises(asyncio.CancelledError):
                await staging

    asyncio.run(run())
