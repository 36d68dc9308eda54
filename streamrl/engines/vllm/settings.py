"""From settings to vLLM's engine arguments and environment. Everything that decides log-probs is set explicitly."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from streamrl.engines.blueprint import Blueprint
from streamrl.engines.vllm.adapter_plan import lora_arguments
from streamrl.errors import ConfigError
from streamrl.schema import Config

WEIGHTS = "streamrl"
"""Name of our backend in vLLM's registry of weight transfers (``worker.py``)."""
WORKER = "streamrl.engines.vllm.worker.WorkerExtension"
_ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""By its path: by the name ``uni``, vLLM 0.32 puts another process in its place on a CPU, to bind threads there, which
we leave to the scheduler."""
_CPU_BLOCK = 128
"""Tokens of a KV block on a CPU."""
_LEAST_KV, _MOST_KV = 64 << 20, 4 << 30
"""Bytes of KV cache on a CPU, where ``engine.args`` does not say."""
_LONGEST_SOCKET_FOLDER = 69
"""Bytes: vLLM adds 37 to it, and the kernel takes 107."""


def engine_arguments(config: Config, folder: str, blueprint: Blueprint, *, cpu: bool) -> dict[str, Any]:
    """Keyword arguments of ``AsyncEngineArgs``; ``ConfigError`` for a context that the model does not have."""
    engine = config.engine
    context = getattr(blueprint.text, "max_position_embeddings", None)
    if context is not None and config.model.max_length > context:
        raise ConfigError(f"model.max_length={config.model.max_length}: the model has a context of {context} tokens")
    arguments: dict[str, Any] = {
        "model": folder,
        "tokenizer": folder,
        "dtype": config.model.dtype,
        "max_model_len": config.model.max_length + 1,  # a row of max_length tokens to score still samples one
        "max_num_seqs": engine.slots,
        "enable_prefix_caching": engine.prefix_caching,
        "async_scheduling": engine.async_scheduling,
        "tensor_parallel_size": engine.tensor_parallel,
        "pipeline_parallel_size": engine.pipeline_parallel,
        "data_parallel_size": engine.data_parallel,
        "logprobs_mode": "processed_logprobs",
        "enable_chunked_prefill": True,
        "generation_config": "vllm",  # that of the checkpoint would change how requests sample
        "load_format": "auto" if config.model.lora.rank else "dummy",  # random: who never gets weights is seen at once
        "seed": config.seed,
        "disable_log_stats": True,
        "weight_transfer_config": {"backend": WEIGHTS},
        "worker_extension_cls": WORKER,
        "hf_overrides": {"head_dtype": config.model.head_dtype},
    }
    if cpu:
        arguments["enforce_eager"] = True  # compiling takes longer than most runs on a CPU gain
        arguments["kv_cache_memory_bytes"] = _cpu_kv_bytes(config, blueprint)
        if engine.tensor_parallel * engine.pipeline_parallel == 1:
            arguments["distributed_executor_backend"] = _ONE_PROCESS
    overrides = {"hf_overrides": engine.args.get("hf_overrides", {}) | arguments["hf_overrides"]}
    return arguments | lora_arguments(config, folder) | engine.args | overrides


def make_engine_args(arguments: Mapping[str, Any]) -> Any:
    """vLLM's ``AsyncEngineArgs``; ``ConfigError`` names an argument that it does not have, with the nearest one."""
    from vllm import AsyncEngineArgs
    from vllm.config import WeightTransferConfig

    known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    for name in arguments:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"engine.args.{name}: vLLM has no such engine argument{hint}")
    transfer = WeightTransferConfig(**arguments["weight_transfer_config"])
    return AsyncEngineArgs(**{**arguments, "weight_transfer_config": transfer})


def _cpu_kv_bytes(config: Config, blueprint: Blueprint) -> int:
    """Room for every slot at full length, within bounds."""
    blocks = config.engine.slots * -(-(config.model.max_length + 1) // _CPU_BLOCK) + 1
    return min(max(blocks * _CPU_BLOCK * blueprint.kv_bytes_per_token(), _LEAST_KV), _MOST_KV)


def set_process_environment(scratch: str) -> None:
    """What vLLM reads while it runs, here and in its processes. Before the first import of vllm."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its warnings at a normal start fill a screen
    os.environ |= {
        "VLLM_NO_USAGE_STATS": "1",  # nothing is reported to anybody
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # for the one token more than model.max_length, which is never fed
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # one path on every device, and the one that ``worker.py`` hooks into
        "VLLM_RPC_BASE_PATH": scratch if len(scratch) <= _LONGEST_SOCKET_FOLDER else "/tmp",
    }


@contextlib.contextmanager
def start_environment(config: Config, scratch: str, *, cpu: bool) -> Iterator[None]:
    """What only vLLM's own processes are to inherit; this process gets its environment back."""
    wanted = {"TMPDIR": scratch}
    if cpu:
        wanted |= {"OMP_NUM_THREADS": str(config.engine.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        if config.engine.args.get("enforce_eager", True):
            wanted["TORCHDYNAMO_DISABLE"] = "1"  # the sampler's helpers too: a compiler for them costs 15 s
    before = {name: os.environ.get(name) for name in wanted}
    os.environ |= wanted
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
