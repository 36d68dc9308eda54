"""The policy losses by name: formula, paper, and what they need. No torch: settings are checked with this.

μ is the behaviour policy (the engine that sampled, with the weights it had at each token), π_old the proximal policy
(the trainer's at the start of the update), π the current one. r = π/π_old, w = π_old/μ, ρ = π/μ; ℓ is the log of a
ratio, A the advantage, sg a stop-gradient; means and products Π are over the tokens of a sequence. All losses are
minimised. Their functions are in ``streamrl/loss``, their parameters in ``streamrl/objective_params.py``; the table
made from both is ``docs/losses.md``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from streamrl.objective_params import (
    Band,
    Cap,
    Clip,
    CovarianceClip,
    CovariancePull,
    Decoupled,
    Divergence,
    Gamma,
    Gate,
    LogClip,
    Plain,
    SecondMoment,
    SequenceClip,
    Taper,
)


class Ratio(StrEnum):
    """Which two policies a loss compares."""

    NONE = "none"
    """log π alone."""
    UPDATE = "update"
    """r = π/π_old; without proximal log-probs μ takes the place of π_old."""
    WHOLE = "whole"
    """ρ = π/μ: lag, mismatch and update in one."""
    DECOUPLED = "decoupled"
    """r and w apart: proximal log-probs must be recomputed."""


@dataclass(frozen=True)
class Objective:
    """One row of the table: what ``loss.name`` may be and what follows from it."""

    name: str
    params: Any
    """Default parameters, a frozen dataclass."""
    ratio: Ratio
    formula: str
    paper: str
    when: str
    advantage: str = "mean"
    """The advantage that its paper uses."""
    aggregation: str = "token_mean"
    """The aggregation that its paper uses, up to a constant; that of ``policy_loss`` without weights."""
    clips: bool = False
    """Only a clip or a gate on r bounds its step, so that with r = 1 nothing does."""
    batch_wide: bool = False
    """A statistic over the whole batch enters, taken before the first gradient."""


_PPO = "−min(r·A, clip(r, 1−ε_low, 1+ε_high)·A)"
SEQUENCE_MEAN = "sequence_mean_token_mean"
OBJECTIVES: dict[str, Objective] = {
    objective.name: objective
    for objective in (
        Objective(
            "tis",
            Cap(),
            Ratio.WHOLE,
            "−sg(min(ρ, c))·A·log π",
            "2509.19128 (PipelineRL), 2505.24034 (AIPO)",
            "The default: one forward pass, bounded weights, no clip that cannot act.",
        ),
        Objective(
            "ppo",
            Clip(),
            Ratio.UPDATE,
            f"{_PPO}; where A < 0 at most −c·A; min(r, δ) in the first branch",
            "1707.06347, 1912.09729, 2505.07291",
            "Several updates per batch, or clipped against μ.",
            clips=True,
        ),
        Objective("reinforce", Plain(), Ratio.NONE, "−A·log π", "Williams 1992", "On-policy data only."),
        Objective(
            "grpo",
            Clip(),
            Ratio.UPDATE,
            _PPO,
            "2402.03300",
            "The classic; rows weigh the same whatever their length.",
            "mean_std",
            SEQUENCE_MEAN,
            clips=True,
        ),
        Objective(
            "dr_grpo",
            Clip(),
            Ratio.UPDATE,
            _PPO,
            "2503.20783",
            "GRPO without its length and difficulty bias.",
            "mean",
            "sequence_mean_token_sum",
            clips=True,
        ),
        Objective(
            "dapo",
            Clip(clip_high=0.28, dual_clip=10.0),
            Ratio.UPDATE,
            f"{_PPO}; where A < 0 at most −c·A",
            "2503.14476",
            "Long answers, entropy collapse under a symmetric clip.",
            "mean_std",
            clips=True,
        ),
        Objective(
            "rloo",
            Plain(),
            Ratio.NONE,
            "−A·log π",
            "2402.14740",
            "On-policy data; an unbiased baseline from the rest of the group.",
            "leave_one_out",
            "sequence_mean_token_sum",
        ),
        Objective(
            "gspo",
            SequenceClip(),
            Ratio.UPDATE,
            "−min(s·A, clip(s, 1−ε_low, 1+ε_high)·A), s = exp(mean ℓ_r)",
            "2507.18071",
            "Mixture-of-experts models, whose token ratios are noisy.",
            "mean_std",
            SEQUENCE_MEAN,
            clips=True,
        ),
        Objective(
            "gspo_token",
            SequenceClip(),
            Ratio.UPDATE,
            "as gspo with s_t = sg(s)·π/sg(π)",
            "2507.18071",
            "GSPO with advantages that differ within a row.",
            "mean_std",
            SEQUENCE_MEAN,
            clips=True,
        ),
        Objective(
            "cispo",
            Band(),
            Ratio.UPDATE,
            "−sg(clip(r, floor, c))·A·log π",
            "2506.13585 (MiniMax-M1), 2510.13786 (ScaleRL)",
            "Keeps the gradient of rare tokens that PPO's clip would drop.",
            "mean_std",
        ),
        Objective(
            "sapo",
            Gate(),
            Ratio.UPDATE,
            "−(4/τ)·σ(τ·(r−1))·A, τ by the sign of A",
            "2511.20347",
            "A smooth gate instead of a clip. Values at different τ are not comparable.",
            "mean_std",
            SEQUENCE_MEAN,
            clips=True,
        ),
        Objective(
            "gmpo",
            LogClip(),
            Ratio.UPDATE,
            "−A·exp(mean x), x = ℓ_r cut on the harmful side to [−ε_low, ε_high]",
            "2507.20673",
            "Sequence ratio that a few extreme tokens cannot move.",
            "mean_std",
            SEQUENCE_MEAN,
            clips=True,
        ),
        Objective(
            "decoupled_ppo",
            Decoupled(),
            Ratio.DECOUPLED,
            f"sg(w)·PPO(r), w ≤ c, PPO(r) = {_PPO}",
            "2110.00641, 2505.24298 (AReaL)",
            "Stale data with several updates per batch.",
            advantage="mean_std",
            clips=True,
        ),
        Objective(
            "dppo",
            Divergence(),
            Ratio.WHOLE,
            "−keep·ρ·A + κ·ℓ_ρ²; keep: π−μ ≤ δ_high where A > 0, else π−μ ≥ −δ_low",
            "2602.04879, 2602.02276",
            "Trust region in probabilities: rare tokens may move by large ratios.",
        ),
        Objective(
            "m2po",
            SecondMoment(),
            Ratio.WHOLE,
            "PPO(ρ) with the widest clip for which the mean of ℓ² over harmful tokens is at most τ",
            "2510.01161",
            "Very stale data (tens of versions and more).",
            "mean_std",
            batch_wide=True,
        ),
        Objective(
            "topr",
            Taper(),
            Ratio.WHOLE,
            "−A·log π where A ≥ 0, else −sg(min(Π ρ, c))·A·log π",
            "2503.14286",
            "Replayed or foreign data; keep 10 to 20 % effective positives.",
        ),
        Objective(
            "vespo",
            Gamma(),
            Ratio.WHOLE,
            "−sg(φ(Π ρ))·A·log π, log φ(W) = λ + k·log W − λ·W",
            "2602.10693",
            "Sequence weights that vanish smoothly on both sides.",
        ),
        Objective(
            "gpg",
            Plain(),
            Ratio.NONE,
            "−A·log π",
            "2504.02546",
            "On-policy data; advantages rescaled by the share of informative trajectories.",
            "gpg",
        ),
        Objective(
            "clip_cov",
            CovarianceClip(),
            Ratio.UPDATE,
            "PPO(r), without gradient on drawn tokens of high covariance of A and log π",
            "2505.22617",
            "Entropy falls too fast.",
            "mean_std",
            clips=True,
            batch_wide=True,
        ),
        Objective(
            "kl_cov",
            CovariancePull(),
            Ratio.UPDATE,
            "−r·A, + κ·|ℓ_r| on the tokens of highest covariance of A and log π",
            "2505.22617",
            "Entropy falls too fast, and a clip would hide it.",
            "mean_std",
            batch_wide=True,
        ),
    )
}

PARAMETERS: tuple[str, ...] = tuple(
    dict.fromkeys(field.name for objective in OBJECTIVES.values() for field in dataclasses.fields(objective.params))
)
"""Every parameter of every loss, each once: keys of the section ``loss``."""


def parameters_of(name: str) -> tuple[str, ...]:
    """Names of the parameters that loss ``name`` takes."""
    return tuple(field.name for field in dataclasses.fields(OBJECTIVES[name].params))
