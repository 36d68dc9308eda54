"""What of the engine on vLLM needs no vLLM: its arguments, its environment, and the weights' way to its processes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from streamrl.actors.engine_loading import load_frozen_engine, without_stage
from streamrl.config import load_config
from streamrl.engines.blueprint import Blueprint
from streamrl.engines.vllm.engine import VllmEngine, require_vllm
from streamrl.engines.vllm.settings import engine_arguments, start_environment
from streamrl.errors import ConfigError
from streamrl.schema import Config
from streamrl.sync.names import same_names

TEXT = SimpleNamespace(
    max_position_embeddings=4096, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, head_dim=16,
    hidden_size=64,
)  # fmt: skip
BLUEPRINT = Blueprint({}, torch.bfloat16, 100, TEXT, same_names({}), {})


def arguments(*overrides: str, cpu: bool = True) -> dict:
    config = load_config(overrides=["engine=vllm", "model.dtype=bfloat16", *overrides])
    return engine_arguments(config, "folder", BLUEPRINT, cpu=cpu)


def test_everything_that_decides_logprobs_is_said_and_not_left_to_a_default():
    found = arguments()
    decided = {
        "dtype": "bfloat16", "logprobs_mode": "processed_logprobs", "enable_prefix_caching": False,
        "async_scheduling": False, "enable_chunked_prefill": True, "generation_config": "vllm",
        "load_format": "dummy", "hf_overrides": {"head_dtype": "float32"},
    }  # fmt: skip
    assert {name: found[name] for name in decided} == decided
    assert (found["max_model_len"], found["max_num_seqs"]) == (513, 64)


def test_further_arguments_pass_and_the_heads_dtype_stays_ours():
    found = arguments(
        "engine.args.block_size=32", "engine.args.hf_overrides={rope_theta: 1e6}", "engine.tensor_parallel=2"
    )
    assert (found["block_size"], found["tensor_parallel_size"]) == (32, 2)
    assert found["hf_overrides"] == {"head_dtype": "float32", "rope_theta": 1e6}
    assert "distributed_executor_backend" not in found, "several devices need several processes"


def test_the_cache_of_a_cpu_holds_every_slot_at_full_length_within_bounds():
    token_bytes = 2 * 3 * 2 * 16 * 2  # keys and values × layers × heads × size × bf16
    blocks = 4096 * 5 + 1  # 513 tokens are 5 blocks of 128
    assert arguments("engine.slots=4096")["kv_cache_memory_bytes"] == blocks * 128 * token_bytes
    assert arguments("engine.slots=1")["kv_cache_memory_bytes"] == 64 << 20
    assert arguments("engine.slots=100000000")["kv_cache_memory_bytes"] == 4 << 30
    assert "kv_cache_memory_bytes" not in arguments(cpu=False)


def test_only_vllms_processes_inherit_the_folder_and_threads_of_the_engine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TMPDIR", "before")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    config = load_config(overrides=["engine=vllm", "engine.threads=3"])
    with start_environment(config, "/scratch", cpu=True):
        assert (os.environ["TMPDIR"], os.environ["OMP_NUM_THREADS"]) == ("/scratch", "3")
    assert os.environ["TMPDIR"] == "before"
    assert "OMP_NUM_THREADS" not in os.environ


def test_an_engine_whose_weights_never_change_keeps_no_second_set(monkeypatch: pytest.MonkeyPatch):
    config = load_config(overrides=["engine=vllm", "sync.stage=device"])
    asked: list[Config] = []

    async def start(config: Config, folder: str, scratch: str | None) -> None:
        asked.append(config)
        raise ConfigError("this was enough")

    monkeypatch.setattr(VllmEngine, "start", start)
    with pytest.raises(ConfigError, match="this was enough"):
        asyncio.run(load_frozen_engine(config, "folder"))
    assert [each.sync.stage for each in asked] == ["host"]
    assert without_stage(config).sync.timeout_s == config.sync.timeout_s
    assert config.sync.stage == "device"


def test_a_missing_vllm_is_one_line_with_the_way_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"vllm is not installed in .*; pip install 'streamrl\[vllm\]', or point eng"):
        require_vllm()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine.args.dtype=bfloat16", "engine.args.dtype='bfloat16' .*: set model.dtype instead"),
        (
            "engine.args.logprobs_mode=raw_logprobs",
            "engine.args.logprobs_mode=.*: streamrl relies on its own; remove it",
        ),
    ],
)
def test_an_argument_that_a_setting_decides_is_refused(override: str, message: str):
    with pytest.raises(ConfigError, match=message):
        load_config(overrides=["engine=vllm", override])


def test_a_blueprint_lists_the_parameters_that_transformers_lists(tmp_path: Path):
    from conformance_model import build_model

    for tied in (True, False):
        model = build_model(tmp_path / str(tied), tied=tied)
        blueprint = Blueprint.of(str(model.folder), "float32")
        assert blueprint.shapes == {name: tensor.shape for name, tensor in model.weights["A"].items()}
        assert blueprint.kv_bytes_per_token() == 2 * 2 * 2 * 32 * 4
        assert list(blueprint.verify(model.weights["A"])) == list(blueprint.shapes)
