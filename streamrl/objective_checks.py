"""Refuse objectives that cannot do what they say, before a run starts, with the reason and the way out."""

from __future__ import annotations

import dataclasses
import difflib
import math
from pathlib import Path
from typing import Any

from streamrl.errors import ConfigError
from streamrl.objective_params import Corrections, Level, check_parameters
from streamrl.objectives import OBJECTIVES, PARAMETERS, Ratio, parameters_of
from streamrl.schema import Config, LossConfig

ADVANTAGES = (
    "mean",
    "mean_std",
    "leave_one_out",
    "batch_std",
    "batch_std_raw",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "opo",
    "maxrl",
    "gpg",
    "gpg_informative",
    "gae",
)
AGGREGATIONS = (
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "constant_length",
    "prompt_mean",
)
KL_FORMS = ("k1", "k2", "k3", "k3_plus", "absolute")
LARGE_SEQUENCE_CLIP = 0.05
"""A clip on a sequence's geometric mean ratio that is wider than this almost never acts."""
_CHOICES = {
    "advantage": ADVANTAGES,
    "aggregation": AGGREGATIONS,
    "proximal": ("behaviour", "recompute"),
    "value.step": ("token", "turn"),
    "kl.place": ("loss", "reward"),
    "kl.form": KL_FORMS,
    "kl.serve": ("trainer", "engine"),
    "correction.weight": tuple(Level),
    "correction.reject": tuple(Level),
}


def loss_settings(loss: LossConfig) -> dict[str, Any]:
    """The parameters that the settings change, by name."""
    return {name: getattr(loss, name) for name in PARAMETERS if getattr(loss, name) is not None}


def corrections_of(loss: LossConfig) -> Corrections:
    """``loss.correction`` as the frozen struct that the losses take."""
    settings = dataclasses.asdict(loss.correction)
    return Corrections(**settings | {"weight": Level(settings["weight"]), "reject": Level(settings["reject"])})


def recomputes(loss: LossConfig) -> bool:
    """Whether the trainer runs a forward pass before its update, for proximal log-probs or a batch-wide statistic.

    Several updates need it for honest diagnostics too: only before the first one is π equal to π_old.
    """
    batch_wide = loss.name in OBJECTIVES and OBJECTIVES[loss.name].batch_wide
    before_the_loss = loss.advantage == "gae" or loss.correction.renormalise
    return loss.proximal == "recompute" or batch_wide or loss.updates_per_batch > 1 or before_the_loss


def trains_without_advantage(loss: LossConfig) -> bool:
    """Whether trajectories with advantage 0 matter: a pull or a KL term moves them, a batch-wide mean or new
    denominators count them, with GAE the number stands for a reward, and a loss of one's own may do anything."""
    pulled = (loss.name == "dppo" and loss.pull != 0.0) or ":" in loss.name
    return (
        loss.kl.coefficient > 0
        or pulled
        or loss.name in ("clip_cov", "kl_cov")
        or (loss.advantage == "gae" or loss.correction.renormalise)
    )


def serves_reference(config: Config) -> bool:
    """Whether a reference policy has an engine of its own, and its log-probs travel with each trajectory."""
    return bool(config.loss.kl.reference) and config.loss.kl.serve == "engine"


def serves_start(config: Config) -> bool:
    """Whether that engine has the weights of version 0, on which the parity gate compares all engines."""
    return serves_reference(config) and config.loss.kl.reference == "initial"


def check_objective(config: Config) -> None:
    """Raises ``ConfigError`` for the first thing about ``config.loss`` that is wrong."""
    loss = config.loss
    for key, choices in _CHOICES.items():
        value: Any = loss
        for part in key.split("."):
            value = getattr(value, part)
        if value not in choices:
            raise ConfigError(f"loss.{key}={value}: expected one of {', '.join(choices)}")
    _check_numbers(config)
    if ":" in loss.name:
        if used := next(iter(loss_settings(loss)), None):
            raise ConfigError(
                f"loss.{used} is for the losses of docs/losses.md; give {loss.name} its own as loss.args.{used}"
            )
    else:
        _check_parameters(loss)
        _check_ratio(loss)
    _check_value(loss)
    _check_kl(loss)
    _check_corrections(loss)
    _check_steering(config)


def warnings(config: Config) -> list[str]:
    """What runs but is probably not meant, one line each."""
    loss, found = config.loss, []
    clip = max(loss.clip_low or 0.0, loss.clip_high or 0.0)
    if loss.name in ("gspo", "gspo_token") and clip > LARGE_SEQUENCE_CLIP:
        found.append(
            f"loss.name={loss.name} with a clip of {clip:g}: its ratio is a geometric mean over the answer, on which a "
            "clip of PPO's size almost never acts; the paper uses loss.clip_low=3e-4 loss.clip_high=4e-4"
        )
    if loss.name in OBJECTIVES and OBJECTIVES[loss.name].ratio is Ratio.NONE and config.max_lag:
        corrected = loss.correction.weight != "none"
        if not corrected:
            found.append(
                f"loss.name={loss.name} does not correct for stale data and max_lag={config.max_lag}: take max_lag=0, "
                "loss=tis, or loss.correction.weight=token with loss.correction.weight_cap=2"
            )
    return found


def _check_numbers(config: Config) -> None:
    loss = config.loss
    if loss.updates_per_batch < 1:
        raise ConfigError(f"loss.updates_per_batch={loss.updates_per_batch}: must be at least 1")
    for key in ("turn_discount", "overlong_penalty"):
        value = getattr(loss, key)
        if not 0 <= value < math.inf or (key == "turn_discount" and value > 1):
            raise ConfigError(f"loss.{key}={value}: must lie in [0, {'1' if key == 'turn_discount' else 'inf'})")
    if not 0 <= loss.overlong_cache <= config.sampling.max_tokens:
        raise ConfigError(
            f"loss.overlong_cache={loss.overlong_cache}: must lie between 0 and "
            f"sampling.max_tokens={config.sampling.max_tokens}, over whose end the penalty falls"
        )


def _check_parameters(loss: LossConfig) -> None:
    if loss.name not in OBJECTIVES:
        near = difflib.get_close_matches(loss.name, OBJECTIVES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"loss.name={loss.name}: expected one of {', '.join(OBJECTIVES)}, or package.module:function{hint}"
        )
    if loss.args:
        raise ConfigError(f"loss.args is for a loss of your own; {loss.name} takes {_taken(loss.name)}")
    settings, known = loss_settings(loss), parameters_of(loss.name)
    if foreign := [name for name in settings if name not in known]:
        raise ConfigError(f"loss.{foreign[0]} is not a parameter of {loss.name}, which takes {_taken(loss.name)}")
    try:
        check_parameters(dataclasses.replace(OBJECTIVES[loss.name].params, **settings))
    except ValueError as error:
        raise ConfigError(f"loss.{error}") from None


def _taken(name: str) -> str:
    return ", ".join(f"loss.{parameter}" for parameter in parameters_of(name)) or "no parameters"


def _check_ratio(loss: LossConfig) -> None:
    objective = OBJECTIVES[loss.name]
    if objective.ratio is Ratio.DECOUPLED and loss.proximal != "recompute":
        raise ConfigError(
            f"loss.name={loss.name} needs the trainer's log-probs from before the update, and "
            f"loss.proximal={loss.proximal} has none: set loss.proximal=recompute loss.updates_per_batch=2"
        )
    if loss.proximal == "recompute" and loss.updates_per_batch == 1 and objective.clips:
        raise ConfigError(
            f"loss.name={loss.name} clips current/proximal, and with loss.proximal=recompute and one update per batch "
            "both are the same policy, so that the clip could never act: set loss.proximal=behaviour, or "
            "loss.updates_per_batch=2 or more"
        )


def _check_value(loss: LossConfig) -> None:
    value = loss.value
    for key in ("gamma", "lam"):
        if not 0 <= getattr(value, key) <= 1:
            raise ConfigError(f"loss.value.{key}={getattr(value, key)}: must lie in [0, 1]")
    if not (0 < value.coefficient < math.inf and value.clip > 0):
        raise ConfigError(f"loss.value.coefficient={value.coefficient}, loss.value.clip={value.clip}: must be positive")
    if loss.advantage == "gae" and loss.turn_discount != 1:
        raise ConfigError(
            f"loss.turn_discount={loss.turn_discount} with loss.advantage=gae would discount twice: set "
            "loss.value.step=turn and loss.value.gamma instead"
        )


def _check_kl(loss: LossConfig) -> None:
    kl = loss.kl
    if not 0 <= kl.coefficient < math.inf:
        raise ConfigError(f"loss.kl.coefficient={kl.coefficient}: must be at least 0 and finite")
    if not kl.ratio_cap > 0:
        raise ConfigError(f"loss.kl.ratio_cap={kl.ratio_cap}: must be positive")
    if kl.coefficient and not kl.reference:
        raise ConfigError(
            f"loss.kl.coefficient={kl.coefficient:g} is a KL term without a reference policy: set "
            "loss.kl.reference=initial (a frozen copy of the start) or a checkpoint folder, or loss.kl.coefficient=0"
        )
    if kl.serve == "engine" and not kl.reference:
        raise ConfigError(
            "loss.kl.serve=engine has no reference policy to serve: set loss.kl.reference=initial or a folder with a "
            "checkpoint"
        )
    if kl.reference not in ("", "initial") and not (Path(kl.reference) / "config.json").is_file():
        raise ConfigError(
            f"loss.kl.reference={kl.reference}: expected initial, or a folder with a transformers checkpoint "
            "(there is no config.json in it)"
        )
    if kl.reference and not kl.coefficient:
        raise ConfigError(
            f"loss.kl.reference={kl.reference} holds a second model that loss.kl.coefficient=0 never uses: set a "
            "coefficient, or loss.kl.reference=''"
        )


def _check_steering(config: Config) -> None:
    target = config.staleness.target_ess
    if not 0 <= target < 1:
        raise ConfigError(
            f"staleness.target_ess={target}: must lie in [0, 1), 0 switches it off; 0.9 is a usual target"
        )
    if target and config.buffer.epochs_per_group > 1:
        raise ConfigError(
            f"staleness.target_ess={target} counts each group once, buffer.epochs_per_group="
            f"{config.buffer.epochs_per_group} uses it more often; set one of the two back"
        )
    if target and not config.max_lag:
        raise ConfigError(
            f"staleness.target_ess={target} steers how far behind tokens may be, and max_lag=0 leaves no room"
        )


def _check_corrections(loss: LossConfig) -> None:
    correction = loss.correction
    for key in ("weight_cap", "reject_high", "max_k3", "veto_high", "opsm"):
        if not getattr(correction, key) > 0:
            raise ConfigError(
                f"loss.correction.{key}={getattr(correction, key)}: must be positive; .inf switches it off"
            )
    for low, high in (("reject_low", "reject_high"), ("veto_low", "veto_high")):
        smallest, largest = getattr(correction, low), getattr(correction, high)
        if not 0 <= smallest < largest:
            raise ConfigError(
                f"loss.correction.{low}={smallest}, loss.correction.{high}={largest}: expected 0 ≤ low < high"
            )
    if correction.reject == "none" and (correction.reject_low > 0 or correction.reject_high < math.inf):
        raise ConfigError(
            "loss.correction.reject_low and reject_high act with loss.correction.reject=token, sequence or geometric"
        )
    if correction.reject != "none" and correction.reject_low == 0 and correction.reject_high == math.inf:
        raise ConfigError(f"loss.correction.reject={correction.reject} drops nothing: set reject_low or reject_high")
    if correction.weight == "none":
        if correction.weight_cap < math.inf:
            raise ConfigError(
                "loss.correction.weight_cap acts with loss.correction.weight=token, sequence or geometric"
            )
        return
    ratio = OBJECTIVES[loss.name].ratio if loss.name in OBJECTIVES else Ratio.UPDATE
    if ratio in (Ratio.WHOLE, Ratio.DECOUPLED):
        raise ConfigError(
            f"loss.correction.weight={correction.weight} with loss.name={loss.name} would count proximal/behaviour "
            "twice: that loss weighs by it already; set loss.correction.weight=none"
        )
    if ratio is Ratio.UPDATE and loss.proximal != "recompute":
        raise ConfigError(
            f"loss.correction.weight={correction.weight} with loss.proximal=behaviour would count current/behaviour "
            "twice: set loss.proximal=recompute, or loss.correction.weight=none"
        )
