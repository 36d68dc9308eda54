"""The embedded engine under adapters: they are replaced in place, the base stays, and the trainer agrees."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from conformance_case import SLOTS, EngineCase, prompts
from conformance_lora import LORA, AdapterConformance, build_adapted_model
from conformance_model import MAX_LENGTH

from streamrl.actors.engine_loading import load_embedded, load_frozen_engine
from streamrl.engines.embedded import EmbeddedEngine
from streamrl.lora import adapter_parameters
from streamrl.parity.weights import digests
from streamrl.policy.learner import Learner
from streamrl.policy.model import load_model
from streamrl.policy.trained import load_trained
from streamrl.schema import Config, EngineConfig, ModelConfig


def settings(kv: str = "keep", dtype: str = "float32") -> Config:
    model = ModelConfig(max_length=MAX_LENGTH, dtype=dtype, lora=LORA)
    return Config(model=model, engine=EngineConfig(slots=SLOTS, kv=kv))


@pytest.fixture(scope="module", params=["keep", "recompute"])
def engine_case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCase]:
    model = build_adapted_model(tmp_path_factory.mktemp("model"), tied=request.param == "keep")
    config = settings(request.param)
    with EngineCase("embedded", model, lambda: load_embedded(config, str(model.folder)), config.engine.kv) as case:
        yield case


class TestEmbeddedAdapters(AdapterConformance):
    pass


def test_until_an_adapter_arrives_the_base_is_served_as_version_minus_1(engine_case: EngineCase) -> None:
    async def run() -> None:
        engine = await load_embedded(settings(), str(engine_case.model.folder))
        try:
            assert engine.version == -1
            row = prompts(1, longest=60, seed=50)[0]
            np.testing.assert_allclose(await engine.score(row), engine_case.model.score("base", row), atol=1e-4)
        finally:
            await engine.close()

    asyncio.run(run())


def test_digests_are_those_of_the_adapters_that_were_loaded_last(engine_case: EngineCase) -> None:
    assert isinstance(engine_case.engine, EmbeddedEngine)
    for which in ("A", "B", "A", "B"):
        engine_case.run(engine_case.install(which))
        assert engine_case.run(engine_case.engine.digests()) == digests(engine_case.model.weights[which])


def test_adapters_are_served_from_the_memory_in_which_they_came(engine_case: EngineCase) -> None:
    engine_case.run(engine_case.install("B"))
    assert isinstance(engine_case.engine, EmbeddedEngine)
    held = engine_case.engine._core.runner.parameters()
    sent = engine_case.model.weights["B"]
    assert {name: each.data_ptr() for name, each in held.items()} == {n: t.data_ptr() for n, t in sent.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_are_the_trainers(tmp_path: Path, dtype: str) -> None:
    weights = build_adapted_model(tmp_path).weights["A"]
    config = settings(dtype=dtype)
    trained = load_trained(config, tmp_path)
    for name, parameter in adapter_parameters(trained).items():
        parameter.data.copy_(weights[name])
    learner = Learner(config, trained)
    sent = {name: tensor.clone() for name, tensor in learner.full_parameters()}
    assert {tensor.dtype for tensor in sent.values()} == {getattr(torch, dtype)}
    rows = [each + list(range(8, 60)) for each in prompts(4, longest=100, seed=52)]

    async def run() -> list[np.ndarray]:
        engine = await load_embedded(config, str(tmp_path))
        try:
            await engine.pause()
            await engine.load(0, sent)
            await engine.resume()
            return [await engine.score(row) for row in rows]
        finally:
            await engine.close()

    offsets = [own - learner.score(row) for own, row in zip(asyncio.run(run()), rows, strict=True)]
    assert np.sqrt(np.mean(np.concatenate(offsets) ** 2)) < (1e-5 if dtype == "float32" else 0.05)


def test_an_engine_of_the_reference_has_the_whole_checkpoint_and_no_adapter(tmp_path: Path) -> None:
    build_adapted_model(tmp_path)

    async def run() -> None:
        engine = await load_frozen_engine(settings(), str(tmp_path))
        try:
            assert isinstance(engine, EmbeddedEngine)
            assert engine.version == 0
            held = await engine.digests()
        finally:
            await engine.close()
        whole = {name: each.detach() for name, each in load_model(tmp_path, "float32").named_parameters()}
        assert held == digests(whole)

    asyncio.run(run())
