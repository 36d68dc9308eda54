"""Requests and answers between streamrl's types and vLLM's."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm import RequestOutput
from vllm import SamplingParams as VllmParams
from vllm.sampling_params import RequestOutputKind

from streamrl.types import Generation, SamplingParams, VersionSpans, append_version

_SEEDS = 1 << 63
"""vLLM takes seeds of 63 bits, and −1 for none."""


def sampling_params(params: SamplingParams, room: int) -> Any:
    """vLLM's parameters of a request with ``room`` tokens left in the context.

    Only what streamrl says ends an answer, so vLLM's own end tokens are ignored. vLLM decodes only where it has to look
    for stop strings; a token that completes one is the answer's last.
    """
    return VllmParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        seed=params.seed % _SEEDS,
        max_tokens=min(params.max_tokens, room),
        stop_token_ids=list(params.stop_token_ids),
        stop=list(params.stop_strings),
        include_stop_str_in_output=True,
        detokenize=bool(params.stop_strings),
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def scoring_params(temperature: float) -> Any:
    """Parameters of a request whose prompt is scored; its one sampled token is thrown away."""
    return VllmParams(
        temperature=temperature,
        max_tokens=1,
        ignore_eos=True,
        detokenize=False,
        prompt_logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def generation(output: RequestOutput) -> Generation:
    """The answer of a finished request. Raises ``RuntimeError`` for one that is no whole answer."""
    answer = output.outputs[0]
    if answer.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended request {output.request_id} by {answer.finish_reason!r}")
    versions: VersionSpans = []
    for span in answer.weight_versions or ():
        append_version(versions, int(span.version), span.end - span.start)
    tokens = np.asarray(answer.token_ids, dtype=np.int32)
    logprobs = np.asarray(answer.logprobs.logprobs, dtype=np.float32)
    counted = sum(count for _, count in versions)
    if not len(tokens) == len(logprobs) == counted:
        raise RuntimeError(f"vLLM gave {len(tokens)} tokens, {len(logprobs)} log-probs and versions of {counted}")
    return Generation(token_ids=tokens, logprobs=logprobs, versions=versions, finish_reason=answer.finish_reason)


def prompt_scores(output: RequestOutput) -> np.ndarray:
    """Log-probs float32 ``[T]`` of the prompt's tokens; the first is 0."""
    found = output.prompt_logprobs
    if found is None:
        raise RuntimeError(f"vLLM gave no log-probs of the prompt of request {output.request_id}")
    return np.concatenate([np.zeros(1, dtype=np.float32), np.asarray(found.logprobs, dtype=np.float32)])
