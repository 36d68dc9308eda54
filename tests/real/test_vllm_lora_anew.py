"""vLLM with adapters in few layers, and keys and values computed anew at each update."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: `make test-vllm` makes an environment that has it")

from conformance_case import EngineCase, Serving, prompts
from conformance_lora import build_adapted_model
from vllm_support import settings

from streamrl.config import load_config
from streamrl.engines.vllm.engine import VllmEngine
from streamrl.lora_schema import LoraConfig
from streamrl.ports import Engine
from streamrl.types import SamplingParams

pytestmark = pytest.mark.timeout(600)


class TestComputedAnew(Serving):
    """``engine.kv=recompute``, an untied head, adapters in few layers: vLLM fuses q_proj with two that have none."""

    @pytest.fixture(scope="class")
    @classmethod
    def engine_case(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
        lora = LoraConfig(rank=8, alpha=16.0, targets=["q_proj", "down_proj"])
        model = build_adapted_model(tmp_path_factory.mktemp("model"), lora, tied=False)
        chosen = ("model.lora.rank=8", "model.lora.alpha=16", "model.lora.targets=[q_proj,down_proj]")
        config = load_config(overrides=settings(*chosen, "engine.kv=recompute"))

        async def start() -> Engine:
            return await VllmEngine.start(config, str(model.folder))

        with EngineCase("vllm 0.32", model, start, kv="recompute") as case:
            yield case

    def test_requests_in_flight_go_on_with_keys_and_values_of_the_new_adapter(self, engine_case: EngineCase) -> None:
        asked = [
            (prompt, SamplingParams(max_tokens=30 + 4 * index, seed=index))
            for index, prompt in enumerate(prompts(24, seed=31))
        ]

        async def run() -> None:
            first = engine_case.engine.version
            tasks = [asyncio.ensure_future(engine_case.engine.generate(*each)) for each in asked]
            for index, which in enumerate(("B", "A", "B")):
                await asyncio.wait(tasks[2 * index : 2 * index + 2])
                await engine_case.install(which)
            for (prompt, params), answer in zip(asked, await asyncio.gather(*tasks), strict=True):
                engine_case.check(prompt, params, answer)
                assert len(answer.token_ids) == params.max_tokens
            assert engine_case.engine.version == first + 3

        engine_case.run(run())
