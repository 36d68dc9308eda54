"""Geometric-mean policy optimization (arXiv 2507.20673): a sequence ratio whose tokens are clipped first."""

from __future__ import annotations

import torch

from streamrl.loss.batch import LossBatch, TokenLoss, token_loss
from streamrl.loss.ratios import log_ratio, summable
from streamrl.objective_params import LogClip


def gmpo(batch: LossBatch, params: LogClip) -> TokenLoss:
    """``−A·exp(mean x)``: x is log r, at most ε_high where A > 0, at least −ε_low where A < 0, uncut where A = 0.

    A token beyond its bound gets no gradient and pulls the sequence's ratio no further. The unharmful side is open; the
    mean itself is cut at +10, like GSPO's.
    """
    logs = summable(log_ratio(batch.current, batch.anchor))
    positive, negative = batch.advantages > 0, batch.advantages < 0
    high, low = positive & (logs > params.clip_high), negative & (logs < -params.clip_low)
    x = torch.where(positive, logs.clamp(max=params.clip_high), logs)
    x = torch.where(negative, logs.clamp(min=-params.clip_low), x)
    s = torch.exp(batch.sequence_mean(x).clamp(max=10.0))[batch.segments]
    return token_loss(
        -batch.advantages * s, torch.where(low | high, 0.0, s), batch.advantages, low=low.detach(), high=high.detach()
    )
