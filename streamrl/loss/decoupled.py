"""Decoupled PPO (arXiv 2110.00641; AReaL, arXiv 2505.24298 eq. 5): three policies, behaviour weight always on."""

from __future__ import annotations

import torch

from streamrl.loss.batch import LossBatch, TokenLoss, token_loss
from streamrl.loss.ppo import clipped
from streamrl.loss.ratios import log_ratio, ratio
from streamrl.objective_params import Decoupled


def decoupled_ppo(batch: LossBatch, params: Decoupled) -> TokenLoss:
    """``−sg(w)·min(r·A, clip(r, 1−ε_low, 1+ε_high)·A)`` with w = π_old/μ.

    w corrects for stale data, the clip bounds the update from π_old. A token with w over ``weight_cap`` gets no loss
    (``mask``) or the cap as its weight (``truncate``); it stays in the denominators either way. Raises ``ValueError``
    without proximal log-probs: with w = 1 it would be PPO under another name.
    """
    if batch.proximal is None:
        raise ValueError("decoupled_ppo needs proximal log-probs: without them its behaviour weight would be dropped")
    surrogate = clipped(
        ratio(log_ratio(batch.current, batch.proximal)),
        batch.advantages,
        params.clip_low,
        params.clip_high,
        params.dual_clip,
    )
    weight = ratio(log_ratio(batch.proximal, batch.behaviour))
    over = weight > params.weight_cap
    weight = torch.where(over, 0.0 if params.weight_rule == "mask" else params.weight_cap, weight)
    return token_loss(
        weight * surrogate.loss,
        weight * surrogate.slope,
        batch.advantages,
        low=surrogate.low,
        high=surrogate.high,
        dual=surrogate.dual,
        behaviour_weight=weight,
        over_weight_cap=over,
    )
