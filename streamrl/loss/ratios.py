"""Ratios of two policies from their log-probs, finite for any input and without a gradient where they saturate."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""|ℓ| beyond this is cut before ``exp``, as verl and TRL do: e^20 = 4.9e8 is still finite after squaring in float32."""
INFINITE = 1e6
"""Stands for |ℓ| = ∞ where tokens are summed, so that ∞ − ∞ never makes NaN."""


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """ℓ = numerator − denominator of two log-probs ``[T]``; 0 where both are −∞, so that a pair of impossible tokens is
    no evidence. NaN stays NaN: it must stop the run."""
    impossible = torch.isneginf(numerator) & torch.isneginf(denominator)
    return torch.where(impossible, 0.0, numerator) - torch.where(impossible, 0.0, denominator)


def ratio(log_ratios: Tensor) -> Tensor:
    """exp(ℓ) with |ℓ| cut at ``MAX_LOG_RATIO``; beyond it the gradient is zero rather than infinite."""
    return torch.exp(log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def summable(log_ratios: Tensor) -> Tensor:
    """ℓ with infinities made finite, for sums over a sequence."""
    return log_ratios.clamp(-INFINITE, INFINITE)


def possible(logprobs: Tensor) -> Tensor:
    """log π, with 0 and no gradient where it is −∞.

    A surrogate c·log π with c → 0 as π → 0 has the limit 0 there, and no gradient could raise an impossible token.
    """
    return torch.where(torch.isneginf(logprobs), 0.0, logprobs)


def k3(log_ratios: Tensor) -> Tensor:
    """e^ℓ − 1 − ℓ by expm1: the plain form cancels where ℓ is small, which is where it is read."""
    cut = log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(cut) - cut
