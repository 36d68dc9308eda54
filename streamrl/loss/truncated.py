"""Weights that are truncated and constant: the gradient of a token stays, its weight is bounded.

``tis``: PipelineRL (arXiv 2509.19128), AIPO of LlamaRL (arXiv 2505.24034), anchored on behaviour. ``cispo``: MiniMax-M1
(arXiv 2506.13585), anchored on the proximal policy. Truncation keeps the rare tokens whose gradient a PPO clip drops.
"""

from __future__ import annotations

from torch import Tensor

from streamrl.loss.batch import LossBatch, TokenLoss, token_loss
from streamrl.loss.ratios import log_ratio, possible, ratio
from streamrl.objective_params import Band, Cap


def tis(batch: LossBatch, params: Cap) -> TokenLoss:
    """``−sg(min(ρ, c))·A·log π`` with ρ = π/μ."""
    return _weighted(batch, ratio(log_ratio(batch.current.detach(), batch.behaviour)), 0.0, params.cap)


def cispo(batch: LossBatch, params: Band) -> TokenLoss:
    """``−sg(clip(r, floor, cap))·A·log π``; both bounds are absolute (verl, slime and SkyRL write cap = 1 + ε_high)."""
    return _weighted(batch, ratio(log_ratio(batch.current.detach(), batch.anchor)), params.floor, params.cap)


def _weighted(batch: LossBatch, weight: Tensor, floor: float, cap: float) -> TokenLoss:
    cut = weight.clamp(floor, cap)
    loss = -cut * batch.advantages * possible(batch.current)
    return token_loss(loss, cut, batch.advantages, low=weight < floor, high=weight > cap)
