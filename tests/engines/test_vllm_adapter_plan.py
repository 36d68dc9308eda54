"""What vLLM is told of an adapter before it starts. Needs no vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conformance_model import build_model

from streamrl.config import load_config
from streamrl.engines.blueprint import Blueprint
from streamrl.engines.vllm.adapter_plan import arriving_weights, check_placed, holding_arguments, room_for
from streamrl.engines.vllm.settings import engine_arguments
from streamrl.errors import ConfigError, WeightSyncError
from streamrl.schema import Config

Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("model")).folder


def config(rank: int, *targets: str) -> Config:
    made = load_config(overrides=["engine=vllm", "model.max_length=256"])
    made.model.lora.rank, made.model.lora.targets = rank, list(targets)
    return made


def test_without_adapters_the_engine_starts_with_random_weights_and_gets_the_whole_model(folder: Path):
    blueprint = Blueprint.of(str(folder), "float32")
    arguments = engine_arguments(config(0), str(folder), blueprint, cpu=True)
    assert arguments["load_format"] == "dummy"
    assert "enable_lora" not in arguments
    assert arriving_weights(config(0), str(folder), blueprint) is blueprint


def test_with_them_it_starts_with_the_base_and_room_in_the_adapted_layers_alone(folder: Path):
    chosen = config(9, "self_attn.q_proj", "down_proj")
    arguments = engine_arguments(chosen, str(folder), Blueprint.of(str(folder), "float32"), cpu=True)
    assert (arguments["load_format"], arguments["enable_lora"], arguments["max_loras"]) == ("auto", True, 1)
    assert (arguments["max_lora_rank"], arguments["lora_target_modules"]) == (16, ["down_proj", "q_proj"])


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (2, 8), (8, 8), (65, 128), (257, 320), (512, 512)])
def test_room_is_made_for_the_next_rank_that_vllm_has(rank: int, room: int):
    assert room_for(rank) == room


def test_a_rank_that_vllm_has_no_room_for_is_refused():
    with pytest.raises(ConfigError, match=r"model\.lora\.rank=513 with engine\.name=vllm: .* up to 512"):
        room_for(513)


def test_what_arrives_is_the_adapter_and_nothing_else(folder: Path):
    chosen = config(4, "q_proj")
    adapter = arriving_weights(chosen, str(folder), Blueprint.of(str(folder), "float32"))
    told = holding_arguments(chosen, adapter)
    assert (told["rank"], told["alpha"], len(told["shapes"])) == (4, 32.0, 4)
    assert told["shapes"][f"{Q_PROJ}.lora_A.weight"] == [4, 64]
    assert told["shapes"][f"{Q_PROJ}.lora_B.weight"] == [128, 4]
    tensors = {name: torch.randn(shape) for name, shape in told["shapes"].items()}
    verified = adapter.verify(tensors)
    assert list(verified) == list(tensors)
    assert all(torch.equal(verified[name], tensors[name]) for name in tensors)
    with pytest.raises(WeightSyncError, match="embed_tokens"):
        adapter.verify(tensors | {"model.embed_tokens.weight": torch.zeros(104, 64)})


def test_a_layer_that_no_worker_has_a_place_for_is_refused_and_one_of_another_stage_of_a_pipeline_is_not():
    check_placed([["layers.0.q_proj"], ["layers.1.q_proj"]])
    check_placed([[]])
    with pytest.raises(ConfigError, match=r"no place for adapters in \['layers.1.gate'\] \(1 layers\)"):
        check_placed([["layers.0.q_proj", "layers.1.gate"], ["layers.1.gate"]])
