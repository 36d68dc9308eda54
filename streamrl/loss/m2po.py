"""Second-moment trust policy optimization (arXiv 2510.01161): a clip as wide as a budget on ℓ² allows.

The bound is a statistic of the *batch*: it is taken over all micro-batches and ranks before the first gradient. A bound
per micro-batch, which is common, would depend on packing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamrl.loss.batch import LossBatch, TokenLoss, token_loss
from streamrl.loss.ppo import clipped
from streamrl.loss.ratios import log_ratio, ratio, summable
from streamrl.objective_params import SecondMoment

TIE = 1e-12
"""The token that sets the bound lies beyond it by this much in ℓ², so that it is clipped itself, and |ℓ| below about
1e-12 is no harm: both as in the released code."""


def m2po(batch: LossBatch, params: SecondMoment) -> TokenLoss:
    """Harmful tokens (A > 0 and ρ > 1, or A < 0 and ρ < 1; ρ = π/μ) may have a mean of ℓ² of at most ``budget``.

    ``widen`` (released code): PPO's surrogate clipped to exp(±t), t² the largest ℓ² of a harmful token such that
    cutting all of them there keeps the budget, never narrower than ``clip_low``/``clip_high``; without a clip while
    the budget holds. ``mask`` (the paper's text): ``−ρ·A``, harmful tokens with the largest ℓ² are dropped until the
    mean over the rest is below the budget. AReaL instead masks by log μ − log π_old of all tokens, then clips.
    """
    statistics = batch.statistics if batch.statistics is not None else second_moment(batch, params)
    bound = statistics["bound"].to(batch.current.dtype)
    logs = summable(log_ratio(batch.current, batch.behaviour))
    rho = ratio(logs)
    if params.moment_rule == "widen":
        low, high = 1.0 - torch.exp(-bound), torch.expm1(bound)
        return clipped(rho, batch.advantages, low.clamp(min=params.clip_low), high.clamp(min=params.clip_high))
    squares = logs.detach().double().square()
    dropped = _harmful(logs.detach(), batch.advantages) & (squares >= statistics["bound"])
    keep = torch.where(dropped, 0.0, rho)
    rising = batch.advantages > 0
    return token_loss(-keep * batch.advantages, keep, batch.advantages, low=dropped & ~rising, high=dropped & rising)


def second_moment(batch: LossBatch, params: SecondMoment) -> dict[str, Tensor]:
    """``bound``, float64: t of ``widen``, or under ``mask`` the smallest ℓ² that is dropped; infinite for no bound."""
    logs = summable(log_ratio(batch.current.detach(), batch.behaviour)).double()
    harmful = batch.mask & _harmful(logs, batch.advantages)
    squares = torch.sort(logs[harmful].square()).values
    count = len(squares)
    free = torch.tensor(torch.inf, dtype=torch.float64, device=logs.device)
    if not count or squares.mean() <= params.budget + TIE:
        return {"bound": free}
    sums = torch.cumsum(squares, 0)
    if params.moment_rule == "mask":
        means = sums / torch.arange(1, count + 1, device=logs.device)
        return {"bound": squares[int((means < params.budget).sum())]}  # means of ascending numbers ascend
    rest = torch.arange(count - 1, -1, -1, device=logs.device)
    first_over = int((sums + (squares - TIE) * rest < params.budget * count - TIE).sum())
    if first_over == 0:
        return {"bound": torch.zeros_like(free)}
    return {"bound": (squares[first_over - 1] - TIE).clamp(min=0.0).sqrt()}


def _harmful(logs: Tensor, advantages: Tensor) -> Tensor:
    return ((advantages > TIE) & (logs > TIE)) | ((advantages < -TIE) & (logs < -TIE))
