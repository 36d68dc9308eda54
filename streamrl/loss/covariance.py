"""Clip-Cov and KL-Cov (arXiv 2505.22617): the few tokens that drive entropy down lose their gradient or are held.

They are the tokens with the largest (A − mean A)·(log π − mean log π). Means and selection are over the *batch*, taken
over all micro-batches and ranks before the first gradient.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from streamrl.loss.batch import LossBatch, TokenLoss, token_loss
from streamrl.loss.ppo import clipped
from streamrl.loss.ratios import log_ratio, ratio
from streamrl.objective_params import CovarianceClip, CovariancePull


def clip_cov(batch: LossBatch, params: CovarianceClip) -> TokenLoss:
    """PPO's surrogate, 0 on ⌊cov_share·N⌋ tokens, at least one, drawn from those with a covariance in
    (cov_low, cov_high) that PPO's clip left alone.

    The paper draws them at random. Here the draw is a hash of the token's log-probs and advantage, so that it does not
    depend on packing, micro-batches or ranks; equal tokens share their fate.
    """
    surrogate = clipped(
        ratio(log_ratio(batch.current, batch.anchor)), batch.advantages, params.clip_low, params.clip_high
    )
    statistics = batch.statistics if batch.statistics is not None else clip_cov_selection(batch, params)
    drawn = _candidates(batch, params, statistics, surrogate) & (_lots(batch) <= statistics["bound"])
    keep = ~drawn
    return token_loss(
        torch.where(keep, surrogate.loss, 0.0),
        torch.where(keep, surrogate.slope, 0.0),
        batch.advantages,
        low=surrogate.low,
        high=surrogate.high,
        drawn=drawn,
    )


def kl_cov(batch: LossBatch, params: CovariancePull) -> TokenLoss:
    """``−r·A``, unclipped, plus ``pull·|log r|`` on the ⌊cov_share·N⌋ tokens, at least one, of highest covariance."""
    logs = log_ratio(batch.current, batch.anchor)
    r = ratio(logs)
    statistics = batch.statistics if batch.statistics is not None else kl_cov_selection(batch, params)
    held = batch.mask & (_covariance(batch, statistics) >= statistics["bound"])
    penalty = params.pull * torch.where(torch.isinf(logs), 0.0, logs).abs()
    return token_loss(-r * batch.advantages + torch.where(held, penalty, 0.0), r, batch.advantages, held=held)


def clip_cov_selection(batch: LossBatch, params: CovarianceClip) -> dict[str, Tensor]:
    """Means of advantage and log-prob, and the largest lot (int64) that is drawn, over a whole batch."""
    statistics = _means(batch)
    surrogate = clipped(
        ratio(log_ratio(batch.current.detach(), batch.anchor)), batch.advantages, params.clip_low, params.clip_high
    )
    lots = _lots(batch)[_candidates(batch, params, statistics, surrogate)]
    wanted = min(_share(batch, params.cov_share), len(lots))
    bound = torch.sort(lots).values[wanted - 1] if wanted else _no_lot(batch)
    return statistics | {"bound": bound}


def kl_cov_selection(batch: LossBatch, params: CovariancePull) -> dict[str, Tensor]:
    """Means of advantage and log-prob, and the smallest covariance that is held, over a whole batch."""
    statistics = _means(batch)
    covariance = _covariance(batch, statistics)[batch.mask]
    held = min(_share(batch, params.cov_share), len(covariance))
    bound = torch.topk(covariance, held).values[-1] if held else covariance.new_full((), torch.inf)
    return statistics | {"bound": bound}


def _means(batch: LossBatch) -> dict[str, Tensor]:
    count = batch.mask.sum().clamp(min=1)
    return {
        "advantage": torch.where(batch.mask, batch.advantages, 0.0).double().sum() / count,
        "logprob": torch.where(batch.mask, _finite(batch.current), 0.0).sum() / count,
    }


def _covariance(batch: LossBatch, statistics: Mapping[str, Tensor]) -> Tensor:
    return (batch.advantages.double() - statistics["advantage"]) * (_finite(batch.current) - statistics["logprob"])


def _finite(logprobs: Tensor) -> Tensor:
    return logprobs.detach().double().clamp(min=-1e6)


def _candidates(
    batch: LossBatch, params: CovarianceClip, statistics: Mapping[str, Tensor], surrogate: TokenLoss
) -> Tensor:
    covariance = _covariance(batch, statistics)
    inside = (covariance > params.cov_low) & (covariance < params.cov_high)
    return batch.mask & inside & ~surrogate.low & ~surrogate.high


def _share(batch: LossBatch, share: float) -> int:
    return max(1, int(share * int(batch.mask.sum())))


def _no_lot(batch: LossBatch) -> Tensor:
    return torch.full((), torch.iinfo(torch.int64).min, dtype=torch.int64, device=batch.mask.device)


def _lots(batch: LossBatch) -> Tensor:
    """int64 ``[T]``: behaviour log-prob and advantage, hashed (the finaliser of SplitMix64)."""
    bits = batch.behaviour.double().view(torch.int64) ^ (batch.advantages.double().view(torch.int64) * 0x9E3779B1)
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        bits = (bits ^ ((bits >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return bits ^ ((bits >> 31) & ((1 << 33) - 1))
