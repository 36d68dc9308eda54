"""What one optimizer step says about itself: off-policy diagnostics over trained tokens of all micro-batches and ranks.

Everything is a float64 sum (or a maximum) until the end: micro-batches add up, ranks are added by one all-reduce, then
each metric divides once, so that no number depends on packing, micro-batching or ranks (C8). Ratios enter *before* any
truncation: an effective sample size of truncated weights would hide what truncation is there for.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from streamrl.loss.policy import MAX_LOG_RATIO, PolicyLoss

MAX_LAG_BINS = 4096
"""Bins of the lag histogram; older tokens count in the last one."""
MAX_LOG_SEQUENCE = 300.0
"""|Σ log ρ| of a trajectory is cut here: the square of e^300 is still finite in float64."""

SUMS = (
    "loss",
    "tokens",
    "clipped_low",
    "clipped_high",
    "ratio",
    "ratio_squared",
    "entropy",
    "k1",
    "k3",
    "sequences",
    "sequence_weight",
    "sequence_weight_squared",
    "lag",
    "masked",
    "fresh",
    "fresh_squared",
    "fresh_k3",
)
MAXIMA = ("lag", "mismatch")


class Diagnostics:
    """Adds up micro-batches of one optimizer step; ``reduce`` gives the metrics of all ranks.

    Lag is the trainer's version minus a token's version, mismatch the difference of log-probs on tokens that the
    trainer's own version sampled, so that only numerics differ. KL terms are KL(behaviour‖current) on tokens sampled by
    behaviour: k1 = mean(−ℓ), k3 = mean(e^ℓ − 1 − ℓ) with ℓ = log π − log μ (Schulman's estimators, arXiv 2510.01555).
    """

    def __init__(self, lag_bound: int, device: torch.device, rank: int = 0, ranks: int = 1) -> None:
        self.rank, self.ranks = rank, ranks
        self.bins = min(lag_bound + 1, MAX_LAG_BINS)
        self._sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        self._histogram = torch.zeros(self.bins, dtype=torch.float64, device=device)
        self._maxima = torch.zeros(len(MAXIMA), dtype=torch.float64, device=device)

    def add(
        self, result: PolicyLoss, entropy: Tensor, lag: Tensor, trajectory: Tensor, trajectories: int, masked: int
    ) -> None:
        """One micro-batch: per trained token ``entropy`` ``[T]``, ``lag`` and ``trajectory`` index int64 ``[T]``.

        ``masked`` is the number of sampled tokens that were over the lag bound and got no loss.
        """
        log_ratio = result.log_ratio.double()
        ratio = torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
        k3 = _k3(log_ratio)
        fresh = lag == 0
        mismatch = torch.where(fresh, log_ratio, 0.0)
        sequence = _sequence_weights(log_ratio, trajectory, trajectories)
        device = log_ratio.device
        terms = {
            "loss": result.loss.detach(),
            "tokens": torch.tensor(float(lag.numel()), device=device),
            "clipped_low": result.clipped_low.sum(),
            "clipped_high": result.clipped_high.sum(),
            "ratio": ratio.sum(),
            "ratio_squared": ratio.square().sum(),
            "entropy": entropy.double().sum(),
            "k1": -log_ratio.sum(),
            "k3": k3.sum(),
            "sequences": torch.tensor(float(sequence.numel()), device=device),
            "sequence_weight": sequence.sum(),
            "sequence_weight_squared": sequence.square().sum(),
            "lag": lag.sum(),
            "masked": torch.tensor(float(masked), device=device),
            "fresh": fresh.sum(),
            "fresh_squared": mismatch.square().sum(),
            "fresh_k3": torch.where(fresh, k3, 0.0).sum(),
        }
        self._sums += torch.stack([terms[name].double() for name in SUMS])
        self._histogram += torch.bincount(lag.clamp(max=self.bins - 1), minlength=self.bins)
        if lag.numel():
            self._maxima = torch.maximum(self._maxima, torch.stack([lag.max().double(), mismatch.abs().max()]))

    def reduce(self, group: dist.ProcessGroup | None = None) -> tuple[dict[str, float], list[int]]:
        """Metrics over all ranks, every key always present, and the ranks whose loss is not finite.

        Collective over ``group`` (one sum, one maximum); both results are equal on all ranks.
        """
        broken = torch.zeros(self.ranks, dtype=torch.float64, device=self._sums.device)
        broken[self.rank] = float(not torch.isfinite(self._sums[0]))
        sums, maxima = torch.cat([self._sums, self._histogram, broken]), self._maxima.clone()
        if group is not None:
            dist.all_reduce(sums, dist.ReduceOp.SUM, group=group)
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
        totals, histogram, flags = sums.cpu().split([len(SUMS), self.bins, self.ranks])
        metrics = _metrics(
            dict(zip(SUMS, totals.tolist(), strict=True)), dict(zip(MAXIMA, maxima.tolist(), strict=True)), histogram
        )
        return metrics, flags.nonzero().flatten().tolist()


def _metrics(total: dict[str, float], largest: dict[str, float], histogram: Tensor) -> dict[str, float]:
    tokens, fresh = max(total["tokens"], 1.0), max(total["fresh"], 1.0)
    low, high = total["clipped_low"] / tokens, total["clipped_high"] / tokens
    return {
        "policy/loss": total["loss"],
        "policy/clip_fraction": low + high,
        "policy/clip_fraction_low": low,
        "policy/clip_fraction_high": high,
        "policy/ratio_mean": total["ratio"] / tokens,
        "policy/entropy": total["entropy"] / tokens,
        "policy/kl_k1": total["k1"] / tokens,
        "policy/kl_k3": total["k3"] / tokens,
        "policy/ess": _ess(total["ratio"], total["ratio_squared"], total["tokens"]),
        "policy/ess_sequence": _ess(total["sequence_weight"], total["sequence_weight_squared"], total["sequences"]),
        "lag/mean": total["lag"] / tokens,
        "lag/p95": float(_quantile(histogram, 0.95)),
        "lag/max": largest["lag"],
        "lag/masked_tokens": total["masked"],
        "mismatch/rms": (total["fresh_squared"] / fresh) ** 0.5,
        "mismatch/max": largest["mismatch"],
        "mismatch/k3": total["fresh_k3"] / fresh,
        "trained_tokens": total["tokens"],
    }


def _k3(log_ratio: Tensor) -> Tensor:
    """``e^ℓ − 1 − ℓ`` by expm1: the plain form cancels where ℓ is small, which is where it is read."""
    cut = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(cut) - cut


def _sequence_weights(log_ratio: Tensor, trajectory: Tensor, trajectories: int) -> Tensor:
    """``exp(Σ ℓ)`` of every trajectory that has a trained token."""
    sums = log_ratio.new_zeros(trajectories).index_add_(0, trajectory, log_ratio)
    present = torch.bincount(trajectory, minlength=trajectories) > 0
    return torch.exp(sums[present].clamp(-MAX_LOG_SEQUENCE, MAX_LOG_SEQUENCE))


def _ess(weights: float, squares: float, count: float) -> float:
    """Effective sample size ``(Σw)²/(N·Σw²)``, in (0, 1]; 0 where there is nothing."""
    return weights * weights / (count * squares) if count and squares else 0.0


def _quantile(histogram: Tensor, share: float) -> int:
    """Smallest lag that at least ``share`` of the tokens do not exceed; 0 where there are none."""
    cumulative = histogram.cumsum(0)
    return int(torch.searchsorted(cumulative, share * cumulative[-1]))
