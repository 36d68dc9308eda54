"""Refuse engine settings that contradict each other, before a run starts, with the reason and the way out."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from streamrl.errors import ConfigError
from streamrl.schema import Config, EngineConfig

VLLM_DECIDED: Mapping[str, str] = {
    "model": "model.name",
    "tokenizer": "model.name",
    "dtype": "model.dtype",
    "max_model_len": "model.max_length",
    "max_num_seqs": "engine.slots",
    "enable_prefix_caching": "engine.prefix_caching",
    "async_scheduling": "engine.async_scheduling",
    "tensor_parallel_size": "engine.tensor_parallel",
    "pipeline_parallel_size": "engine.pipeline_parallel",
    "data_parallel_size": "engine.data_parallel",
    "seed": "seed",
    "logprobs_mode": "",
    "load_format": "",
    "enable_lora": "model.lora.rank",
    "max_lora_rank": "model.lora.rank",
    "max_loras": "",
    "lora_target_modules": "model.lora.targets",
    "lora_dtype": "model.dtype",
    "generation_config": "",
    "weight_transfer_config": "",
    "worker_extension_cls": "",
    "disable_log_stats": "",
    "speculative_config": "",
    "logits_processors": "",
    "watermark_config": "",
}
"""Arguments of vLLM that ``engine.args`` must not name, with the setting that decides each; empty: streamrl itself."""

SGLANG_DECIDED: Mapping[str, str] = {
    "model_path": "model.name",
    "model": "model.name",
    "tokenizer_path": "model.name",
    "dtype": "model.dtype",
    "enable_fp32_lm_head": "model.head_dtype",
    "context_length": "model.max_length",
    "max_running_requests": "engine.slots",
    "disable_radix_cache": "engine.prefix_caching",
    "disable_overlap_schedule": "engine.async_scheduling",
    "tp_size": "engine.tensor_parallel",
    "tp": "engine.tensor_parallel",
    "tensor_parallel_size": "engine.tensor_parallel",
    "pp_size": "engine.pipeline_parallel",
    "pp": "engine.pipeline_parallel",
    "pipeline_parallel_size": "engine.pipeline_parallel",
    "dp_size": "engine.data_parallel",
    "dp": "engine.data_parallel",
    "data_parallel_size": "engine.data_parallel",
    "host": "",
    "port": "",
    "api_key": "",
    "admin_api_key": "",
    "config": "",
    "weight_version": "",
    "load_format": "",
    "grammar_backend": "",
    "log_level_http": "",
    "uvicorn_access_log_exclude_prefixes": "",
    "skip_server_warmup": "",
    "skip_tokenizer_init": "",
    "enable_custom_logit_processor": "",
    "custom_weight_loader": "",
    "speculative_algorithm": "",
}
"""Flags of SGLang's server that ``engine.args`` must not name, as above."""

_BEYOND_EMBEDDED = (
    "prefix_caching",
    "async_scheduling",
    "tensor_parallel",
    "pipeline_parallel",
    "data_parallel",
    "args",
)


def check_engine(config: Config) -> None:
    """``ConfigError`` with the first thing that is wrong."""
    engine = config.engine
    if engine.name == "embedded":
        _check_embedded(engine)
    elif engine.device != EngineConfig().device:
        raise ConfigError(
            f"engine.device={engine.device} is of the embedded engine; {engine.name} takes the devices that it sees "
            "(CUDA_VISIBLE_DEVICES): leave it at its default"
        )
    if engine.urls and engine.name != "embedded" and (engine.args or engine.python):
        given = f"engine.args={engine.args}" if engine.args else f"engine.python={engine.python}"
        raise ConfigError(f"{given} with engine.urls: these servers run already; start them so, and leave it empty")
    if config.model.lora.rank:
        _check_lora(config)
    if engine.name == "vllm":
        check_args(engine, VLLM_DECIDED)
    if engine.name == "sglang":
        _check_sglang(engine)


def check_args(engine: EngineConfig, decided: Mapping[str, str]) -> None:
    """Refuse ``engine.args`` that are in ``decided``: argument of the engine to the setting that decides it, or ''.

    ``engine.args`` may be spelled as on a command line.
    """
    for given in engine.args:
        name = given.lstrip("-").replace("-", "_")
        if name not in decided:
            continue
        way_out = f"set {decided[name]} instead" if decided[name] else "streamrl relies on its own; remove it"
        raise ConfigError(f"engine.args.{given}={engine.args[given]!r} with engine.name={engine.name}: {way_out}")


def _check_lora(config: Config) -> None:
    rank = config.model.lora.rank
    if config.engine.name == "sglang":
        raise ConfigError(
            f"model.lora.rank={rank} with engine.name=sglang: it cannot replace an adapter under requests in flight; "
            "set engine.name=vllm or embedded, or model.lora.rank=0"
        )
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(f"model.lora.rank={rank} needs peft: pip install 'streamrl[lora]'")


def _check_sglang(engine: EngineConfig) -> None:
    check_args(engine, SGLANG_DECIDED)
    if engine.data_parallel > 1:
        raise ConfigError(
            f"engine.data_parallel={engine.data_parallel} with engine.name=sglang: its weights can be updated in one "
            "copy only; set engine.data_parallel=1 and more rollouts, an engine each"
        )
    if engine.async_scheduling and engine.kv == "keep":
        raise ConfigError(
            "engine.async_scheduling=true with engine.name=sglang and engine.kv=keep: its overlap scheduler labels a "
            "token that old weights sampled as new; set engine.kv=recompute, or engine.async_scheduling=false"
        )


def _check_embedded(engine: EngineConfig) -> None:
    default = EngineConfig()
    for key in _BEYOND_EMBEDDED:
        value = getattr(engine, key)
        if value != getattr(default, key):
            raise ConfigError(f"engine.{key}={value} is for engine.name=vllm or sglang, got engine.name=embedded")
    if engine.python:
        raise ConfigError(
            f"engine.python={engine.python}: the embedded engine runs in the run's own Python; unset it, or choose "
            "engine.name=vllm or sglang"
        )
