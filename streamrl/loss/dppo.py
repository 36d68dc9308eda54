"""Divergence PPO: a trust region in probabilities, and a quadratic pull (arXiv 2602.04879, arXiv 2602.02276)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from streamrl.loss.batch import LossBatch, TokenLoss, token_loss
from streamrl.loss.ratios import log_ratio, possible, ratio
from streamrl.objective_params import Divergence


def dppo(batch: LossBatch, params: Divergence) -> TokenLoss:
    """``−keep·ρ·A + κ·ℓ²`` with ℓ = log ρ, ρ = π/μ; prime-rl's form, where A = 0 follows the low side.

    The pull is k2 twice over, on every token, dropped ones too; only an infinite ℓ has none. ``divergence`` ``kl``
    compares the Bernoulli KL(μ‖π) of the sampled token instead, moves towards μ always allowed. A finite ``cap`` gives
    verl's form ``−keep·sg(min(ρ, cap))·A·log π``: the same gradient up to the cut, another value.
    """
    logs = log_ratio(batch.current, batch.behaviour)
    too_low, too_high = _outside(batch, params)
    dropped = torch.where(batch.advantages > 0, too_high, too_low)
    if params.divergence == "absolute":
        dropped = too_low | too_high
    rho = ratio(logs)
    if params.cap < math.inf:
        weight = torch.where(dropped, 0.0, rho.detach().clamp(max=params.cap))
        loss = -weight * batch.advantages * possible(batch.current)
    else:
        weight = torch.where(dropped, 0.0, rho)
        loss = -weight * batch.advantages
    if params.pull:
        loss = loss + params.pull * torch.where(torch.isinf(logs), 0.0, logs).square()
    return token_loss(
        loss,
        weight,
        batch.advantages,
        low=dropped & too_low,
        high=(dropped & too_high) | (rho.detach() > params.cap),
    )


def _outside(batch: LossBatch, params: Divergence) -> tuple[Tensor, Tensor]:
    """Whether the probability of a token fell, and whether it rose, by more than allowed."""
    logp, logq = batch.current.detach(), batch.behaviour
    now, then = torch.exp(logp), torch.exp(logq)
    if params.divergence == "kl":
        kl = bernoulli_kl(logq, logp)
        return (kl > params.clip_low) & (now < then), (kl > params.clip_high) & (now > then)
    low = params.clip_high if params.divergence == "absolute" else params.clip_low
    return now - then < -low, now - then > params.clip_high


def bernoulli_kl(logq: Tensor, logp: Tensor) -> Tensor:
    """KL of "this token or another" under q from p, nats; both logs ``[T]``. A certain event counts 1 − 1e-8."""
    q, p = torch.exp(logq), torch.exp(logp)
    own = torch.where(q > 0, q * (logq - logp), 0.0)
    return own + (1.0 - q) * torch.log((1.0 - q + 1e-8) / (1.0 - p + 1e-8))
