"""vLLM with ``sync.stage=device``: a second set of weights, filled while the first computes, then exchanged with it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here: `make test-vllm` makes an environment that has it")

import held_worker
from conformance_case import GREEDY, EngineCase, check_64_in_flight_across_5_updates, generate_all, prompts
from conformance_model import build_model
from conformance_weights import WeightConformance
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm_support import kill_vllm, settings

from streamrl.config import load_config
from streamrl.engines.vllm import settings as vllm_settings
from streamrl.engines.vllm.engine import VllmEngine
from streamrl.engines.vllm.staged import SecondSet
from streamrl.errors import ActorDied, ConfigError, WeightSyncError
from streamrl.ports import Engine, StagesWeights


class StagedCase(EngineCase):
    """Stages each weight set before the pause, as a subscriber does."""

    async def install(self, which: str, version: int | None = None) -> int:
        version = self.engine.version + 1 if version is None else version
        await self.stage(version, which)
        return await super().install(which, version)

    async def stage(self, version: int, which: str) -> None:
        assert isinstance(self.engine, StagesWeights)
        await self.engine.stage(version, self.model.weights[which])


class TestStagedWeights(WeightConformance):
    """The suite of loads and updates, by way of the second set, and what is its own. A tied model, and bf16."""

    @pytest.fixture(scope="class", params=["float32", "bfloat16"])
    @classmethod
    def engine_case(cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
        folder, dtype = tmp_path_factory.mktemp("model"), request.param
        exact = dtype == "float32"
        model = build_model(folder, tied=exact, dtype=dtype)
        config = load_config(overrides=settings(f"model.dtype={dtype}", "sync.stage=device"))

        async def start() -> Engine:
            return await VllmEngine.start(config, str(folder))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vllm_settings, "WORKER", held_worker.WORKER)
            patch.setenv(held_worker.PIPE, str(folder / "hold"))
            wide = {} if exact else {"tolerance": 1.0, "rms": 0.1}
            with StagedCase("vllm", model, start, "keep", **wide) as case:
                yield case

    @pytest.fixture
    def hold(self, engine_case: StagedCase) -> Iterator[Path]:
        """Whoever writes to it lets the next fill begin."""
        pipe = engine_case.model.folder / "hold"
        os.mkfifo(pipe)
        yield pipe
        pipe.unlink()

    def test_whole_answers_are_generated_while_weights_are_staged_and_from_the_old_ones(
        self, engine_case: StagedCase, hold: Path
    ) -> None:
        asked = [(prompt, GREEDY) for prompt in prompts(4, seed=40)]

        async def run() -> None:
            version = engine_case.engine.version
            staging = asyncio.ensure_future(engine_case.stage(version + 1, "B"))
            for answer in await generate_all(engine_case, asked):
                assert answer.versions == [(version, GREEDY.max_tokens)]
            assert not staging.done()
            await asyncio.to_thread(hold.write_text, "go")
            await staging
            for answer in await generate_all(engine_case, asked):
                assert answer.versions == [(version, GREEDY.max_tokens)], "staged is not serving"
            await EngineCase.install(engine_case, "A", version + 1)
            engine_case.sets[version + 1] = "B"  # the load took up what was staged, and copied nothing
            await generate_all(engine_case, asked)

        engine_case.run(run())

    def test_a_stage_that_fails_half_way_leaves_the_old_weights_serving_and_can_be_done_again(
        self, engine_case: StagedCase, hold: Path
    ) -> None:
        asked = [(prompt, GREEDY) for prompt in prompts(4, seed=41)]

        async def stage(word: str, version: int, which: str) -> None:
            staging = asyncio.ensure_future(engine_case.stage(version, which))
            await asyncio.to_thread(hold.write_text, word)
            await staging

        async def run() -> None:
            version = engine_case.engine.version
            with pytest.raises(WeightSyncError, match="vLLM could not stage the weights: RuntimeError: .* no weights"):
                await stage("fail", version + 1, "late")
            await generate_all(engine_case, asked)
            await stage("go", version + 1, "B")
            engine_case.sets[version + 1] = "B"
            await EngineCase.install(engine_case, "B", version + 1)
            await generate_all(engine_case, asked)

        engine_case.run(run())

    def test_a_stage_that_is_cancelled_ends_with_the_thread_and_another_version_takes_its_place(
        self, engine_case: StagedCase, hold: Path
    ) -> None:
        async def run() -> None:
            version = engine_case.engine.version
            staging = asyncio.ensure_future(engine_case.stage(version + 1, "B"))
            await asyncio.to_thread(hold.write_text, "")  # it is under way
            staging.cancel()
            with pytest.raises(asyncio.CancelledError):
                await staging
            other = asyncio.ensure_future(engine_case.stage(version + 1, "late"))
            await asyncio.to_thread(hold.write_text, "go")
            await other
            await EngineCase.install(engine_case, "late", version + 1)
            await generate_all(engine_case, [(prompt, GREEDY) for prompt in prompts(4, seed=42)])

        engine_case.run(run())

    def test_weights_that_are_loaded_in_between_leave_what_is_staged_as_it_is(self, engine_case: StagedCase) -> None:
        """As in the rehearsal of the first update."""
        row = prompts(1, longest=60, seed=43)[0]

        async def scored() -> np.ndarray:
            return await engine_case.engine.score(row)

        async def run() -> None:
            version = engine_case.engine.version
            for _ in range(2):
                await engine_case.stage(version + 1, "B")
                # The load of what is staged is given other tensors, which it must not look at.
                for other, given, which in (
                    (-3, "late", "late"), (version + 1, "A", "B"), (version + 1, "late", "late"), (-2, "A", "A")
                ):  # fmt: skip
                    await EngineCase.install(engine_case, given, other)
                    expected = engine_case.model.score(which, row)
                    np.testing.assert_allclose(await scored(), expected, rtol=0, atol=engine_case.tolerance)

        engine_case.run(run())

    def test_64_requests_in_flight_across_staged_updates_all_end_and_each_token_has_its_version(
        self, engine_case: StagedCase
    ) -> None:
        engine_case.run(check_64_in_flight_across_5_updates(engine_case))

    def test_a_worker_that_is_killed_while_it_stages_ends_the_engine(self, engine_case: StagedCase, hold: Path) -> None:
        """The last test: it ends the engine."""

        async def run() -> None:
            staging = asyncio.ensure_future(engine_case.stage(engine_case.engine.version + 1, "B"))
            await generate_all(engine_case, [([9, 10], GREEDY)])
            kill_vllm(engine_case.engine)
            with pytest.raises(ActorDied):
                await staging
            with pytest.raises(ActorDied):
                await engine_case.engine.pause()

        engine_case.run(run())


class Layers(torch.nn.Module):
    """Enough of a vLLM model: linear layers, of which the second may be of another kind."""

    def __init__(self, seed: int, method: object = None) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.layers[1].quant_method = method  # type: ignore[assignment]
        record_metadata_for_reloading(self)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        own, loaded = dict(self.named_parameters()), set()
        for name, tensor in weights:
            getattr(own[name], "weight_loader", default_weight_loader)(own[name], tensor)
            loaded.add(name)
        return loaded


def parameters(model: torch.nn.Module) -> dict[str, list[float]]:
    return {name: parameter.flatten().tolist() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_both_sets_stay_apart_and_a_gpu_keeps_the_tensors_that_graphs_captured(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exchange of a GPU, on a CPU's tensors."""
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    model, sets = Layers(0), {seed: dict(Layers(seed).named_parameters()) for seed in (1, 2)}
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    second = SecondSet(model, None)
    before = parameters(model)
    for seed in (1, 2, 1, 2):
        second.fill(sets[seed])
        assert parameters(model) == before
        with monkeypatch.context() as patch:
            patch.setattr(second, "_device", torch.device(device))
            second.exchange()
        before = {name: tensor.flatten().tolist() for name, tensor in sets[seed].items()}
        assert parameters(model) == before
        stayed = {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == places
        assert stayed == (device == "cuda" or seed == 2)


class OtherMethod(UnquantizedLinearMethod):
    """Processes weights in a way that nobody knows."""

    def __init__(self) -> None: ...


def test_a_model_with_a_layer_that_is_processed_otherwise_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^layers.1 \(Linear\) is processed by OtherMethod$"):
        SecondSet(Layers(0, OtherMethod()), None)


def test_a_mixture_of_experts_is_refused_when_the_engine_starts(tmp_path: Path) -> None:
    """vLLM packs experts in a way that a second set would not follow."""
    model = build_model(tmp_path, tied=False, experts=4)
    config = load_config(overrides=settings("sync.stage=device"))
    refusal = r"^sync.stage=device: no second set .*RoutedExperts.* is processed by Unquantized.*; set sync.stage=host$"
    with pytest.raises(ConfigError, match=refusal):
        asyncio.run(VllmEngine.start(config, str(model.folder)))
