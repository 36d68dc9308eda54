"""One generation in SGLang's words, and its answer in ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamrl.engines.sglang.processor import penalised, serialised, wanted
from streamrl.errors import ActorDied, DivergedError
from streamrl.types import Generation, SamplingParams, VersionSpans, append_version

Decode = Callable[[list[int]], str]
_GREEDY_BELOW = 1e-6
"""SGLang takes a lower temperature for 0."""


@dataclass(frozen=True)
class Abilities:
    """What a server can do, by its own account."""

    processes: bool
    """It runs our ``Processor``."""
    overlaps: bool
    """It schedules a step while the one before runs, so a processor does not see the newest token."""
    caches: bool
    """It reuses the KV cache of equal beginnings."""
    masks: int
    """Tokens that top-k may keep for SGLang to return the log-probs of what it truncated itself."""
    copies: int
    """Processes that the model is split over, each of which is told of new weights."""
    loads_memory: bool
    """It has our loader, and runs on one machine: where that is ours, it can take weights from our memory."""


def request(
    rid: str, prompt: Sequence[int], params: SamplingParams, room: int, vocabulary: int, abilities: Abilities
) -> dict[str, Any]:
    """Body of ``/generate`` for at most ``room`` tokens; ``ValueError`` for what the server cannot do."""
    greedy = params.temperature == 0
    if not greedy and params.temperature < _GREEDY_BELOW:
        raise ValueError(f"sampling: temperature={params.temperature}: SGLang takes it for 0; use 0, or 1e-6 and more")
    sampling: dict[str, Any] = {
        "temperature": params.temperature,
        "top_k": -1,
        "top_p": 1.0,
        "min_p": 0.0,
        "max_new_tokens": min(params.max_tokens, room),
        "stop_token_ids": list(params.stop_token_ids),
        "stop": list(params.stop_strings),
        "ignore_eos": not params.stop_token_ids,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": list(prompt),
        "sampling_params": sampling,
        "return_logprob": True,
    }
    wishes = wanted(params)
    if wishes is not None and abilities.processes:
        if penalised(params) and abilities.overlaps:
            raise ValueError(
                "sampling: with SGLang, penalties need engine.async_scheduling=false: its sampler runs ahead of the "
                "tokens that they count"
            )
        sampling["custom_params"] = wishes
        body["custom_logit_processor"] = serialised()
    elif wishes is not None:
        _use_mask(body, sampling, params, vocabulary, abilities.masks)
    return body


def _use_mask(
    body: dict[str, Any], sampling: dict[str, Any], params: SamplingParams, vocabulary: int, most: int
) -> None:
    """On a server without our processor: SGLang's own truncation, as far as it means what ours means."""
    way_out = "start the server with --enable-custom-logit-processor and streamrl in its environment"
    if penalised(params):
        raise ValueError(f"sampling: this SGLang server's penalties are not ours; {way_out}")
    if params.top_p < 1 and (params.top_k or params.min_p):
        raise ValueError(f"sampling: this SGLang server's top-p is not ours beside top-k or min-p; {way_out}")
    top_k = min(params.top_k or vocabulary, vocabulary)
    if top_k > most:
        raise ValueError(f"sampling: this SGLang server truncates for us up to top_k={most}, got {top_k}; {way_out}")
    sampling |= {"top_k": top_k, "top_p": params.top_p, "min_p": params.min_p}
    body["return_sampling_mask"] = True


def generation(answer: Mapping[str, Any], params: SamplingParams, decode: Decode, server: str) -> Generation:
    """What was sampled.

    Raises ``DivergedError`` where SGLang met NaN, ``ActorDied`` where it ended the request itself, and ``ValueError``
    where it stopped at a token that the request does not name.
    """
    meta = answer["meta_info"]
    tokens: list[int] = answer["output_ids"]
    reason = meta["finish_reason"]
    kind, matched = reason["type"], reason.get("matched")
    if kind == "abort":
        raise ActorDied(f"SGLang at {server} ended a request: {reason.get('message') or 'no reason given'}")
    if matched == "NaN happened":
        raise DivergedError("SGLang sampled from logits that are not finite: check the last weights")
    if isinstance(matched, int) and matched not in params.stop_token_ids:
        raise ValueError(
            f"SGLang at {server} stopped at its own end token {matched}, which is not in stop_token_ids "
            f"{params.stop_token_ids}; serve a model folder whose files name no other end token"
        )
    if "output_token_sampling_logprobs" in meta:
        logprobs = meta["output_token_sampling_logprobs"]
    else:
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
    if len(logprobs) != len(tokens):
        raise ActorDied(f"SGLang at {server} returned {len(tokens)} tokens with {len(logprobs)} log-probs")
    count = _end(tokens, params.stop_strings, decode)
    finish = "stop" if kind == "stop" or count < len(tokens) else "length"
    return Generation(
        np.asarray(tokens[:count], dtype=np.int32),
        np.asarray(logprobs[:count], dtype=np.float32),
        _spans(meta["weight_versions"], count),
        finish,
    )


def _end(tokens: list[int], strings: Sequence[str], decode: Decode) -> int:
    """How many tokens until the one that completes a stop string, all if none does.

    SGLang looks for a stop string in as many tokens as it has when encoded on its own, and misses it where the model
    wrote it in more.
    """

    def said(count: int) -> bool:
        text = decode(tokens[:count])
        return any(string in text for string in strings)

    if not strings or not said(len(tokens)):
        return len(tokens)
    low, high = 0, len(tokens)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if said(middle) else (middle, high)
    return high


def _spans(reported: Sequence[Mapping[str, Any]], count: int) -> VersionSpans:
    """``meta_info.weight_versions`` over the first ``count`` tokens; ``ActorDied`` for labels that are not ours."""
    found: VersionSpans = []
    try:
        for span in reported:
            append_version(found, int(span["version"]), min(span["end"], count) - min(span["start"], count))
    except ValueError:
        found = []
    if sum(length for _, length in found) != count:
        raise ActorDied(f"SGLang labels {count} tokens {list(reported)}: does somebody else update its weights?")
    return found
