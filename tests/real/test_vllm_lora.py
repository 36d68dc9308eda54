"""vLLM with an adapter that is replaced alone: the base stays, as its folder has it (docs/lora.md)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here: `make test-vllm` makes an environment that has it")

from conformance_case import EngineCase, check_64_in_flight_across_5_updates, prompts
from conformance_lora import LORA, AdapterConformance, build_adapted_model, merged
from vllm_support import settings

from streamrl.config import load_config
from streamrl.engines.vllm.engine import VllmEngine
from streamrl.ports import Engine

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def engine_case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCase]:
    model = build_adapted_model(tmp_path_factory.mktemp("model"))
    config = load_config(
        overrides=settings(
            f"model.lora.rank={LORA.rank}", f"model.lora.alpha={LORA.alpha}", "engine.prefix_caching=true"
        )
    )

    async def start() -> Engine:
        return await VllmEngine.start(config, str(model.folder))

    with EngineCase("vllm 0.32", model, start, kv="keep") as case:
        yield case


def test_until_an_adapter_arrives_the_base_is_served_as_version_minus_1(engine_case: EngineCase):
    async def run() -> None:
        assert engine_case.engine.version == -1
        for row in prompts(3, longest=60, seed=50):
            expected = engine_case.model.score("base", row)
            np.testing.assert_allclose(await engine_case.engine.score(row), expected, rtol=0, atol=1e-4)

    engine_case.run(run())


def test_the_adapter_of_each_layer_arrives_in_its_place(engine_case: EngineCase):
    """One layer's adapter at a time, the others adding nothing."""
    whole, row = engine_case.model.weights["A"], prompts(1, longest=60, seed=51)[0] + list(range(8, 60))
    layers = sorted({name.rpartition(".lora_")[0] for name in whole})
    assert len(layers) == 2 * 7

    async def run() -> None:
        for layer in layers:
            alone = {name: each if name.startswith(layer) else torch.zeros_like(each) for name, each in whole.items()}
            await engine_case.engine.pause()
            await engine_case.engine.load(engine_case.engine.version + 1, alone)
            await engine_case.engine.resume()
            tokens = torch.tensor([row])
            with torch.no_grad():
                rows = merged(engine_case.model.folder, alone)(input_ids=tokens).logits[0].log_softmax(-1)
            expected = rows[:-1].gather(1, tokens[0, 1:, None])[:, 0].numpy()
            found = await engine_case.engine.score(row)
            np.testing.assert_allclose(found[1:], expected, rtol=0, atol=1e-4, err_msg=layer)
            assert np.abs(expected - engine_case.model.score("base", row)[1:]).max() > 0.01, layer

    engine_case.run(run())


def test_64_requests_in_flight_across_5_adapters_all_end_and_each_token_has_its_version(engine_case: EngineCase):
    engine_case.run(check_64_in_flight_across_5_updates(engine_case))


def test_scores_are_those_of_the_merged_model_in_float64_within_a_tenth_of_the_gates_limit(engine_case: EngineCase):
    rows = [each + list(range(8, 60)) for each in prompts(6, longest=100, seed=52)]

    async def run() -> None:
        await engine_case.install("B")
        offsets = [await engine_case.engine.score(row) - engine_case.model.score("B", row) for row in rows]
        assert np.sqrt(np.mean(np.concatenate(offsets) ** 2)) < 1e-5

    engine_case.run(run())


class TestAdapters(AdapterConformance):
    """The suite's."""
