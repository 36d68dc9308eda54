"""What every engine refuses of a request, in the same words."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from streamrl.types import SamplingParams


def checked_tokens(what: str, ids: Sequence[int], longest: int, vocabulary: int) -> np.ndarray:
    """int32 ``[T]``; ``ValueError`` when empty, over ``longest`` or outside the ``vocabulary``. ``what`` names it."""
    tokens = np.asarray(ids, dtype=np.int64)
    if tokens.ndim != 1 or not 1 <= len(tokens) <= longest:
        raise ValueError(f"{what}: expected 1 to {longest} tokens, got {tokens.size}; model.max_length bounds it")
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise ValueError(f"{what}: token ids must be in 0 … {vocabulary - 1}, got {tokens.min()} … {tokens.max()}")
    return tokens.astype(np.int32)


def check_params(params: SamplingParams) -> None:
    """``ValueError`` for sampling parameters that mean nothing."""
    problem = ""
    if not 0 <= params.temperature < math.inf:
        problem = f"temperature must be 0 (greedy) or more and finite, got {params.temperature}"
    elif params.top_k < 0:
        problem = f"top_k must be 0 (off) or more, got {params.top_k}"
    elif not 0 < params.top_p <= 1:
        problem = f"top_p must be over 0 and at most 1 (off), got {params.top_p}"
    elif not 0 <= params.min_p <= 1:
        problem = f"min_p must be 0 (off) to 1, got {params.min_p}"
    elif not 0 < params.repetition_penalty < math.inf:
        problem = f"repetition_penalty must be over 0 (1 is off) and finite, got {params.repetition_penalty}"
    elif not math.isfinite(params.presence_penalty):
        problem = f"presence_penalty must be finite (0 is off), got {params.presence_penalty}"
    elif not math.isfinite(params.frequency_penalty):
        problem = f"frequency_penalty must be finite (0 is off), got {params.frequency_penalty}"
    elif params.max_tokens < 1:
        problem = f"max_tokens must be at least 1, got {params.max_tokens}"
    elif not all(params.stop_strings):
        problem = f"stop_strings must not be empty, got {params.stop_strings}"
    if problem:
        raise ValueError(f"sampling: {problem}")
