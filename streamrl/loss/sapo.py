"""Soft adaptive policy optimization (arXiv 2511.20347): a smooth gate instead of a clip."""

from __future__ import annotations

import torch

from streamrl.loss.batch import LossBatch, TokenLoss, token_loss
from streamrl.loss.ratios import log_ratio, ratio
from streamrl.objective_params import Gate


def sapo(batch: LossBatch, params: Gate) -> TokenLoss:
    """``−(4/τ)·σ(τ·(r−1))·A`` with τ_pos where A > 0, else τ_neg.

    Gradient ``−A·r·sech²(τ·(r−1)/2)·∇log π``: REINFORCE's at r = 1 for every τ, while the value there is −2A/τ.
    """
    r = ratio(log_ratio(batch.current, batch.anchor))
    # Two Python numbers would be taken as float32, whatever r is.
    tau = torch.where(batch.advantages > 0, r.new_tensor(params.tau_pos), r.new_tensor(params.tau_neg))
    gate = torch.sigmoid(tau * (r - 1.0))
    # 4σ(1 − σ) = sech²(τ(r − 1)/2); 1 − σ would cancel for large r, σ(−x) does not.
    slope = r * 4.0 * gate * torch.sigmoid(-tau * (r - 1.0))
    return token_loss(-(4.0 / tau) * gate * batch.advantages, slope, batch.advantages)
