"""From settings to what SGLang's server is started with: flags, environment, and a model folder of its own."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streamrl.engines.sglang.loader import LOADER
from streamrl.errors import ConfigError
from streamrl.schema import Config

ROOM = 8
"""Positions that SGLang keeps free behind the longest prompt it takes."""
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}


def bare_model(source: Path, target: Path) -> None:
    """The model in ``source`` without weights and without an end token.

    SGLang ends an answer at the end tokens of config, generation config and tokenizer, whatever a request says, unless
    the request wants no stop token at all. Here a request names its stop tokens, so the server must know of none.
    Raises ``ConfigError`` where a file cannot be read.
    """
    for path in sorted(source.iterdir()):
        if path.is_dir() or path.suffix in _WEIGHTS or path.name.endswith(".index.json"):
            continue
        match path.name:
            case "config.json" | "tokenizer_config.json" | "special_tokens_map.json":
                described = _read(path)
                (target / path.name).write_text(json.dumps(_without_end(described)))
            case "generation_config.json":
                continue
            case _:
                shutil.copyfile(path, target / path.name)


def _read(path: Path) -> dict[str, Any]:
    try:
        described = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"model.name: {path} cannot be read: {error}") from error
    if not isinstance(described, dict):
        raise ConfigError(f"model.name: {path} holds a {type(described).__name__}, not an object")
    return described


def _without_end(described: dict[str, Any]) -> dict[str, Any]:
    ends = {"eos_token", "eos_token_id"}
    changed = {key: _without_end(value) if isinstance(value, dict) else value for key, value in described.items()}
    return changed | dict.fromkeys(ends & changed.keys())


def arguments(config: Config, model: Path, *, accelerated: bool) -> dict[str, Any]:
    """Flags by name, without dashes; True stands alone. ``accelerated``: the machine has a GPU."""
    engine = config.engine
    longest = config.model.max_length + ROOM
    decided: dict[str, Any] = {
        "model_path": str(model),
        "load_format": "dummy",
        "dtype": config.model.dtype,
        "context_length": longest,
        "max_running_requests": engine.slots,
        "tp_size": engine.tensor_parallel,
        "pp_size": engine.pipeline_parallel,
        "weight_version": "-1",
        "grammar_backend": "none",
        "skip_server_warmup": True,
        "enable_custom_logit_processor": True,
        "custom_weight_loader": [LOADER],
        "log_level_http": "info",  # that it listens is said on this level
        "uvicorn_access_log_exclude_prefixes": ["/"],
    }
    if not engine.async_scheduling:
        decided["disable_overlap_schedule"] = True
    if not engine.prefix_caching:
        decided["disable_radix_cache"] = True
    if config.model.head_dtype == "float32" and config.model.dtype != "float32":
        decided["enable_fp32_lm_head"] = True
    defaults: dict[str, Any] = {"decode_log_interval": 1 << 20}
    if not accelerated:
        defaults |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_cuda_graph": True,
            "max_total_tokens": engine.slots * longest,
        }
    return defaults | {_name(key): value for key, value in engine.args.items()} | decided


def _name(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """As on a command line. A list becomes several values, a mapping JSON; False and None leave the flag out."""
    line: list[str] = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            line.append(flag)
        elif isinstance(value, list):
            line += [flag, *map(str, value)]
        elif isinstance(value, Mapping):
            line += [flag, json.dumps(dict(value))]
        elif value is not None and value is not False:
            line.append(f"{flag}={value}")
    return line


def environment(config: Config, folder: Path, *, accelerated: bool) -> dict[str, str]:
    """Of the server. ``folder`` takes its temporary files."""
    threads, copies = config.engine.threads, config.engine.tensor_parallel
    own = {
        "TMPDIR": str(folder),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for ROOM; no position beyond max_length is computed
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # with it, a paused server calls itself unhealthy
    }
    if not accelerated:
        own["SGLANG_ROPE_CACHE_FP32"] = "1"  # as on a GPU, and as transformers computes it
        if copies > 1:
            cores = [str(rank % (os.cpu_count() or 1)) for rank in range(copies)]
            own["SGLANG_CPU_OMP_THREADS_BIND"] = os.environ.get("SGLANG_CPU_OMP_THREADS_BIND", "|".join(cores))
    return {**os.environ, **own}


def has_accelerator() -> bool:
    """Whether this process may use a GPU of this machine; torch is not asked, since the server's may be another one."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    return not hidden and any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd"))
