"""The name map of a model gives what transformers writes into its checkpoint, byte for byte, and hardly copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from streamrl.engines.blueprint import Blueprint
from streamrl.engines.conversion import checkpoint_names
from streamrl.engines.shelf import Shelf, ShelfReader
from streamrl.errors import ConfigError, WeightSyncError
from streamrl.sync.arena import Arena, ArenaReader, describe
from streamrl.sync.manifest import plan_manifest
from streamrl.sync.staging import tensors_in

SIZES: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 3, **EXPERTS},
    "mixtral": {"num_local_experts": 3, **EXPERTS},
    "granitemoe": {"num_local_experts": 3, **EXPERTS},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        **EXPERTS,
    },
    "gpt_neox": {},
    "hrm_text": {},
}
"""No experts; the ways in which experts are stored; a buffer in the checkpoint; another name; joined projections."""


def saved(model_type: str, folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model of random weights and buffers that was written to ``folder``, and what lies there."""
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(model_type, **SIZES, **MODELS[model_type])
    )
    for buffer in (each for name, each in model.named_buffers() if name in model.state_dict()):
        buffer.copy_(torch.randn(buffer.shape))
    model.save_pretrained(folder)
    return model, load_file(folder / "model.safetensors")


def parameters(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("model_type", MODELS)
def test_an_engine_is_given_the_checkpoint_that_transformers_would_have_written(
    model_type: str, tmp_path: Path
) -> None:
    model, expected = saved(model_type, tmp_path)
    found = Blueprint.of(str(tmp_path), "float32").verify(parameters(model))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("model_type", MODELS)
def test_nothing_is_copied_but_what_is_put_together(model_type: str, tmp_path: Path) -> None:
    model, _ = saved(model_type, tmp_path)
    sent = parameters(model)
    own = {tensor.untyped_storage().data_ptr() for tensor in sent.values()}
    blueprint = Blueprint.of(str(tmp_path), "float32")
    copied = {
        name for name, tensor in blueprint.names.apply(sent).items() if tensor.untyped_storage().data_ptr() not in own
    }
    assert copied == {each.name for each in blueprint.names.wanted if len(each.parts) > 1}


def test_experts_are_read_where_they_arrived(tmp_path: Path) -> None:
    model, expected = saved("qwen3_moe", tmp_path)
    plan = plan_manifest(describe(parameters(model)), 4096)
    arena = Arena(plan)
    filling = arena.fill(0, lambda index: None)
    for name, tensor in parameters(model).items():
        filling.put(name, tensor)
    arrived = tensors_in(plan, ArenaReader(arena.path, plan).slot(0))
    shelf, reader = Shelf(), ShelfReader()
    found = reader.views(**shelf.put(Blueprint.of(str(tmp_path), "float32").verify(arrived)))
    tensors_in(plan, arena.slot(0))["model.layers.1.mlp.experts.down_proj"][0, 0, 0] = 7.0
    expected["model.layers.1.mlp.experts.0.down_proj.weight"][0, 0] = 7.0
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    shelf.close()
    arena.close()


def test_what_a_checkpoint_has_beside_the_parameters_comes_from_the_folder(tmp_path: Path) -> None:
    model, expected = saved("deepseek_v3", tmp_path)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    constants = Blueprint.of(str(tmp_path), "float32").constants
    assert list(constants) == [name]
    assert torch.equal(constants[name], expected[name])
    assert name not in parameters(model)


def test_tensors_are_named_as_they_travel_where_they_do_not_fit(tmp_path: Path) -> None:
    model, _ = saved("qwen3_moe", tmp_path)
    blueprint = Blueprint.of(str(tmp_path), "float32")
    stack = "model.layers.1.mlp.experts.gate_up_proj"
    with pytest.raises(WeightSyncError, match=rf"weight {stack}: expected torch.float32 \[3, 32, 32\], got"):
        blueprint.verify(parameters(model) | {stack: torch.zeros(3, 16, 32)})


@pytest.mark.parametrize(
    ("conversion", "reason"),
    [
        pytest.param(lambda tensors: {name: each + 1 for name, each in tensors.items()}, "is computed", id="computed"),
        pytest.param(
            lambda tensors: {name: each.clone().mul_(2) for name, each in tensors.items()},
            "mul_.* changes values",
            id="computed in place",
        ),
        pytest.param(
            lambda tensors: {"both": torch.cat(list(tensors.values()))[:2]}, "were put together", id="part of a join"
        ),
        pytest.param(lambda tensors: {}, "no tensor that the engine loads has element 0 of a", id="left out"),
    ],
)
def test_a_conversion_that_is_no_table_is_refused(
    conversion: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        transformers.core_model_loading, "revert_weight_conversion", lambda model, tensors: conversion(tensors)
    )
    with pytest.raises(ConfigError, match=f"model.name: Linear is not saved as parts of its tensors .*{reason}"):
        checkpoint_names(torch.nn.Linear(2, 2), {"a": torch.Size((2, 2)), "b": torch.Size((2, 2))})
