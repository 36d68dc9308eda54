"""From logits to tokens: temperature, top-k, top-p, one seeded uniform per token, inverse CDF.

A token depends on its own logits, parameters, seed and position only, never on what else is in the batch.
Shapes: ``[n]`` rows, ``[n, V]`` rows by vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from streamrl.errors import DivergedError

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True)
class SamplerInputs:
    """Sampling parameters of ``n`` rows, as arrays."""

    temperature: np.ndarray
    """float64 ``[n]``, > 0; 1 for greedy rows."""
    top_k: np.ndarray
    """int64 ``[n]``; 0 is off."""
    top_p: np.ndarray
    """float64 ``[n]``; 1 is off."""
    greedy: np.ndarray
    """bool ``[n]``."""
    seed: np.ndarray
    """uint64 ``[n]``."""
    position: np.ndarray
    """int64 ``[n]``, index of the token within its continuation."""


def _mix(state: np.ndarray) -> np.ndarray:
    """The output function of splitmix64, on uint64 ``[n]`` (wraps around by design)."""
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))


def uniforms(seed: np.ndarray, position: np.ndarray) -> np.ndarray:
    """One float64 in [0, 1) with 53 random bits per (seed, position): uint64 ``[n]``, int64 ``[n]`` → ``[n]``.

    The seed is mixed before the counter is added, so that neighbouring seeds do not share a shifted stream.
    """
    counter = (position.astype(np.uint64) + np.uint64(1)) * _GAMMA
    bits = _mix(_mix(seed + _GAMMA) + counter)
    return (bits >> np.uint64(11)) * 2.0**-53


def truncate(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """``scaled`` float64 ``[n, V]`` with −inf where top-k, then top-p, remove a token.

    Top-k keeps every token as likely as the k-th. Top-p renormalises what top-k left and keeps the fewest most likely
    tokens whose probabilities reach ``top_p``; the token that crosses the bound stays.
    """
    vocabulary = scaled.shape[1]
    ordered, order = scaled.sort(dim=1, descending=True, stable=True)
    last_kept = torch.where(top_k > 0, top_k.clamp(max=vocabulary), vocabulary) - 1
    ordered = ordered.masked_fill(ordered < ordered.gather(1, last_kept[:, None]), -torch.inf)
    probabilities = ordered.softmax(dim=1)
    mass_before = probabilities.cumsum(dim=1) - probabilities
    # A sum of probabilities may round to 1 before the tail is reached: rows without top-p are left alone.
    dropped = (mass_before >= top_p[:, None]) & (top_p < 1)[:, None]
    return torch.empty_like(scaled).scatter_(1, order, ordered.masked_fill(dropped, -torch.inf))


def _process(logits: Tensor, inputs: SamplerInputs) -> Tensor:
    """Temperature-scaled and truncated logits, float64 ``[n, V]``."""
    scaled = logits.double() / torch.from_numpy(inputs.temperature).to(logits.device)[:, None]
    truncates = (inputs.top_k > 0) | (inputs.top_p < 1)
    if truncates.any():
        rows = torch.from_numpy(np.flatnonzero(truncates)).to(logits.device)
        top_k, top_p = (torch.from_numpy(a[truncates]).to(logits.device) for a in (inputs.top_k, inputs.top_p))
        scaled[rows] = truncate(scaled[rows], top_k, top_p)
    return scaled


def sample(logits: Tensor, inputs: SamplerInputs) -> tuple[np.ndarray, np.ndarray]:
    """Sample one token per row of ``logits`` float32 ``[n, V]``: token ids int64 ``[n]``, log-probs float32 ``[n]``.

    The log-prob is that of the temperature-scaled, truncated and renormalised distribution; for a greedy row, that of
    the plain distribution (temperature 1, nothing truncated). The sampled token is the first whose cumulative
    probability exceeds the uniform number, so a token of probability zero is never chosen.
    Raises ``DivergedError`` when a row is not finite.
    """
    scaled = _process(logits, inputs)
    peak = scaled.amax(dim=1, keepdim=True)
    cumulative = (scaled - peak).exp_().cumsum_(dim=1)
    total = cumulative[:, -1:]
    draw = torch.from_numpy(uniforms(inputs.seed, inputs.position)).to(logits.device)[:, None]
    chosen = torch.searchsorted(cumulative, draw * total, right=True)
    if inputs.greedy.any():
        greedy = torch.from_numpy(inputs.greedy).to(logits.device)[:, None]
        chosen = torch.where(greedy, logits.argmax(dim=1, keepdim=True), chosen)
    totals = total[:, 0].numpy(force=True)
    if not np.isfinite(totals).all():
        rows = np.flatnonzero(~np.isfinite(totals))
        raise DivergedError(f"logits of {len(rows)} of {len(totals)} sequences are not finite: check the last weights")
    logprobs = (scaled.gather(1, chosen) - peak - total.log())[:, 0]
    return chosen[:, 0].numpy(force=True), logprobs.numpy(force=True).astype(np.float32)
