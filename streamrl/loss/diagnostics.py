"""What one optimizer step says about itself: off-policy diagnostics over trained tokens of all micro-batches and ranks.

Everything is a float64 sum (or a maximum) until the end: micro-batches add up, ranks are added by one all-reduce, then
each metric divides once, so that no number depends on packing, micro-batching or ranks (C8). Ratios enter *before* any
truncation: an effective sample size of truncated weights would hide what truncation is there for.

Three gaps, three groups of numbers: **mismatch** is π_old against μ on tokens that the trainer's own version sampled,
on a KV cache of its own, so that only numerics differ; **lag** the same on all others; **update** is π against π_old.
``policy/*`` is all of it, π against μ. The same sums are kept for each environment and for each bucket of trajectory
lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from streamrl.loss.policy import Evaluated
from streamrl.loss.ratios import MAX_LOG_RATIO, k3, log_ratio, ratio, summable
from streamrl.metrics import BUCKET, ENVIRONMENT, LAG_BINS, LENGTH_BUCKETS

MAX_LAG_BINS = 4096
"""Bins of the lag histogram; older tokens count in the last one."""
RATIO_BINS = 8000
"""Bins of the histogram of log ρ over [−20, 20]: 0.005 nats, so that a quantile of ρ is right to half a percent."""
MAX_LOG_SEQUENCE = 300.0
"""|Σ log ρ| of a trajectory is cut here: the square of e^300 is still finite in float64."""

TOKEN_SUMS = (
    "tokens",
    "low_positive",
    "low_negative",
    "high_positive",
    "high_negative",
    "dual",
    "clipped",
    "dropped",
    "capped",
    "ratio",
    "ratio_squared",
    "k1",
    "k3",
    "absolute",
    "entropy",
    "lag",
    "positive",
    "negative",
    "slope_positive",
    "slope_negative",
    "fresh",
    "fresh_ratio",
    "fresh_ratio_squared",
    "fresh_k3",
    "fresh_squared",
    "fresh_outside",
    "aged",
    "aged_ratio",
    "aged_ratio_squared",
    "aged_k3",
    "aged_squared",
    "aged_outside",
    "update_ratio",
    "update_ratio_squared",
    "update_k3",
    "kl_reference",
    "value_loss",
    "return",
    "return_squared",
    "residual",
    "residual_squared",
)
SEQUENCE_SUMS = ("sequences", "weight", "weight_squared", "perplexity_ratio", "dropped_sequences")
MAXIMA = ("lag", "mismatch")


class Diagnostics:
    """Adds up micro-batches of one optimizer step; ``reduce`` gives the metrics of all ranks.

    ``envs`` are the environments to report apart, the same on all ranks; ``lag_bound`` sizes the lag histogram.
    """

    def __init__(
        self, lag_bound: int, device: torch.device, rank: int = 0, ranks: int = 1, envs: Sequence[str] = ()
    ) -> None:
        self.rank, self.ranks, self.envs = rank, ranks, tuple(envs)
        self.bins = min(lag_bound + 1, MAX_LAG_BINS)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        rows = 1 + len(self.envs) + len(LENGTH_BUCKETS)
        self._tokens, self._sequences = zeros(rows, len(TOKEN_SUMS)), zeros(rows, len(SEQUENCE_SUMS))
        self._scalars = zeros(2)
        """Loss, and sampled tokens over the lag bound."""
        self._lags, self._ratios, self._maxima = zeros(self.bins), zeros(RATIO_BINS), zeros(len(MAXIMA))

    def add(
        self,
        result: Evaluated,
        entropy: Tensor,
        lag: Tensor,
        aged: Tensor,
        proximal: Tensor,
        masked: int = 0,
        envs: Tensor | None = None,
        extra: Mapping[str, Tensor] | None = None,
    ) -> None:
        """One micro-batch.

        Per token ``[T]``: ``entropy``, ``lag`` int64 (trainer's version − the token's), ``aged`` bool (lag over 0, or
        sampled on a KV cache of an older version: its gap is not one of numerics), ``proximal`` the trainer's log-probs
        before its update, ``extra`` further columns of ``TOKEN_SUMS``. ``envs`` int64 ``[sequences]`` index
        ``Diagnostics.envs``, −1 for none of them. ``masked`` counts sampled tokens over the lag bound, which got no
        loss.
        """
        batch, mask = result.batch, result.batch.mask
        chosen = mask.nonzero().flatten()
        whole = summable(log_ratio(batch.current.detach(), batch.behaviour))[chosen].double()
        before = summable(log_ratio(proximal.detach(), batch.behaviour))[chosen].double()
        update = log_ratio(batch.current.detach(), proximal.detach())[chosen].double()
        age, old = lag[chosen], aged[chosen]
        columns = _columns(result, chosen, whole, update) | _gap(before, old)
        columns |= {"entropy": entropy.detach()[chosen], "lag": age}
        columns |= {name: values.detach()[chosen] for name, values in (extra or {}).items()}
        table = torch.stack([columns.get(name, whole.new_zeros(len(chosen))).double() for name in TOKEN_SUMS], dim=1)
        segments = batch.segments[chosen]
        lengths = torch.bincount(segments, minlength=batch.count)
        rows = self._rows(lengths, envs)
        sequences = _sequence_table(whole, table[:, TOKEN_SUMS.index("dropped")], segments, lengths)
        present = lengths > 0
        for row in rows:
            kept = row >= 0
            self._sequences.index_add_(0, row[kept & present], sequences[kept & present])
            of_token = row[segments]
            self._tokens.index_add_(0, of_token[of_token >= 0], table[of_token >= 0])
        self._scalars += torch.stack([result.loss.detach().double(), whole.new_tensor(float(masked))])
        self._lags += torch.bincount(age.clamp(max=self.bins - 1), minlength=self.bins)
        place = (whole.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) + MAX_LOG_RATIO) * (RATIO_BINS / (2 * MAX_LOG_RATIO))
        self._ratios += torch.bincount(place.nan_to_num().long().clamp(max=RATIO_BINS - 1), minlength=RATIO_BINS)
        if len(chosen):
            fresh = torch.where(old, 0.0, before).abs().max()
            self._maxima = torch.maximum(self._maxima, torch.stack([age.max().double(), fresh]))

    def reduce(self, group: dist.ProcessGroup | None = None) -> tuple[dict[str, float], list[int]]:
        """Metrics over all ranks, every key always present, and the ranks whose loss is not finite.

        Collective over ``group`` (one sum, one maximum); both results are equal on all ranks.
        """
        broken = torch.zeros(self.ranks, dtype=torch.float64, device=self._scalars.device)
        broken[self.rank] = float(not torch.isfinite(self._scalars[0]))
        parts = [self._tokens, self._sequences, self._scalars, self._lags, self._ratios, broken]
        sums, maxima = torch.cat([part.flatten() for part in parts]), self._maxima.clone()
        if group is not None:
            dist.all_reduce(sums, dist.ReduceOp.SUM, group=group)
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
        tokens, sequences, scalars, lags, ratios, flags = (
            flat.view(part.shape)
            for flat, part in zip(sums.cpu().split([part.numel() for part in parts]), parts, strict=True)
        )
        rows = [
            dict(zip(TOKEN_SUMS, one, strict=True)) | dict(zip(SEQUENCE_SUMS, other, strict=True))
            for one, other in zip(tokens.tolist(), sequences.tolist(), strict=True)
        ]
        metrics = _metrics(rows[0]) | _lag_metrics(lags, rows[0], maxima[0].item())
        metrics |= {
            "policy/loss": scalars[0].item(),
            "policy/ratio_p999": _ratio_quantile(ratios, 0.999),
            "mismatch/max": maxima[1].item(),
            "lag/masked_tokens": scalars[1].item(),
        }
        for env, row in zip(self.envs, rows[1:], strict=False):
            metrics |= {f"policy/{env}/{name}": value for name, value in _of_environment(row).items()}
        for bucket, row in zip(LENGTH_BUCKETS, rows[1 + len(self.envs) :], strict=True):
            metrics |= {f"by_length/{bucket}_{name}": value for name, value in _of_bucket(row).items()}
        return metrics, flags.nonzero().flatten().tolist()

    def _rows(self, lengths: Tensor, envs: Tensor | None) -> list[Tensor]:
        """For each sequence its rows of the tables, −1 for none: the whole, its environment, its bucket."""
        bounds = torch.tensor([bound for bound in LENGTH_BUCKETS.values() if bound], device=lengths.device)
        bucket = 1 + len(self.envs) + torch.bucketize(lengths, bounds)
        rows = [torch.zeros_like(lengths), bucket]
        if envs is not None:
            rows.append(torch.where(envs >= 0, 1 + envs, -1))
        return rows


def _columns(result: Evaluated, chosen: Tensor, whole: Tensor, update: Tensor) -> dict[str, Tensor]:
    tokens, corrected = result.tokens, result.corrected
    advantages = result.batch.advantages[chosen]
    positive, negative = advantages > 0, advantages < 0
    low, high, dual = tokens.low[chosen], tokens.high[chosen], tokens.dual[chosen]
    slope = (corrected.factor * tokens.slope)[chosen].double()
    rho, step = ratio(whole), ratio(update)
    return {
        "tokens": torch.ones_like(whole),
        "low_positive": low & positive,
        "low_negative": low & negative,
        "high_positive": high & positive,
        "high_negative": high & negative,
        "dual": dual,
        "clipped": low | high | dual,
        "dropped": corrected.dropped[chosen],
        "capped": corrected.capped[chosen],
        "ratio": rho,
        "ratio_squared": rho.square(),
        "k1": -whole,
        "k3": k3(whole),
        "absolute": whole.abs(),
        "positive": positive,
        "negative": negative,
        "slope_positive": torch.where(positive, slope, 0.0),
        "slope_negative": torch.where(negative, slope, 0.0),
        "update_ratio": step,
        "update_ratio_squared": step.square(),
        "update_k3": k3(update),
    }


def _gap(before: Tensor, aged: Tensor) -> dict[str, Tensor]:
    """π_old against μ: ``fresh`` where only numerics differ, ``aged`` where weights or KV cache were older too."""
    columns: dict[str, Tensor] = {}
    for name, chosen in (("fresh", ~aged), ("aged", aged)):
        weight = torch.where(chosen, ratio(before), 0.0)
        columns |= {
            name: chosen,
            f"{name}_ratio": weight,
            f"{name}_ratio_squared": weight.square(),
            f"{name}_k3": torch.where(chosen, k3(before), 0.0),
            f"{name}_squared": torch.where(chosen, before, 0.0).square(),
        }
    return columns


def _sequence_table(whole: Tensor, dropped: Tensor, segments: Tensor, lengths: Tensor) -> Tensor:
    """``[sequences, len(SEQUENCE_SUMS)]``: what one trajectory adds to each sum."""
    size = len(lengths)
    logs = whole.new_zeros(size).index_add_(0, segments, whole)
    weight = torch.exp(logs.clamp(-MAX_LOG_SEQUENCE, MAX_LOG_SEQUENCE))
    mean = logs / lengths.clamp(min=1)
    gone = whole.new_zeros(size).index_add_(0, segments, dropped) >= lengths
    columns = {
        "sequences": torch.ones_like(weight),
        "weight": weight,
        "weight_squared": weight.square(),
        "perplexity_ratio": torch.exp((-mean).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)),
        "dropped_sequences": gone.double(),
    }
    return torch.stack([columns[name] for name in SEQUENCE_SUMS], dim=1)


def _metrics(total: dict[str, float]) -> dict[str, float]:
    tokens, fresh = max(total["tokens"], 1.0), max(total["fresh"], 1.0)
    low = (total["low_positive"] + total["low_negative"]) / tokens
    high = (total["high_positive"] + total["high_negative"]) / tokens
    sides = ("low_positive", "low_negative", "high_positive", "high_negative")
    return {
        "policy/clip_fraction": total["clipped"] / tokens,
        "policy/clip_fraction_low": low,
        "policy/clip_fraction_high": high,
        **{f"policy/clip_fraction_{side}": total[side] / tokens for side in sides},
        "policy/dual_clip_fraction": total["dual"] / tokens,
        "policy/dropped_fraction": total["dropped"] / tokens,
        "policy/capped_fraction": total["capped"] / tokens,
        "policy/dropped_sequences": total["dropped_sequences"] / max(total["sequences"], 1.0),
        "policy/slope_positive": total["slope_positive"] / max(total["positive"], 1.0),
        "policy/slope_negative": total["slope_negative"] / max(total["negative"], 1.0),
        "policy/ratio_mean": total["ratio"] / tokens,
        "policy/ratio_absolute_log": total["absolute"] / tokens,
        "policy/chi2": total["ratio_squared"] / tokens - 1.0 if total["tokens"] else 0.0,
        "policy/perplexity_ratio": total["perplexity_ratio"] / max(total["sequences"], 1.0),
        "policy/entropy": total["entropy"] / tokens,
        "policy/kl_k1": total["k1"] / tokens,
        "policy/kl_k3": total["k3"] / tokens,
        "policy/kl_reference": total["kl_reference"] / tokens,
        "policy/ess": _ess(total["ratio"], total["ratio_squared"], total["tokens"]),
        "policy/ess_sequence": _ess(total["weight"], total["weight_squared"], total["sequences"]),
        "mismatch/rms": (total["fresh_squared"] / fresh) ** 0.5,
        "mismatch/k3": total["fresh_k3"] / fresh,
        "mismatch/outside_kept": total["fresh_outside"] / fresh,
        "mismatch/ess": _ess(total["fresh_ratio"], total["fresh_ratio_squared"], total["fresh"]),
        "value/loss": total["value_loss"] / tokens,
        "value/explained_variance": _explained(total),
        "update/k3": total["update_k3"] / tokens,
        "update/ess": _ess(total["update_ratio"], total["update_ratio_squared"], total["tokens"]),
        "trained_tokens": total["tokens"],
    }


def _lag_metrics(histogram: Tensor, total: dict[str, float], largest: float) -> dict[str, float]:
    tokens = max(total["tokens"], 1.0)
    edges = [*LAG_BINS.values(), len(histogram)]
    return {
        "lag/mean": total["lag"] / tokens,
        "lag/p50": float(_quantile(histogram, 0.5)),
        "lag/p95": float(_quantile(histogram, 0.95)),
        "lag/max": largest,
        "lag/k3": total["aged_k3"] / max(total["aged"], 1.0),
        "lag/outside_kept": total["aged_outside"] / max(total["aged"], 1.0),
        "lag/ess": _ess(total["aged_ratio"], total["aged_ratio_squared"], total["aged"]),
        **{
            f"lag/{name}": histogram[start:end].sum().item() / tokens
            for name, start, end in zip(LAG_BINS, edges, edges[1:], strict=False)
        },
    }


def _of_environment(total: dict[str, float]) -> dict[str, float]:
    every = _metrics(total) | {"lag/mean": total["lag"] / max(total["tokens"], 1.0)}
    return {name: every[key] for name, key in ENVIRONMENT.items()}


def _of_bucket(total: dict[str, float]) -> dict[str, float]:
    every = _metrics(total)
    return {name: every[key] for name, key in BUCKET.items()}


def _ess(weights: float, squares: float, count: float) -> float:
    """Effective sample size ``(Σw)²/(N·Σw²)``, in (0, 1]; 0 where there is nothing."""
    return weights * weights / (count * squares) if count and squares else 0.0


def _explained(total: dict[str, float]) -> float:
    """1 − var(G − V)/var(G), at most 1; 0 where returns do not vary."""
    tokens = max(total["tokens"], 1.0)
    of_returns = total["return_squared"] / tokens - (total["return"] / tokens) ** 2
    of_residuals = total["residual_squared"] / tokens - (total["residual"] / tokens) ** 2
    return 1.0 - of_residuals / of_returns if of_returns > 1e-12 else 0.0


def _quantile(histogram: Tensor, share: float) -> int:
    """Smallest bin that at least ``share`` of the tokens do not exceed; 0 where there are none."""
    cumulative = histogram.cumsum(0)
    return int(torch.searchsorted(cumulative, share * cumulative[-1]))


def _ratio_quantile(histogram: Tensor, share: float) -> float:
    """ρ at the upper edge of the bin; 0 where there are no tokens."""
    if not histogram.sum():
        return 0.0
    edge = (_quantile(histogram, share) + 1) * (2 * MAX_LOG_RATIO / RATIO_BINS) - MAX_LOG_RATIO
    return float(torch.exp(torch.tensor(edge, dtype=torch.float64)))
