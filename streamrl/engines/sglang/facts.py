"""What a server is and can do, by its own account and as observed; refused where it cannot serve a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamrl.engines.blueprint import Blueprint
from streamrl.engines.http_client import ServerClient
from streamrl.engines.sglang.loader import LOADER
from streamrl.engines.sglang.processor import HEAD_DTYPES, HEAD_PROBE, memory_probe, serialised
from streamrl.engines.sglang.requests import Abilities
from streamrl.errors import ActorDied, ConfigError
from streamrl.ports import EngineFacts
from streamrl.schema import Config

Info = Mapping[str, Any]


def checked_info(info: Info, config: Config, url: str) -> Info:
    """``/server_info`` as it came; ``ConfigError`` with the first thing that this run cannot work with."""
    longest = config.model.max_length
    problem = ""
    if info["dp_size"] != 1:
        problem = f"it has dp_size={info['dp_size']}, and weights reach one copy only; use one server per copy"
    elif info["speculative_algorithm"]:
        problem = f"it speculates ({info['speculative_algorithm']}), which blurs versions; start it without"
    elif info["dtype"] not in ("auto", config.model.dtype):
        problem = f"it runs in {info['dtype']}, and model.dtype={config.model.dtype}; start it with that --dtype"
    elif info["max_req_input_len"] < longest:
        problem = (
            f"it takes prompts of {info['max_req_input_len']} tokens, and model.max_length={longest}; raise its "
            "--context-length or --max-total-tokens, or lower model.max_length"
        )
    elif config.engine.kv == "keep" and not info["disable_overlap_schedule"]:
        problem = (
            "its overlap scheduler calls a token new that old weights sampled before a pause in place; start it with "
            "--disable-overlap-schedule, or set engine.kv=recompute"
        )
    if problem:
        raise ConfigError(f"SGLang at {url}: {problem}")
    return info


def abilities_of(info: Info) -> Abilities:
    return Abilities(
        processes=bool(info["enable_custom_logit_processor"]),
        overlaps=not info["disable_overlap_schedule"],
        caches=not info["disable_radix_cache"],
        masks=int(info["sampling_mask_max_tokens"]),
        copies=int(info["tp_size"]),
        loads_memory=bool(
            LOADER in (info.get("custom_weight_loader") or ())
            and info["enable_custom_logit_processor"]  # which is asked whether it sees our memory
            and info.get("nnodes", 1) == 1
        ),
    )


async def observed_head(client: ServerClient) -> str:
    """Dtype of the logits as the head's product came out: the narrowest that holds every one of them exactly.

    ``ConfigError`` where the server cannot run our processor.
    """
    try:
        answer = await _probed(client, HEAD_PROBE)
    except ActorDied as error:
        raise ConfigError(
            f"SGLang at {client.url} ended when it was given streamrl's logit processor ({error}): install streamrl "
            "into its environment (pip install --no-deps streamrl), or start it without --enable-custom-logit-processor"
        ) from error
    return str(HEAD_DTYPES[answer]).removeprefix("torch.")


async def sees_memory(client: ServerClient, where: Mapping[str, Any], values: Mapping[str, list[float]]) -> bool:
    """Whether the server finds ``values`` ``where`` our ``Shelf`` has put them: a server on this machine does."""
    return bool(await _probed(client, memory_probe(where, values)))


async def _probed(client: ServerClient, probe: Mapping[str, Any]) -> int:
    """The token with which our processor answers ``probe``."""
    asked = {
        "input_ids": [0],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True, "custom_params": probe},
        "custom_logit_processor": serialised(),
    }
    answer = await client.post("/generate", asked)
    return int(answer["output_ids"][0])


def facts_of(info: Info, config: Config, blueprint: Blueprint, head: str | None) -> EngineFacts:
    """``head``: as it was observed; None where it could not be, and the server's own word is taken."""
    dtype = info["dtype"] if info["dtype"] != "auto" else str(blueprint.text.dtype).removeprefix("torch.")
    promised = "float32" if info["enable_fp32_lm_head"] else dtype
    return EngineFacts(
        engine=f"sglang {info['version']}",
        dtype=dtype,
        head_dtype=head or promised,
        tied=bool(blueprint.text.tie_word_embeddings),
        logprobs="processed",
        prefix_caching=not info["disable_radix_cache"],
        async_scheduling=not info["disable_overlap_schedule"],
        chunked_prefill=(info["chunked_prefill_size"] or -1) > 0,
        kv=config.engine.kv,
    )
