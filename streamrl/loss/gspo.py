"""Sequence ratios: GSPO and GSPO-token (arXiv 2507.18071)."""

from __future__ import annotations

import torch

from streamrl.loss.batch import LossBatch, TokenLoss
from streamrl.loss.ppo import clipped
from streamrl.loss.ratios import log_ratio, summable
from streamrl.objective_params import SequenceClip

MAX_LOG_SEQUENCE = 10.0
"""The mean log-ratio of a sequence is cut here from above, as verl does."""


def gspo(batch: LossBatch, params: SequenceClip) -> TokenLoss:
    """``−min(s·A, clip(s)·A)`` with s = exp(mean of log r over the sequence), the same s for all of its tokens.

    The gradient of s reaches every token of its sequence. ε bounds a geometric mean, so PPO's 0.2 would never act.
    """
    mean = batch.sequence_mean(summable(log_ratio(batch.current, batch.anchor)))
    s = torch.exp(mean.clamp(max=MAX_LOG_SEQUENCE))[batch.segments]
    return clipped(s, batch.advantages, params.clip_low, params.clip_high)


def gspo_token(batch: LossBatch, params: SequenceClip) -> TokenLoss:
    """As ``gspo`` with ``s_t = sg(s)·π/sg(π)``: the value of s, the gradient of the token's own log π.

    Equal to ``gspo`` in value, and in gradient where A and the token weights are constant within each sequence. verl
    calls this form ``gspo``.
    """
    mean = batch.sequence_mean(summable(log_ratio(batch.current, batch.anchor).detach()))[batch.segments]
    own = torch.where(torch.isneginf(batch.current), 0.0, batch.current)
    s = torch.exp((own - own.detach() + mean).clamp(max=MAX_LOG_SEQUENCE))
    return clipped(s, batch.advantages, params.clip_low, params.clip_high)
