"""From logits to tokens: penalties, temperature, min-p, top-k, top-p, one seeded uniform per token, inverse CDF.

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
class Penalties:
    """The ``m`` rows that have penalties, and the tokens so far that these look at."""

    rows: np.ndarray
    """int64 ``[m]``, indices into the rows that are sampled."""
    repetition: np.ndarray
    """float64 ``[m]``, > 0; 1 is off."""
    presence: np.ndarray
    """float64 ``[m]``; 0 is off."""
    frequency: np.ndarray
    """float64 ``[m]``; 0 is off."""
    tokens: np.ndarray
    """int64 ``[m, T]``, prompt and sampled tokens; what lies past the end of a row is ignored."""
    prompt_length: np.ndarray
    """int64 ``[m]``."""
    length: np.ndarray
    """int64 ``[m]``, prompt included."""


@dataclass(frozen=True)
class SamplerInputs:
    """Sampling parameters of ``n`` rows, as arrays."""

    temperature: np.ndarray
    """float64 ``[n]``, > 0; 1 for greedy rows."""
    top_k: np.ndarray
    """int64 ``[n]``; 0 is off."""
    top_p: np.ndarray
    """float64 ``[n]``; 1 is off."""
    min_p: np.ndarray
    """float64 ``[n]``; 0 is off."""
    greedy: np.ndarray
    """bool ``[n]``."""
    seed: np.ndarray
    """uint64 ``[n]``."""
    position: np.ndarray
    """int64 ``[n]``, index of the token within its continuation."""
    penalties: Penalties | None = None
    """None when no row has any."""


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


def penalise(logits: Tensor, penalties: Penalties) -> Tensor:
    """``logits`` float64 ``[m, V]`` of the penalised rows, less what tokens so far cost.

    The repetition penalty divides positive logits and multiplies negative ones of any token so far (arXiv:1909.05858);
    frequency and presence penalties are subtracted per occurrence and once, for sampled tokens only.
    """
    device, vocabulary = logits.device, logits.shape[1]
    columns = np.arange(penalties.tokens.shape[1])
    present = columns < penalties.length[:, None]
    sampled = present & (columns >= penalties.prompt_length[:, None])
    tokens = torch.from_numpy(np.where(present, penalties.tokens, 0)).to(device)
    occurrences = torch.zeros((2, len(tokens), vocabulary), dtype=torch.float32, device=device)
    for counts, counted in zip(occurrences, (present, sampled), strict=True):
        counts.scatter_add_(1, tokens, torch.from_numpy(counted.astype(np.float32)).to(device))
    seen, said = occurrences
    repetition, presence, frequency = (
        torch.from_numpy(values).to(device)[:, None]
        for values in (penalties.repetition, penalties.presence, penalties.frequency)
    )
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    return torch.where(seen > 0, repeated, logits) - frequency * said - presence * (said > 0)


def truncate(scaled: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """``scaled`` float64 ``[n, V]`` with −inf where min-p, then top-k, then top-p, remove a token.

    Min-p keeps tokens at least ``min_p`` times as likely as the likeliest. Top-k keeps every token as likely as the
    k-th. Top-p renormalises what these left and keeps the fewest most likely tokens whose probabilities reach
    ``top_p``; the token that crosses the bound stays.
    """
    vocabulary = scaled.shape[1]
    scaled = scaled.masked_fill(scaled < scaled.amax(dim=1, keepdim=True) + min_p.log()[:, None], -torch.inf)
    ordered, order = scaled.sort(dim=1, descending=True, stable=True)
    last_kept = torch.where(top_k > 0, top_k.clamp(max=vocabulary), vocabulary) - 1
    ordered = ordered.masked_fill(ordered < ordered.gather(1, last_kept[:, None]), -torch.inf)
    probabilities = ordered.softmax(dim=1)
    mass_before = probabilities.cumsum(dim=1) - probabilities
    # A sum of probabilities may round to 1 before the tail is reached: rows without top-p are left alone.
    dropped = (mass_before >= top_p[:, None]) & (top_p < 1)[:, None]
    return torch.empty_like(scaled).scatter_(1, order, ordered.masked_fill(dropped, -torch.inf))


def _process(logits: Tensor, inputs: SamplerInputs) -> Tensor:
    """Penalised, temperature-scaled and truncated logits, float64 ``[n, V]``."""
    device = logits.device
    scaled = logits.to(torch.float64, copy=True)
    if inputs.penalties is not None:
        rows = torch.from_numpy(inputs.penalties.rows).to(device)
        scaled[rows] = penalise(scaled[rows], inputs.penalties)
    scaled /= torch.from_numpy(inputs.temperature).to(device)[:, None]
    truncates = (inputs.min_p > 0) | (inputs.top_k > 0) | (inputs.top_p < 1)
    if truncates.any():
        rows = torch.from_numpy(np.flatnonzero(truncates)).to(device)
        min_p, top_k, top_p = (
            torch.from_numpy(values[truncates]).to(device) for values in (inputs.min_p, inputs.top_k, inputs.top_p)
        )
        scaled[rows] = truncate(scaled[rows], min_p, top_k, top_p)
    return scaled


def sample(logits: Tensor, inputs: SamplerInputs) -> tuple[np.ndarray, np.ndarray]:
    """Sample one token per row of ``logits`` float32 ``[n, V]``: token ids int64 ``[n]``, log-probs float32 ``[n]``.

    The log-prob is that of the penalised, temperature-scaled, truncated and renormalised distribution; for a greedy
    row, that of temperature 1 with nothing truncated. The sampled token is the first whose cumulative
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
        chosen = torch.where(greedy, scaled.argmax(dim=1, keepdim=True), chosen)
    totals = total[:, 0].numpy(force=True)
    if not np.isfinite(totals).all():
        rows = np.flatnonzero(~np.isfinite(totals))
        raise DivergedError(f"logits of {len(rows)} of {len(totals)} sequences are not finite: check the last weights")
    logprobs = (scaled.gather(1, chosen) - peak - total.log())[:, 0]
    return chosen[:, 0].numpy(force=True), logprobs.numpy(force=True).astype(np.float32)
