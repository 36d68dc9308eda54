"""vLLM's sampling parameters as plain data: what goes over HTTP, and into its own class in this process."""

from __future__ import annotations

from typing import Any

from streamrl.types import SamplingParams

_SEEDS = 1 << 63
"""vLLM takes seeds of 63 bits, and −1 for none."""


def sampling_arguments(params: SamplingParams, room: int) -> dict[str, Any]:
    """vLLM's parameters of a request with ``room`` tokens left in the context.

    Only what streamrl says ends an answer, so vLLM's own end tokens are ignored. vLLM decodes only where it has to look
    for stop strings; a token that completes one is the answer's last.
    """
    return {
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "seed": params.seed % _SEEDS,
        "max_tokens": min(params.max_tokens, room),
        "stop_token_ids": list(params.stop_token_ids),
        "stop": list(params.stop_strings),
        "include_stop_str_in_output": True,
        "detokenize": bool(params.stop_strings),
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "ignore_eos": True,
        "logprobs": 0,
    }


def scoring_arguments(temperature: float) -> dict[str, Any]:
    """Parameters of a request whose prompt is scored; its one sampled token is thrown away."""
    return {
        "temperature": temperature,
        "max_tokens": 1,
        "ignore_eos": True,
        "detokenize": False,
        "prompt_logprobs": 0,
    }
