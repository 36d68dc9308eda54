"""Corrections for the gap between sampler and trainer, w = π_old/μ: separate from the ratio of the update (C8).

Truncated importance sampling (TIS: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy
training"), IcePop (arXiv 2510.18855), masked importance and rejection sampling (Liu et al. 2025, "When speed kills
stability"), the outlier veto of INTELLECT-3 (arXiv 2512.16144), off-policy sequence masking (OPSM, arXiv 2512.02556).
They change the loss only. A failed parity gate stops the run before the first loss: fix the engine first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from streamrl.loss.batch import LossBatch
from streamrl.loss.ratios import MAX_LOG_RATIO, k3, log_ratio, summable
from streamrl.objective_params import Corrections, Level


@dataclass(frozen=True)
class Corrected:
    """What the corrections do to each token, ``[T]``, without a gradient."""

    factor: Tensor
    """Float, multiplies the token's loss: the truncated weight, 0 where it is dropped."""
    dropped: Tensor
    """Bool."""
    capped: Tensor
    """Bool, the weight was truncated."""


def correct(batch: LossBatch, corrections: Corrections | None) -> Corrected:
    """Factors for a cleaned batch. Without proximal log-probs the detached π of this pass stands for π_old.

    A dropped token stays in the denominators, which are in ``batch.weights`` already; ``renormalise`` is for whoever
    makes those weights. Level ``token`` looks at w,
    ``sequence`` at its product over the trained tokens of a trajectory, ``geometric`` at its geometric mean; the last
    two give every token of a trajectory the same value.
    """
    ones, none = torch.ones_like(batch.behaviour), torch.zeros_like(batch.mask)
    if corrections is None or not corrections.active:
        return Corrected(ones, none, none)
    proximal = batch.current.detach() if batch.proximal is None else batch.proximal
    logs = log_ratio(proximal, batch.behaviour)
    factor, capped = ones, none
    if corrections.weight is not Level.NONE:
        level = _at_level(batch, logs, corrections.weight)
        factor = torch.exp(level.clamp(-MAX_LOG_RATIO, min(math.log(corrections.weight_cap), MAX_LOG_RATIO)))
        capped = batch.mask & (level > math.log(corrections.weight_cap))
    dropped = none
    if corrections.reject is not Level.NONE:
        level = _at_level(batch, logs, corrections.reject)
        dropped = (level < _log(corrections.reject_low)) | (level > _log(corrections.reject_high))
    if corrections.max_k3 < math.inf:
        dropped = dropped | (batch.sequence_mean(k3(logs)) > corrections.max_k3)[batch.segments]
    if corrections.veto_low > 0 or corrections.veto_high < math.inf:
        outlier = (logs < _log(corrections.veto_low)) | (logs > _log(corrections.veto_high))
        dropped = dropped | (batch.sequence_sum(outlier.to(logs.dtype)) > 0)[batch.segments]
    if corrections.opsm < math.inf:
        dropped = dropped | off_policy_sequences(batch, corrections.opsm)
    dropped = dropped & batch.mask
    return Corrected(torch.where(dropped, 0.0, factor), dropped, capped)


def off_policy_sequences(batch: LossBatch, threshold: float) -> Tensor:
    """OPSM: bool ``[T]``, True for A < 0 in a sequence whose mean of log μ − log π is over ``threshold``, in nats.

    Anchored on μ: against a π_old recomputed at one update per batch it could not act.
    """
    drift = batch.sequence_mean(summable(log_ratio(batch.behaviour, batch.current.detach())))
    return (batch.advantages < 0) & (drift > threshold)[batch.segments]


def _at_level(batch: LossBatch, logs: Tensor, level: Level) -> Tensor:
    """log of the weight ``[T]``."""
    if level is Level.TOKEN:
        return logs
    reduced = batch.sequence_sum(summable(logs)) if level is Level.SEQUENCE else batch.sequence_mean(summable(logs))
    return reduced[batch.segments]


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf
