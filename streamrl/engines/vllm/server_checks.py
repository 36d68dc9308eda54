"""What a vLLM server that runs already must have been started with, and what one is by its own account."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from streamrl.engines.blueprint import Blueprint
from streamrl.engines.http_client import Refused, ServerClient
from streamrl.engines.vllm.adapter_plan import (
    ADAPTER,
    ADAPTER_PATH,
    check_placed,
    holding_arguments,
    room_for,
)
from streamrl.engines.vllm.settings import WEIGHTS, WORKER
from streamrl.errors import ConfigError
from streamrl.ports import EngineFacts
from streamrl.schema import Config

GENERATE = "/inference/v1/generate"
"""Tokens in, tokens out, with the versions of the weights."""
KV_USED = "vllm:kv_cache_usage_perc"
PREEMPTIONS = "vllm:num_preemptions_total"
_DEV_MODE = "VLLM_SERVER_DEV_MODE=1"
_MODEL_RUNNER = "VLLM_USE_V2_MODEL_RUNNER=0"
_NEW_ADAPTERS = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
_SCALE_OUT = "--enable-scale-out"

Info = Mapping[str, Any]


async def checked_info(client: ServerClient, config: Config, adapted: Sequence[str] = ()) -> Info:
    """``/server_info`` as it came; ``ConfigError`` with every flag that the server was started without.

    ``adapted``: as ``adapted_layers`` says, with LoRA.
    """
    try:
        info = await client.get("/server_info?config_format=json")
    except Refused as error:
        if error.status != 404:
            raise
        wanted = [_DEV_MODE, _MODEL_RUNNER, *(flag for flag, _ in _wanted(config, adapted, None)), _SCALE_OUT]
        wanted[:0] = [_NEW_ADAPTERS] if adapted else []
        raise _refusal(client, wanted, "it is not in development mode, which updates of weights need") from error
    missing = [flag for flag, met in _wanted(config, adapted, info["vllm_config"]) if not met]
    if info["vllm_env"].get("VLLM_USE_V2_MODEL_RUNNER") is not False:
        missing.insert(0, _MODEL_RUNNER)
    if adapted and info["vllm_env"].get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") is not True:
        missing.insert(0, _NEW_ADAPTERS)
    if not await _generates(client):
        missing.append(_SCALE_OUT)
    if missing:
        raise _refusal(client, missing, "it lacks what a run needs")
    _check_unsupported(info["vllm_config"], config, client)
    if KV_USED not in gauges(await client.get_text("/metrics")):
        raise ConfigError(f"vLLM at {client.url}: it keeps no statistics; start it without --disable-log-stats")
    return info


def gauges(text: str) -> dict[str, float]:
    """What ``/metrics`` says of ``KV_USED`` (of the copy with the fullest cache) and ``PREEMPTIONS`` (of all)."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, value = line.partition("{")[0], line.rpartition(" ")[2]
        if name == KV_USED:
            found[name] = max(found.get(name, 0.0), float(value))
        elif name == PREEMPTIONS:
            found[name] = found.get(name, 0.0) + float(value)
    return found


async def check_model(client: ServerClient, config: Config, blueprint: Blueprint) -> None:
    """``ConfigError`` unless the server's model consists of the same parameters."""
    served = (await _workers(client, "streamrl_shapes"))[0]
    ours = {name: list(shape) for name, shape in blueprint.shapes.items()}
    for name in sorted(served.keys() | ours.keys()):
        if served.get(name) != ours.get(name):
            raise ConfigError(
                f"vLLM at {client.url}: it serves another model: {name} is {served.get(name, 'missing')} there and "
                f"{ours.get(name, 'missing')} in model.name={config.model.name}; start it with that folder as --model"
            )


async def check_memory(client: ServerClient, placed: Info, values: Mapping[str, list[float]]) -> None:
    """``ConfigError`` unless the server's workers read what lies at ``placed``, in memory of this process."""
    try:
        found = await _workers(client, "streamrl_sees", placed=placed, values=values)
        seen = all(each["sees"] for each in found)
    except Refused:
        seen = False
    if not seen:
        raise ConfigError(
            f"vLLM at {client.url}: its workers cannot read the memory of this process, through which weights go; run "
            "it on the machine of the launch, in the same PID namespace (container) and as the same user"
        )


async def prepare(client: ServerClient) -> None:
    """End what a run before this one left, and let the workers tell how they compute."""
    await client.post("/abort_requests", {})
    for method in ("streamrl_end_update", "streamrl_prepare"):
        await client.post("/collective_rpc", {"method": method})
    await client.post("/update_weight_version", {"new_version": "-1"})
    await client.post("/resume", {})


async def hold_adapter(client: ServerClient, config: Config, adapter: Blueprint) -> None:
    """From here on requests that name the adapter are computed with it; it adds nothing until the first load."""
    check_placed(await _workers(client, "streamrl_hold_adapter", **holding_arguments(config, adapter)))
    known = {each["id"] for each in (await client.get("/v1/models"))["data"]}
    if ADAPTER not in known:  # a run before this one may have told the server of it
        await client.post_text("/v1/load_lora_adapter", {"lora_name": ADAPTER, "lora_path": ADAPTER_PATH})


async def facts_of(client: ServerClient, info: Info, config: Config) -> EngineFacts:
    """After a first forward pass."""
    workers, version = await _workers(client, "streamrl_facts"), await client.get("/version")
    settings = info["vllm_config"]
    return EngineFacts(
        engine=f"vllm {version['version']}",
        dtype=workers[0]["dtype"],
        head_dtype=next(each["head_dtype"] for each in workers if each["head_dtype"]),
        tied=all(each["tied"] for each in workers),
        logprobs="processed",
        prefix_caching=bool(settings["cache_config"]["enable_prefix_caching"]),
        async_scheduling=bool(settings["scheduler_config"]["async_scheduling"]),
        cascade_attention=False,  # vLLM 0.32 has none any more
        chunked_prefill=bool(settings["scheduler_config"]["enable_chunked_prefill"]),
        kv=config.engine.kv,
    )


def _wanted(config: Config, adapted: Sequence[str], settings: Info | None) -> list[tuple[str, bool]]:
    """Flags that a server needs, and whether it has each by its ``settings``; None: they are not known."""
    at = _Settings(settings)
    longest = config.model.max_length + 1  # a row of max_length tokens to score still samples one
    head = {"head_dtype": config.model.head_dtype}
    dtype, overrides = config.model.dtype, at("model_config", "hf_overrides")
    return [
        (f"--dtype {dtype}", at("model_config", "dtype") in (dtype, f"torch.{dtype}")),
        (f"--hf-overrides '{json.dumps(head)}'", isinstance(overrides, dict) and head.items() <= overrides.items()),
        ("--logprobs-mode processed_logprobs", at("model_config", "logprobs_mode") == "processed_logprobs"),
        (f"--max-model-len {longest}", (at("model_config", "max_model_len") or 0) >= longest),
        (f"--max-num-seqs {config.engine.slots}", (at("scheduler_config", "max_num_seqs") or 0) >= config.engine.slots),
        ("--no-async-scheduling", at("scheduler_config", "async_scheduling") is False),
        (f"--worker-extension-cls {WORKER}", at("parallel_config", "worker_extension_cls") == WORKER),
        (
            f"--weight-transfer-config '{json.dumps({'backend': WEIGHTS})}'",
            at("weight_transfer_config", "backend") == WEIGHTS,
        ),
        *(_wanted_for_adapters(config, adapted, at) if adapted else ()),
    ]


def _wanted_for_adapters(config: Config, adapted: Sequence[str], at: _Settings) -> list[tuple[str, bool]]:
    room, found = room_for(config.model.lora.rank), at("lora_config", "target_modules")
    return [
        ("--enable-lora", at("lora_config", "max_loras") is not None),
        (f"--max-lora-rank {room}", (at("lora_config", "max_lora_rank") or 0) >= room),
        (f"--lora-target-modules {' '.join(adapted)}", sorted(found or ()) == sorted(adapted)),
        ("--load-format auto", at("load_config", "load_format") not in (None, "dummy")),
    ]


class _Settings:
    """Values in vLLM's settings, by section and name; None where there is none."""

    def __init__(self, settings: Info | None) -> None:
        self._settings = settings or {}

    def __call__(self, section: str, name: str) -> Any:
        return (self._settings.get(section) or {}).get(name)


def _check_unsupported(settings: Info, config: Config, client: ServerClient) -> None:
    copies = settings["parallel_config"]["data_parallel_size"]
    problem = ""
    if copies != 1:
        problem = f"it holds {copies} copies of the model; start it with --data-parallel-size 1, one server per copy"
    elif settings["speculative_config"] is not None:
        problem = "it speculates, which blurs versions; start it without --speculative-config"
    elif settings.get("lora_config") is not None and not config.model.lora.rank:
        problem = "it serves adapters, and this run trains the whole model; start it without --enable-lora"
    if problem:
        raise ConfigError(f"vLLM at {client.url}: {problem}")


async def _generates(client: ServerClient) -> bool:
    """Whether tokens in, tokens out is served: an empty request is refused either way, for different reasons."""
    try:
        await client.post(GENERATE, {})
    except Refused as error:
        return error.status not in (403, 404)
    return True


async def _workers(client: ServerClient, method: str, **arguments: object) -> list[Any]:
    answer = await client.post("/collective_rpc", {"method": method, "kwargs": arguments})
    return list(answer["results"])


def _refusal(client: ServerClient, missing: list[str], why: str) -> ConfigError:
    return ConfigError(f"vLLM at {client.url}: {why}; start it with {' '.join(missing)}")
