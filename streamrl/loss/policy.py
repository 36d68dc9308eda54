"""Policy losses by name: ``policy_loss("gspo", batch, params)``, and how to add one's own.

::

    LossBatch ──► the named loss ──► TokenLoss [T] ──► corrections ──► Σ weight × loss, measures
                       ▲
              batch-wide statistics (M2PO, Clip-Cov, KL-Cov)
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from streamrl.errors import ConfigError
from streamrl.loss.aggregate import packed_weights
from streamrl.loss.batch import LossBatch, TokenLoss, token_loss
from streamrl.loss.corrections import Corrected, correct
from streamrl.loss.covariance import clip_cov, clip_cov_selection, kl_cov, kl_cov_selection
from streamrl.loss.decoupled import decoupled_ppo
from streamrl.loss.dppo import dppo
from streamrl.loss.gmpo import gmpo
from streamrl.loss.gspo import gspo, gspo_token
from streamrl.loss.m2po import m2po, second_moment
from streamrl.loss.measures import Measure, Reduction, mean_over, total
from streamrl.loss.ppo import ppo
from streamrl.loss.ratios import log_ratio, ratio
from streamrl.loss.reinforce import reinforce
from streamrl.loss.sapo import sapo
from streamrl.loss.sequence_weights import topr, vespo
from streamrl.loss.truncated import cispo, tis
from streamrl.objective_params import Corrections, Plain
from streamrl.objectives import OBJECTIVES, Objective, Ratio

LossFunction = Callable[[LossBatch, Any], TokenLoss | Tensor]
"""Cleaned batch and parameters → per-token loss ``[T]``, as a ``TokenLoss`` or as a plain tensor."""
StatisticsFunction = Callable[[LossBatch, Any], dict[str, Tensor]]

_FUNCTIONS: dict[str, LossFunction] = {
    "reinforce": reinforce,
    "tis": tis,
    "ppo": ppo,
    "grpo": ppo,
    "dr_grpo": ppo,
    "dapo": ppo,
    "rloo": reinforce,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "decoupled_ppo": decoupled_ppo,
    "dppo": dppo,
    "m2po": m2po,
    "topr": topr,
    "vespo": vespo,
    "gpg": reinforce,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}
_STATISTICS: dict[str, StatisticsFunction] = {
    "m2po": second_moment,
    "clip_cov": clip_cov_selection,
    "kl_cov": kl_cov_selection,
}
_ADDED: dict[str, Objective] = {}


def register_loss(
    name: str,
    function: LossFunction,
    params: Any = Plain(),  # noqa: B008 - frozen
    ratio: Ratio = Ratio.UPDATE,
    aggregation: str = "token_mean",
) -> Objective:
    """Add a loss under a new ``name``: ``function(batch, params)`` gives the per-token loss ``[T]`` of a cleaned batch.

    ``params`` are its defaults, a frozen dataclass. Raises ``ValueError`` for a name that is taken.
    """
    if name in _FUNCTIONS:
        raise ValueError(f"there is a loss {name!r} already; give yours another name")
    objective = Objective(name, params, ratio, "", "", "", aggregation=aggregation)
    _FUNCTIONS[name], _ADDED[name] = function, objective
    return objective


def objective(name: str) -> Objective:
    """What is known of loss ``name``; ``package.module:function`` is imported and registered under that name.

    The function may carry its defaults and ratio as attributes ``params`` and ``ratio``. Raises ``ConfigError``, a
    ``ValueError``, for an unknown name or a function that is not there.
    """
    if name in OBJECTIVES:
        return OBJECTIVES[name]
    if name not in _ADDED and ":" in name:
        module, _, attribute = name.partition(":")
        try:
            function = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"loss.name={name}: {error}; expected package.module:function") from error
        register_loss(name, function, getattr(function, "params", Plain()), getattr(function, "ratio", Ratio.UPDATE))
    if name not in _ADDED:
        raise ConfigError(f"loss must be one of {', '.join([*OBJECTIVES, *_ADDED])}, got {name!r}")
    return _ADDED[name]


def loss_params(name: str, **settings: Any) -> Any:
    """The parameters of loss ``name`` with its defaults where ``settings`` says nothing. Raises ``ConfigError``."""
    defaults = objective(name).params
    known = {field.name for field in dataclasses.fields(defaults)}
    if unknown := sorted(set(settings) - known):
        raise ConfigError(f"loss {name} has no parameter {unknown[0]!r}; it takes {', '.join(sorted(known)) or 'none'}")
    return dataclasses.replace(defaults, **settings)


def policy_loss(
    name: str, batch: LossBatch, params: Any = None, corrections: Corrections | None = None
) -> tuple[Tensor, dict[str, Measure]]:
    """Loss (scalar, gradient with respect to ``batch.current``) and measures of one batch or micro-batch.

    Parts of a batch add up to it if ``batch.weights`` hold the batch's denominators and, for a batch-wide loss,
    ``batch.statistics`` its statistics. ``params`` None means the loss's defaults. The measures, over trained tokens:
    ``loss``; mean and maximum of the raw ρ; ``clip_fraction`` by side and sign of A; ``slope_positive`` and
    ``slope_negative``, the mean weight of the gradient where A > 0 and A < 0; ``dropped_fraction`` and
    ``capped_fraction`` by corrections; what the loss adds. Raises ``ValueError`` for an unknown name, parameters of
    another loss, or tensors that do not fit each other.
    """
    result = evaluate(name, batch, params, corrections)
    return result.loss.to(batch.current.dtype), measures(result)


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """A loss with everything that diagnostics need of it."""

    loss: Tensor
    """Float64, summed in float64."""
    batch: LossBatch
    """Cleaned."""
    tokens: TokenLoss
    corrected: Corrected


def evaluate(name: str, batch: LossBatch, params: Any = None, corrections: Corrections | None = None) -> Evaluated:
    """As ``policy_loss``, with the per-token tensors."""
    known = objective(name)
    params = known.params if params is None else params
    if not isinstance(params, type(known.params)):
        raise ValueError(
            f"loss {name} takes {type(known.params).__name__} parameters, got {type(params).__name__}; "
            f"build them with loss_params({name!r}, …)"
        )
    clean = batch.cleaned()
    tokens = _FUNCTIONS[name](clean, params)
    if isinstance(tokens, Tensor):
        tokens = token_loss(tokens, torch.ones_like(clean.current), clean.advantages)
    corrected = correct(clean, corrections)
    weights = clean.weights
    if weights is None:
        counted = clean.mask
        if corrections is not None and corrections.renormalise:
            counted = counted & ~corrected.dropped
        weights = packed_weights(counted, clean.segments, known.aggregation, sequences=clean.count)
    weighted = torch.where(clean.mask, weights.to(tokens.loss.dtype) * corrected.factor * tokens.loss, 0.0)
    loss = weighted.sum(dtype=torch.float64)  # centred advantages nearly cancel
    return Evaluated(loss, clean, tokens, corrected)


def batch_statistics(name: str, batch: LossBatch, params: Any = None) -> Mapping[str, Tensor] | None:
    """What loss ``name`` needs to know of the *whole* batch, from the log-probs before the update; None for most."""
    if name not in _STATISTICS:
        return None
    with torch.no_grad():
        return _STATISTICS[name](batch.cleaned(), objective(name).params if params is None else params)


def measures(result: Evaluated) -> dict[str, Measure]:
    """The metrics of ``policy_loss``."""
    batch, tokens, mask = result.batch, result.tokens, result.batch.mask
    positive, negative = batch.advantages > 0, batch.advantages < 0
    clipped = tokens.low | tokens.high | tokens.dual
    rho = ratio(log_ratio(batch.current.detach(), batch.behaviour)).double()
    named = {
        "loss": total(result.loss),
        "ratio_mean": mean_over(rho, mask),
        "ratio_max": Measure(Reduction.MAX, torch.where(mask, rho, 0.0).amax() if len(rho) else rho.new_zeros(())),
        "clip_fraction": mean_over(clipped, mask),
        "dual_clip_fraction": mean_over(tokens.dual, mask),
        "dropped_fraction": mean_over(result.corrected.dropped, mask),
        "capped_fraction": mean_over(result.corrected.capped, mask),
        "slope_positive": mean_over(result.corrected.factor * tokens.slope, mask & positive),
        "slope_negative": mean_over(result.corrected.factor * tokens.slope, mask & negative),
    }
    for side, flags in (("low", tokens.low), ("high", tokens.high)):
        named[f"clip_fraction_{side}"] = mean_over(flags, mask)
        named[f"clip_fraction_{side}_positive"] = mean_over(flags & positive, mask)
        named[f"clip_fraction_{side}_negative"] = mean_over(flags & negative, mask)
    return named | {key: mean_over(values, mask) for key, values in tokens.extra.items()}
