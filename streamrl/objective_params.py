"""Parameters of the policy losses and of corrections, with their defaults: frozen, and free of torch."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


@dataclass(frozen=True)
class Plain:
    """A loss without parameters."""


@dataclass(frozen=True)
class Clip:
    clip_low: float = 0.2
    """The ratio is clipped below at 1 − this."""
    clip_high: float = 0.2
    """The ratio is clipped above at 1 + this."""
    dual_clip: float = math.inf
    """Bound c > 1 on the loss where A < 0: at most −c·A (arXiv 1912.09729; verl 3, DAPO recipes 10). inf: off."""
    delta: float = math.inf
    """Bound δ > 1 + clip_high on the ratio of the unclipped branch (INTELLECT-2, arXiv 2505.07291). inf: off."""


@dataclass(frozen=True)
class SequenceClip:
    clip_low: float = 3e-4
    """The sequence's ratio, a geometric mean over its tokens, is clipped below at 1 − this: far less than PPO's."""
    clip_high: float = 4e-4
    """And above at 1 + this."""


@dataclass(frozen=True)
class LogClip:
    clip_low: float = 0.4
    """In log space: ℓ is cut at −this where A < 0."""
    clip_high: float = 0.4
    """In log space: ℓ is cut at this where A > 0."""


@dataclass(frozen=True)
class Cap:
    cap: float = 5.0
    """Largest weight of a token (PipelineRL 5 in the paper, 1.02 in its shipped settings; AIPO 2 to 10)."""


@dataclass(frozen=True)
class Band:
    floor: float = 0.0
    """Smallest weight, 1 − ε_low of the paper; 0: no lower bound, as there."""
    cap: float = 5.0
    """Largest weight, absolute as in ScaleRL and TRL; verl, slime and SkyRL write 1 + ε_high."""


@dataclass(frozen=True)
class Gate:
    tau_pos: float = 1.0
    """Temperature of the gate where A > 0."""
    tau_neg: float = 1.05
    """Temperature of the gate where A ≤ 0; above tau_pos, because pushing down is the less stable direction."""


@dataclass(frozen=True)
class Decoupled:
    clip_low: float = 0.2
    """π/π_old is clipped below at 1 − this."""
    clip_high: float = 0.2
    """And above at 1 + this."""
    dual_clip: float = math.inf
    """Bound c > 1 on PPO's loss where A < 0: at most −c·A, before the weight. inf: off."""
    weight_cap: float = 5.0
    """Largest behaviour weight w."""
    weight_rule: str = "mask"
    """``mask``: a token over the cap gets no loss (AReaL); ``truncate``: its weight is the cap."""


@dataclass(frozen=True)
class Divergence:
    clip_low: float = 0.2
    """Where A ≤ 0 a token is dropped once its probability fell by more than this (prime-rl 0.2, verl 0.15)."""
    clip_high: float = 0.2
    """Where A > 0 a token is dropped once its probability rose by more than this."""
    divergence: str = "tv"
    """``tv``: probability difference; ``kl``: Bernoulli KL(μ‖π) of the token, same two bounds (verl 0.05);
    ``absolute``: probability difference in both directions, bound ``clip_high`` (prime-rl's IPO, 0.1)."""
    pull: float = 1e-3
    """κ of the penalty κ·ℓ² on all tokens, dropped ones too: what brings drifting tokens back. 0: off (verl)."""
    cap: float = math.inf
    """Cut of the weight ρ; finite gives verl's form −sg(min(ρ, cap))·A·log π (20 there)."""


@dataclass(frozen=True)
class SecondMoment:
    budget: float = 0.04
    """Bound on the mean of ℓ² over harmful tokens (A > 0 and ρ > 1, or A < 0 and ρ < 1)."""
    clip_low: float = 0.3
    """The clip is never narrower than this (the released code)."""
    clip_high: float = 0.5
    """The same above."""
    moment_rule: str = "widen"
    """``widen``: one clip for the batch, as wide as the budget allows (the released code); ``mask``: harmful tokens
    with the largest ℓ² get no loss until the rest keep the budget (the paper's text)."""


@dataclass(frozen=True)
class Taper:
    cap: float = 1.0
    """Largest weight of a trajectory with A < 0; those with A ≥ 0 weigh 1."""


@dataclass(frozen=True)
class CovarianceClip:
    clip_low: float = 0.2
    """The ratio is clipped below at 1 − this."""
    clip_high: float = 0.2
    """And above at 1 + this."""
    cov_low: float = 1.0
    """A token is a candidate if its covariance of advantage and log-prob lies between these two."""
    cov_high: float = 5.0
    """Upper end of the candidates."""
    cov_share: float = 2e-4
    """Share of the batch's tokens, at least one, that are drawn from the candidates and lose their gradient."""


@dataclass(frozen=True)
class CovariancePull:
    cov_share: float = 2e-4
    """Share of the batch's tokens, at least one, with the largest covariance: they are pulled back."""
    pull: float = 0.1
    """Coefficient of |log r| on them (verl 0.1, the paper 1)."""


@dataclass(frozen=True)
class Gamma:
    k_pos: float = 2.0
    """Power of W where A ≥ 0: the weight peaks at W = k/λ."""
    lambda_pos: float = 3.0
    """Rate of the exponential decay in W where A ≥ 0."""
    k_neg: float = 3.0
    """Power of W where A < 0."""
    lambda_neg: float = 2.0
    """Rate of the decay where A < 0."""


CHOICES: dict[str, tuple[str, ...]] = {
    "weight_rule": ("mask", "truncate"),
    "divergence": ("tv", "kl", "absolute"),
    "moment_rule": ("widen", "mask"),
}
POSITIVE = ("cap", "tau_pos", "tau_neg", "weight_cap", "budget", "k_pos", "lambda_pos", "k_neg", "lambda_neg")
ABOVE_ONE = ("dual_clip", "delta")
AT_MOST_ONE = ("cov_share",)


def check_parameters(params: Any) -> None:
    """Raises ``ValueError`` with the parameter, what came and what is possible."""
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if field.name in CHOICES:
            if value not in CHOICES[field.name]:
                raise ValueError(f"{field.name}={value}: expected one of {', '.join(CHOICES[field.name])}")
        elif isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            raise ValueError(f"{field.name}={value}: expected a number")
        elif field.name in ABOVE_ONE and not value > 1:
            raise ValueError(f"{field.name}={value}: must be above 1; .inf switches it off")
        elif field.name in POSITIVE and not value > 0:
            raise ValueError(f"{field.name}={value}: must be positive")
        elif field.name in AT_MOST_ONE and value > 1:
            raise ValueError(f"{field.name}={value}: is a share, at most 1")
        elif value < 0:
            raise ValueError(f"{field.name}={value}: must not be negative")


class Level(StrEnum):
    """Over what a correction's weight is taken."""

    NONE = "none"
    TOKEN = "token"
    SEQUENCE = "sequence"
    """Product over the trajectory: over about a thousand tokens it filters by length, whatever the lag."""
    GEOMETRIC = "geometric"
    """Geometric mean over the trajectory."""


@dataclass(frozen=True)
class Corrections:
    """Corrections for w = π_old/μ on top of any loss (``loss/corrections.py``); all off by default."""

    weight: Level = Level.NONE
    """Multiply the loss by the weight at this level (TIS: ``token`` with a cap; IcePop adds ``reject=token``)."""
    weight_cap: float = math.inf
    """Cut of that weight (TIS 2 for small models, 8 for 32B; sequence 2 to 10)."""
    reject: Level = Level.NONE
    """Drop what leaves [reject_low, reject_high] at this level: tokens, or whole trajectories."""
    reject_low: float = 0.0
    """IcePop 0.5; geometric 0.99 (SkyRL) to 0.999 (verl)."""
    reject_high: float = math.inf
    """IcePop 5; geometric 1.01 to 1.001."""
    max_k3: float = math.inf
    """Drop trajectories whose mean of w − 1 − log w is over this, in nats (0.001 to 0.01)."""
    veto_low: float = 0.0
    """Drop trajectories with a token of w below this (INTELLECT-3: 1e-5)."""
    veto_high: float = math.inf
    """The same above."""
    opsm: float = math.inf
    """Drop trajectories with A < 0 whose mean of log μ − log π is over this, in nats (DeepSeek-V3.2)."""
    renormalise: bool = False
    """Take what is dropped out of the denominators (verl's rejection sampling): rejecting then raises the step."""

    @property
    def active(self) -> bool:
        return self != Corrections()
