"""The clipped surrogate of PPO (arXiv 1707.06347), with dual clip (1912.09729) and two-sided δ (2505.07291).

GRPO (arXiv 2402.03300), Dr.GRPO (arXiv 2503.20783) and DAPO (arXiv 2503.14476) are settings of it: they differ in
advantage, aggregation and bounds.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from streamrl.loss.batch import LossBatch, TokenLoss, token_loss
from streamrl.loss.ratios import log_ratio, ratio
from streamrl.objective_params import Clip


def ppo(batch: LossBatch, params: Clip) -> TokenLoss:
    """``−min(min(r, δ)·A, clip(r, 1−ε_low, 1+ε_high)·A)``, and at most ``−c·A`` where A < 0.

    Where A = 0 the loss is 0 and no flag is set, although both branches are equal there.
    """
    r = ratio(log_ratio(batch.current, batch.anchor))
    return clipped(r, batch.advantages, params.clip_low, params.clip_high, params.dual_clip, params.delta)


def clipped(
    r: Tensor,
    advantages: Tensor,
    low: float | Tensor,
    high: float | Tensor,
    dual_clip: float = math.inf,
    delta: float = math.inf,
) -> TokenLoss:
    """The surrogate for ratios ``r`` ``[T]``, clipped to ``[1 − low, 1 + high]``."""
    floor, ceiling = (torch.as_tensor(bound, dtype=r.dtype, device=r.device) for bound in (1.0 - low, 1.0 + high))
    bounded = r.clamp(max=delta)
    loss = -torch.minimum(bounded * advantages, r.clamp(floor, ceiling) * advantages)
    negative = advantages < 0
    value = r.detach()
    at_low, at_high = (value < floor) & negative, (value > ceiling) & (advantages > 0)
    at_dual = negative & ((value > delta) | (bounded.detach() > dual_clip))
    if dual_clip < math.inf:
        loss = torch.where(negative, torch.minimum(loss, -dual_clip * advantages), loss)
    slope = torch.where(at_low | at_high | at_dual, 0.0, value)
    return token_loss(loss, slope, advantages, low=at_low, high=at_high, dual=at_dual)
