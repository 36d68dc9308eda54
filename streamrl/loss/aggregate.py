"""Token weights for flat packed tensors: the rules of ``loss/reduce.py`` where a whole batch is at hand."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from streamrl.loss.reduce import token_weights


def packed_weights(
    mask: Tensor,
    segments: Tensor,
    name: str,
    *,
    sequences: int | None = None,
    prompts: Tensor | None = None,
    length: int | None = None,
) -> Tensor:
    """Weight float64 ``[T]`` of every token, so that *loss = Σ weight × per-token loss*; 0 outside ``mask``.

    ``mask`` bool ``[T]`` says what counts in the denominators: pass the mask of *sampled* tokens to keep rejected ones
    there, the mask of kept tokens to leave them out. ``segments`` int64 ``[T]`` is the sequence of a token and
    ``sequences`` their number with empty ones (None: the largest segment + 1); ``prompts`` int64 ``[sequences]``, the
    prompt of each, is for ``prompt_mean``, ``length`` for ``constant_length``. Raises ``ValueError``.
    """
    if sequences is None:
        sequences = int(segments.max()) + 1 if len(segments) else 0
    counts = torch.bincount(segments[mask], minlength=sequences).cpu().numpy()
    if name == "prompt_mean" and prompts is None:
        raise ValueError("prompt_mean needs the prompt of each sequence")
    prompt = np.zeros(sequences, dtype=np.int64) if prompts is None else prompts.cpu().numpy()
    members = [np.flatnonzero(prompt == each) for each in np.unique(prompt)]
    weights = np.zeros(sequences)
    for group, values in zip(members, token_weights([counts[m] for m in members], name, length), strict=True):
        weights[group] = values
    per_token = torch.from_numpy(weights).to(segments.device)[segments]
    return torch.where(mask, per_token, 0.0)
