"""Weights from the whole trajectory's ratio W = Π π/μ: TOPR (arXiv 2503.14286) and VESPO (arXiv 2602.10693).

The variance of log W grows with length, so both are for short answers or for shapes that forgive it.
"""

from __future__ import annotations

import math

import torch

from streamrl.loss.batch import LossBatch, TokenLoss, token_loss
from streamrl.loss.ratios import MAX_LOG_RATIO, log_ratio, possible, summable
from streamrl.objective_params import Gamma, Taper

LOG_SMALLEST = math.log(1e-8)
"""VESPO cuts log W to [log 1e-8, 20], as TRL does."""


def topr(batch: LossBatch, params: Taper) -> TokenLoss:
    """``−A·log π`` where A ≥ 0, ``−sg(min(W, cap))·A·log π`` where A < 0: bad trajectories fade as they become rare."""
    logs = batch.sequence_sum(summable(log_ratio(batch.current.detach(), batch.behaviour)))[batch.segments]
    negative, bound = batch.advantages < 0, math.log(params.cap)
    weight = torch.where(negative, torch.exp(logs.clamp(max=bound)), 1.0)
    loss = -weight * batch.advantages * possible(batch.current)
    return token_loss(loss, weight, batch.advantages, high=negative & (logs > bound))


def vespo(batch: LossBatch, params: Gamma) -> TokenLoss:
    """``−sg(φ(W))·A·log π``, log φ(W) = λ + k·log W − λ·W: φ(1) = 1, largest at W = k/λ, 0 at both ends.

    (k, λ) by the sign of A, A = 0 with the positive pair. log-ratios of tokens are cut at ±20 before they are summed.
    """
    logs = log_ratio(batch.current.detach(), batch.behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    log_w = batch.sequence_sum(logs).clamp(LOG_SMALLEST, MAX_LOG_RATIO)[batch.segments]
    positive = batch.advantages >= 0
    k = torch.where(positive, logs.new_tensor(params.k_pos), logs.new_tensor(params.k_neg))
    rate = torch.where(positive, logs.new_tensor(params.lambda_pos), logs.new_tensor(params.lambda_neg))
    weight = torch.exp(rate + k * log_w - rate * torch.exp(log_w))
    return token_loss(-weight * batch.advantages * possible(batch.current), weight, batch.advantages)
