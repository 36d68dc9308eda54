"""The suite where adapters are what an engine gets: each merged into the base in float64 is the reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance_case import GREEDY, EngineCase, generate_all, prompts
from conformance_model import ConformanceModel, Weights, build_model
from conformance_weights import WeightConformance
from transformers import AutoModelForCausalLM, PreTrainedModel

from streamrl.errors import WeightSyncError
from streamrl.lora import PREFIX, adapter_shapes
from streamrl.lora_schema import LoraConfig

LORA = LoraConfig(rank=6, alpha=9.0)
"""A scale that is no power of two."""
_LATE = ("o_proj", "gate_proj", "up_proj", "down_proj")


def build_adapted_model(folder: Path, lora: LoraConfig = LORA, *, tied: bool = True) -> ConformanceModel:
    """``A`` and ``B`` differ in every tensor, ``late`` from ``A`` after the keys and values of the last layer only.

    ``base`` is an adapter that adds nothing.
    """
    model = build_model(folder, tied=tied)
    weights = {"A": _draw(folder, lora, seed=1), "B": _draw(folder, lora, seed=2)}
    late = [name for name in weights["A"] if ".layers.1." in name and name.split(".")[-3] in _LATE]
    weights["late"] = weights["A"] | {name: weights["B"][name] for name in late}
    weights["base"] = {name: torch.zeros_like(tensor) for name, tensor in weights["A"].items()}
    return replace(model, weights=weights, bodies={name: merged(folder, each, lora) for name, each in weights.items()})


def merged(folder: Path, adapter: Weights, lora: LoraConfig = LORA) -> PreTrainedModel:
    """float64: ``W + alpha / rank · B · A`` in each adapted layer."""
    body = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        for name, second in adapter.items():
            if name.endswith("lora_B.weight"):
                first = adapter[name.replace("lora_B", "lora_A")]
                layer = body.get_submodule(name.removeprefix(PREFIX).removesuffix(".lora_B.weight"))
                layer.weight += lora.alpha / lora.rank * second.double() @ first.double()
    return body


def _draw(folder: Path, lora: LoraConfig, seed: int) -> Weights:
    """Products with entries about half as large as those of the base."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {}
    for name, empty in adapter_shapes(str(folder), lora, "float32").items():
        scale = empty.shape[1] ** -0.5 if "lora_A" in name else lora.rank**0.5 / lora.alpha
        drawn[name] = torch.randn(empty.shape, generator=generator) * scale
    return drawn


class AdapterConformance(WeightConformance):
    """The suite's, of which one names the tensors of a whole model."""

    @pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "dtype", "kind", "whole"])
    def test_weights_that_do_not_fit_are_refused_whole_and_the_old_ones_serve_on(
        self, engine_case: EngineCase, fault: str
    ) -> None:
        last = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
        tensors: dict[str, Any] = dict(engine_case.model.weights["B"])
        if fault == "missing":
            del tensors[last]
        elif fault == "unknown":
            tensors[last.replace("down_proj", "extra")] = torch.zeros(2)
        elif fault == "shape":
            tensors[last] = tensors[last][:, :-1]
        elif fault == "dtype":
            tensors[last] = tensors[last].double()
        elif fault == "kind":
            tensors[last] = tensors[last].numpy()
        else:
            tensors = {"model.layers.1.mlp.down_proj.weight": torch.zeros(64, 128)}

        async def run() -> None:
            version = engine_case.engine.version
            await engine_case.engine.pause()
            with pytest.raises(WeightSyncError, match="extra" if fault == "unknown" else "down_proj"):
                await engine_case.engine.load(version + 1, tensors)
            await engine_case.engine.resume()
            assert engine_case.engine.version == version
            await generate_all(engine_case, [(prompt, GREEDY) for prompt in prompts(3, seed=11)])

        engine_case.run(run())
