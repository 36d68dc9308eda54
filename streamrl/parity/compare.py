"""Two sides' log-probs of the same tokens, compared in log space, and what is still healthy."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np


@dataclass(frozen=True)
class Limits:
    """The largest values that pass, in nats."""

    rms: float
    p999: float
    max: float
    k3: float

    def scaled(self, temperature: float) -> Limits:
        """At a temperature under 1 the same noise of a logit is that much more of a log-prob."""
        return self.times(max(1.0, 1.0 / temperature))

    def times(self, factor: float) -> Limits:
        """For noise that is so many times as large."""
        return Limits(self.rms * factor, self.p999 * factor, self.max * factor, self.k3 * factor**2)


LIMITS = {
    "float32": Limits(rms=1e-4, p999=5e-4, max=1e-3, k3=1e-7),
    "bfloat16": Limits(rms=0.05, p999=0.25, max=0.5, k3=2.5e-3),
}
"""By dtype of the body. fp32 kernels differ by the order of sums alone, which is well under 1e-5; a bfloat16 body with
both heads in fp32 gives 0.02 to 0.03, with both in bfloat16 0.03 to 0.04 (Fast-LLM, Qwen2.5-7B)."""
ENOUGH = 1000
"""Tokens from which on 99.9 % of them are not all of them: with fewer, the largest difference has its own limit."""


def limits_of(dtype: str, rms: float = 0.0) -> Limits:
    """What a body in ``dtype`` is allowed at temperature 1; with ``rms``, a run's ``parity.rms``, that much."""
    limits = LIMITS[dtype]
    return limits.times(rms / limits.rms) if rms else limits


@dataclass(frozen=True)
class Comparison:
    """Engine minus trainer over ``tokens`` log-probs, in nats. A value that is not finite makes all of them NaN."""

    tokens: int
    offset: float
    """Mean difference: a systematic one is a matter of semantics, not of rounding."""
    rms: float
    p999: float
    """99.9 % of the absolute differences are at most this; with few tokens it is the largest."""
    max: float
    k3: float
    """Mean of ``r − 1 − log r``, ``r`` being trainer over engine: about rms² / 2 while both are small."""
    worst: int
    """Index of the token with the largest difference; of the first that is not finite; -1 without tokens."""

    def exceeded(self, limits: Limits) -> list[str]:
        """What is over its limit, such as ``rms 3.1e-02 > 1e-04``; empty where all is well. NaN is over any limit."""
        judged = [pair for pair in asdict(limits).items() if pair[0] != "p999" or self.tokens >= ENOUGH]
        pairs = [(name, getattr(self, name), limit) for name, limit in judged]
        return [f"{name} {value:.1e} > {limit:.0e}" for name, value, limit in pairs if not value <= limit]


def compare(engine: np.ndarray, trainer: np.ndarray) -> Comparison:
    """Log-probs float ``[N]`` of the same tokens by an engine and by the trainer. ``ValueError`` for unequal shapes."""
    ours, theirs = np.asarray(engine, dtype=np.float64), np.asarray(trainer, dtype=np.float64)
    if ours.shape != theirs.shape or ours.ndim != 1:
        raise ValueError(f"compare: expected two arrays [N] of the same tokens, got {ours.shape} and {theirs.shape}")
    if not len(ours):
        return Comparison(0, 0.0, 0.0, 0.0, 0.0, 0.0, -1)
    broken = ~(np.isfinite(ours) & np.isfinite(theirs))
    if broken.any():
        nan = math.nan
        return Comparison(len(ours), nan, nan, nan, nan, nan, int(np.argmax(broken)))
    difference = ours - theirs
    size = np.abs(difference)
    with np.errstate(over="ignore"):  # a ratio past e^709 is infinite, and over every limit
        k3 = float(np.mean(np.expm1(-difference) + difference))
    return Comparison(
        tokens=len(ours),
        offset=float(np.mean(difference)),
        rms=float(np.sqrt(np.mean(difference**2))),
        p999=float(np.quantile(size, 0.999)),
        max=float(np.max(size)),
        k3=k3,
        worst=int(np.argmax(size)),
    )
