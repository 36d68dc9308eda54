"""KL to a reference policy, per token: as a term of the loss, or as a penalty on rewards.

With x = log π_ref − log π on tokens sampled from π (Schulman, "Approximating KL divergence"; arXiv 2510.01555):
k1 = −x, k2 = x²/2, k3 = e^x − 1 − x. All estimate KL(π‖π_ref), but their gradients do not: as a loss k2 has the right
one, k1 has expectation 0, k3 has that of KL(π_ref‖π). So k2 belongs into the loss and k1 into the reward.
"""

from __future__ import annotations

import math

from torch import Tensor

from streamrl.loss.ratios import MAX_LOG_RATIO, k3, log_ratio, ratio

FORMS = ("k1", "k2", "k3", "k3_plus", "absolute")


def kl_terms(
    current: Tensor, reference: Tensor, form: str, behaviour: Tensor | None = None, ratio_cap: float = math.inf
) -> Tensor:
    """KL(π‖π_ref) of each token ``[T]``, nats, with a gradient through ``current``; none where |x| is cut, at 20.

    ``k3_plus`` has the value of k3 and the gradient of k2 (verl's ``k3+``); ``absolute`` is |x|. With ``behaviour`` the
    tokens are taken as sampled from μ, and the term is multiplied by ρ = π/μ, which makes it unbiased: ρ keeps its
    gradient (DeepSeek-V3.2, arXiv 2512.02556; TRL, slime), with a finite ``ratio_cap`` it is sg(min(ρ, cap)) instead.
    Raises ``ValueError`` for an unknown form.
    """
    if form not in FORMS:
        raise ValueError(f"KL form must be one of {', '.join(FORMS)}, got {form!r}")
    x = log_ratio(reference.detach(), current).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if form == "k1":
        term = -x
    elif form == "k2":
        term = 0.5 * x.square()
    elif form == "k3":
        term = k3(x)
    elif form == "k3_plus":
        pull = 0.5 * x.square()
        term = k3(x).detach() + pull - pull.detach()
    else:
        term = x.abs()
    if behaviour is None:
        return term
    rho = ratio(log_ratio(current, behaviour.detach()))
    return term * (rho if ratio_cap == math.inf else rho.detach().clamp(max=ratio_cap))


def kl_penalty(logprobs: Tensor, reference: Tensor, coefficient: float) -> Tensor:
    """``coefficient·k1`` of each token ``[T]``, without a gradient: what is taken off its reward."""
    return coefficient * log_ratio(logprobs.detach(), reference.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
