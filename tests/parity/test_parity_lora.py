"""The gate where adapters travel alone: version 0 adds nothing to the base, and wrong ones are found all the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from parity_support import Engine, Trainer, build, examine, failed_gate, gate_of, settings

from streamrl.lora import adapted, adapter_parameters
from streamrl.lora_schema import LoraConfig
from streamrl.parity.records import REHEARSED, Asked, Semantics
from streamrl.parity.weights import Perturbed, after_the_cache, digests
from streamrl.policy.parity import answer
from streamrl.schema import Config

LAYER = "base_model.model.model.layers"


def lora_settings(dtype: str = "float32") -> Config:
    config = settings()
    config.model.dtype = dtype
    config.model.lora = LoraConfig(rank=4, alpha=8.0)
    return config


def model(config: Config, dtype: torch.dtype = torch.float32, served: bool = False) -> Any:
    """As a trainer has it (adapters in float32), or as an engine does."""
    base = build().to(getattr(torch, config.model.dtype))
    return adapted(base, config.model.lora, config.seed, getattr(torch, config.model.dtype) if served else dtype)


def trainer(config: Config) -> Trainer:
    return Trainer(config, model(config))


def engine(kind: type[Engine], config: Config, **options: Any) -> Engine:
    return kind(model(config, served=True), **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_an_engine_without_a_fault_passes_every_gate_and_nothing_is_left_out(kv: str, dtype: str) -> None:
    config = lora_settings(dtype)
    verdict = examine(engine(Engine, config, kv=kv), trainer(config))
    assert verdict.passed, verdict
    assert verdict.warnings == []
    measured = next(line for line in gate_of(verdict, "path").measured if line.what == REHEARSED)
    assert measured.comparison.tokens > 100
    if dtype == "float32":
        assert measured.comparison.rms < 1e-5


class Loads(Engine):
    """Changes what it is told to load; subclasses plant one fault each."""

    def altered(self, tensors: dict[str, Any]) -> Mapping[str, Any]:
        raise NotImplementedError

    async def load(self, version: int, tensors: Mapping[str, object]) -> None:
        await super().load(version, self.altered(dict(tensors)))


class NeverLoadsOne(Loads):
    lost = f"{LAYER}.1.mlp.up_proj.lora_B.weight"

    def altered(self, tensors: dict[str, Any]) -> Mapping[str, Any]:
        return tensors | {self.lost: self._core.runner.parameters()[self.lost].clone()}


class NeverLoads(Loads):
    def altered(self, tensors: dict[str, Any]) -> Mapping[str, Any]:
        return {name: tensor.clone() for name, tensor in self._core.runner.parameters().items()}


class SwapsZeros(Loads):
    """Both are 0 in version 0, so that only the rehearsal tells."""

    pair = (f"{LAYER}.0.self_attn.o_proj.lora_B.weight", f"{LAYER}.1.self_attn.o_proj.lora_B.weight")

    def altered(self, tensors: dict[str, Any]) -> Mapping[str, Any]:
        one, other = self.pair
        return tensors | {one: tensors[other], other: tensors[one]}


class SwapsFactors(SwapsZeros):
    pair = (f"{LAYER}.0.self_attn.q_proj.lora_A.weight", f"{LAYER}.1.self_attn.q_proj.lora_A.weight")


@pytest.mark.parametrize("kv", ["keep", "recompute"])
@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (NeverLoadsOne, f"tensor {NeverLoadsOne.lost} not loaded: no update changes what the engine holds"),
        (SwapsZeros, f"tensors {SwapsZeros.pair[0]} and {SwapsZeros.pair[1]} are swapped"),
        (SwapsFactors, f"tensors {SwapsFactors.pair[0]} and {SwapsFactors.pair[1]} are swapped"),
    ],
)
def test_wrong_adapters_are_named(kind: type[Engine], cause: str, kv: str) -> None:
    config = lora_settings()
    assert failed_gate(examine(engine(kind, config, kv=kv), trainer(config))) == ("path", cause)


def test_an_engine_that_loads_no_adapter_at_all_is_found() -> None:
    config = lora_settings()
    name, cause = failed_gate(examine(engine(NeverLoads, config), trainer(config)))
    assert name == "path"
    assert cause.endswith("and 25 more not loaded: no update changes what the engine holds")


class CannotTell:
    """Any engine, without the capability of digests."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        if name == "digests":
            raise AttributeError(name)
        return getattr(self._engine, name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_without_effect_show_in_the_scores_of_an_engine_that_cannot_tell(dtype: str) -> None:
    config = lora_settings(dtype)
    name, cause = failed_gate(examine(CannotTell(engine(NeverLoads, config)), trainer(config)))
    assert (name, cause) == (
        "path", "the adapters have no effect: under any of them the engine scores as the base does",
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", ["swapped", "scale"])
def test_adapters_that_are_mixed_up_or_scaled_show_in_the_scores_too(fault: str, dtype: str) -> None:
    config = lora_settings(dtype)
    other = lora_settings(dtype)
    if fault == "scale":
        other.model.lora.alpha *= 2
    kind = SwapsZeros if fault == "swapped" else Engine
    name, cause = failed_gate(examine(CannotTell(engine(kind, other)), trainer(config)))
    assert name == "path"
    assert cause.startswith("the engine computes something else with adapters than the trainer (rms")


def test_the_trainer_scores_under_the_rehearsed_weights_and_has_its_own_back() -> None:
    config = lora_settings()
    learner = trainer(config)
    before = digests({name: p.detach() for name, p in adapter_parameters(learner.model).items()})
    row, rule = list(range(1, 30)), Semantics()
    own, other = answer(learner, [Asked(row, rule), Asked(row, rule, rehearsed=True)]).rows
    assert digests({name: p.detach() for name, p in adapter_parameters(learner.model).items()}) == before
    assert own == learner.score(row).tolist()
    perturbed = Perturbed({name: p.detach().clone() for name, p in adapter_parameters(learner.model).items()})
    for name, parameter in adapter_parameters(learner.model).items():
        parameter.data = perturbed[name]
    assert other == learner.score(row).tolist()
    assert max(abs(one - two) for one, two in zip(own, other, strict=True)) > 0.5


@pytest.mark.parametrize(
    ("targets", "found"),
    [([], {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}), (["q_proj", "v_proj"], {"self_attn.q_proj"}),
     (["v_proj"], set())],
)  # fmt: skip
def test_adapters_after_the_kv_cache_are_those_of_the_last_layer(targets: list[str], found: set[str]) -> None:
    config = lora_settings()
    config.model.lora.targets = targets
    names = after_the_cache(adapter_parameters(model(config)))
    assert {name.removeprefix(f"{LAYER}.1.").rsplit(".", 2)[0] for name in names} == found
