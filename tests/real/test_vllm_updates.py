"""vLLM across weight updates: the fp32 head of a body in bf16, the prefix cache, keys and values computed again."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here: `make test-vllm` makes an environment that has it")

from conformance_case import GREEDY, EngineCase, Serving, generate_all, prompts
from conformance_model import ConformanceModel, build_model
from conformance_weights import WeightConformance
from vllm_support import salt_alike, settings

from streamrl.config import load_config
from streamrl.engines.vllm.engine import VllmEngine
from streamrl.ports import Engine

HIDDEN = 512
"""Wide enough that a head in bf16 shows."""
BLOCK = 128
"""Tokens of a block of vLLM's cache on a CPU."""


def add_heads_alone(model: ConformanceModel) -> None:
    """Weight sets whose layers add nothing to the embeddings: then only the head rounds, and it alone is compared."""
    for name in ("A", "B"):
        tensors = dict(model.weights[name]) | {"model.norm.weight": torch.ones(HIDDEN, dtype=model.dtype)}
        for each, tensor in model.weights[name].items():
            if each.endswith(("o_proj.weight", "down_proj.weight")):
                tensors[each] = torch.zeros_like(tensor)
        body = copy.deepcopy(model.bodies[name])
        body.load_state_dict(tensors, strict=False)
        body.tie_weights()
        cast(dict[str, Any], model.weights)[f"head {name}"] = tensors
        cast(dict[str, Any], model.bodies)[f"head {name}"] = body


def mean_distance(case: EngineCase, head_dtype: torch.dtype) -> float:
    """Of the engine's scores from those of the reference with a head in ``head_dtype``, over a few rows, in nats."""
    reference = replace(case.model, head_dtype=head_dtype)
    served = case.sets[case.engine.version]
    rows = prompts(6, longest=200, seed=20)
    offsets = [case.run(case.engine.score(row)) - reference.score(served, row) for row in rows]
    return float(np.abs(np.concatenate(offsets)).mean())


class TestHeadInFp32(WeightConformance):
    @pytest.fixture(scope="class", params=[True, False], ids=["tied", "untied"])
    @classmethod
    def engine_case(cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
        folder, tied = tmp_path_factory.mktemp("model"), request.param
        model = build_model(folder, tied=tied, dtype="bfloat16", head_dtype="float32", hidden=HIDDEN)
        add_heads_alone(model)
        config = load_config(overrides=settings("model.dtype=bfloat16", "engine.kv=recompute"))

        async def start() -> Engine:
            return await VllmEngine.start(config, str(folder))

        with EngineCase("vllm", model, start, "recompute", tolerance=1.0, rms=0.1) as case:
            yield case

    def test_after_every_load_scores_are_those_of_a_head_in_fp32(self, engine_case: EngineCase) -> None:
        for which in ("head A", "head B", "head A"):
            engine_case.run(engine_case.install(which))
            exact, rounded = (mean_distance(engine_case, dtype) for dtype in (torch.float32, torch.bfloat16))
            assert exact < 0.1 * rounded, which


class TestPrefixCache(Serving):
    @pytest.fixture(scope="class")
    @classmethod
    def engine_case(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
        model = build_model(tmp_path_factory.mktemp("model"), tied=False)
        config = load_config(overrides=settings("engine.prefix_caching=true"))

        async def start() -> Engine:
            return await VllmEngine.start(config, str(model.folder))

        with EngineCase("vllm", model, start, "keep") as case:
            yield case

    def test_a_cached_beginning_is_reused_within_a_version_and_never_after_an_update(
        self, engine_case: EngineCase
    ) -> None:
        assert engine_case.engine.facts().prefix_caching
        asked = [(prompts(1, longest=1, seed=21)[0] * 200, GREEDY)]

        async def prefilled() -> int:
            before = engine_case.engine.statistics().prefilled_tokens
            await generate_all(engine_case, asked)
            return engine_case.engine.statistics().prefilled_tokens - before

        async def run() -> None:
            assert [await prefilled(), await prefilled()] == [200, 200 - BLOCK]
            await engine_case.install("B")
            assert [await prefilled(), await prefilled()] == [200, 200 - BLOCK]

        engine_case.run(run())

    def test_nothing_is_reused_of_a_version_that_was_rolled_back(self, engine_case: EngineCase) -> None:
        asked = [(prompts(1, longest=1, seed=25)[0] * 200, GREEDY)]

        async def run() -> None:
            await generate_all(engine_case, asked)
            await engine_case.install("B", engine_case.engine.version)
            await generate_all(engine_case, asked)

        engine_case.run(run())

    def test_without_the_salt_an_update_would_leave_stale_keys_and_values(
        self, engine_case: EngineCase, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What the salt is for: the same requests, under one that never changes."""
        salt_alike(monkeypatch)
        asked = [(prompts(1, longest=1, seed=22)[0] * 200, GREEDY)]

        async def run() -> None:
            await generate_all(engine_case, asked)
            await engine_case.install("B")
            with pytest.raises(AssertionError, match="log-probs of"):
                await generate_all(engine_case, asked)

        engine_case.run(run())

    def test_scores_come_from_the_weights_and_never_from_the_cache(self, engine_case: EngineCase) -> None:
        row = prompts(1, longest=1, seed=23)[0] * 150 + prompts(1, longest=60, seed=24)[0]

        async def run() -> None:
            await engine_case.engine.generate(row, GREEDY)
            for temperature in (1.0, 0.5):
                scores = await asyncio.gather(*(engine_case.engine.score(row, temperature) for _ in range(2)))
                expected = engine_case.model.score("A", row, temperature)
                for score in scores:
                    np.testing.assert_allclose(score, expected, rtol=0, atol=engine_case.tolerance)

        engine_case.run(run())
