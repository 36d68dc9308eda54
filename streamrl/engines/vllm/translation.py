"""Requests and answers between streamrl's types and vLLM's."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm import RequestOutput
from vllm import SamplingParams as VllmParams
from vllm.sampling_params import RequestOutputKind

from streamrl.engines.vllm.parameters import sampling_arguments, scoring_arguments
from streamrl.types import Generation, SamplingParams, VersionSpans, append_version

_WHOLE: dict[str, Any] = {"flat_logprobs": True, "output_kind": RequestOutputKind.FINAL_ONLY, "skip_clone": True}
"""One answer, when it is finished."""


def sampling_params(params: SamplingParams, room: int) -> Any:
    """vLLM's own parameters of a request with ``room`` tokens left in the context."""
    return VllmParams(**sampling_arguments(params, room), **_WHOLE)


def scoring_params(temperature: float) -> Any:
    """vLLM's own parameters of a request whose prompt is scored."""
    return VllmParams(**scoring_arguments(temperature), **_WHOLE)


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
