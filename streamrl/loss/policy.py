"""Policy losses: pure functions on packed tokens ``[T]``, minimised, anchored on the behaviour log-probs.

Notation: A advantage, μ behaviour policy (the sampler, with the weights it had at each token), π current policy,
ρ = π/μ, sg stop-gradient. One optimizer step is taken per batch, so that a policy recomputed by the trainer just before
the update would make every clip a no-op; μ is the anchor that bounds the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from streamrl.schema import LossConfig

MAX_LOG_RATIO = 20.0
"""|log ρ| beyond this is cut before ``exp``: e^20 = 4.9e8 is still finite after squaring in float32."""


@dataclass(frozen=True)
class PolicyLoss:
    """A micro-batch's share of the loss, and what the diagnostics need. Per-token tensors are detached, ``[T]``."""

    loss: Tensor
    """Scalar, ``Σ token_weight × per-token loss``; the only tensor with a gradient."""
    log_ratio: Tensor
    """float32, log π − log μ, neither cut nor truncated."""
    clipped_low: Tensor
    """bool, the lower side of the clip changed this token's loss. Never True where A = 0."""
    clipped_high: Tensor
    """bool, the upper side (or the cap) changed this token's loss. Never True where A = 0."""


def policy_loss(
    config: LossConfig, current: Tensor, behaviour: Tensor, advantages: Tensor, token_weights: Tensor
) -> PolicyLoss:
    """The loss that ``config.name`` says; all tensors ``[T]``, gradient with respect to ``current`` only.

    ``current`` and ``behaviour`` are log-probs of the sampled tokens; ``token_weights`` hold the global denominators
    (``loss/reduce.py``). Raises ``ValueError`` for an unknown name.
    """
    if config.name not in LOSSES:
        raise ValueError(f"loss must be one of {', '.join(LOSSES)}, got {config.name!r}")
    log_ratio = current - behaviour
    per_token, low, high = LOSSES[config.name](config, current, log_ratio, advantages)
    return PolicyLoss((token_weights * per_token).sum(), log_ratio.detach(), low, high)


def _tis(config: LossConfig, current: Tensor, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Truncated importance sampling ``−sg(min(ρ, c))·A·log π``.

    PipelineRL (arXiv 2509.19128), AIPO of LlamaRL (arXiv 2505.24034), CISPO without a lower bound (arXiv 2506.13585).
    Truncation bounds a token's weight and keeps its gradient, which a PPO clip would drop.
    """
    ratio = _ratio(log_ratio.detach())
    loss = -ratio.clamp(max=config.tis_cap) * advantages * current
    high = (ratio > config.tis_cap) & (advantages != 0)
    return loss, torch.zeros_like(high), high


def _ppo(config: LossConfig, current: Tensor, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Clipped surrogate ``−min(ρA, clip(ρ, 1−ε_low, 1+ε_high)·A)``.

    PPO (arXiv 1707.06347), GRPO (arXiv 2402.03300); two bounds as in DAPO (arXiv 2503.14476).
    """
    ratio = _ratio(log_ratio)
    floor, ceiling = 1.0 - config.clip_low, 1.0 + config.clip_high
    loss = -torch.minimum(ratio * advantages, ratio.clamp(floor, ceiling) * advantages)
    low = (ratio.detach() < floor) & (advantages < 0)
    high = (ratio.detach() > ceiling) & (advantages > 0)
    return loss, low, high


def _ratio(log_ratio: Tensor) -> Tensor:
    """ρ; where the cut is reached the gradient is zero rather than infinite."""
    return torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


Rule = Callable[[LossConfig, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
LOSSES: dict[str, Rule] = {"tis": _tis, "ppo": _ppo}
