"""The semantics gate: by which rule did an engine make the log-probs that it returned?

When they are not what the run's settings say, the trainer scores the same tokens under every rule that is a known
mistake. The rule that fits names the cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from streamrl.parity.compare import Limits, compare
from streamrl.parity.records import Semantics

COMMON = ((0, 0.95), (0, 0.9), (0, 0.8), (0, 0.7), (20, 1.0), (50, 1.0), (20, 0.95), (20, 0.8), (50, 0.95))
"""(top_k, top_p) that model cards recommend, and engines take from a model's generation_config.json unasked."""
TEMPERATURES = (1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.2, 1.5)
"""Likewise."""

Scores = Mapping[Semantics, np.ndarray]
"""The trainer's log-probs of the tokens in question, float ``[N]``, by rule."""


@dataclass(frozen=True)
class Cause:
    """Why a gate failed, and what changes it."""

    text: str
    setting: str


def alternatives(configured: Semantics) -> list[Semantics]:
    """Rules that a sampler may have followed instead of ``configured``, the likeliest first."""
    temperature = configured.temperature
    rules = [Semantics(), configured.whole(), configured.at(1.0), configured.at(temperature**2)]
    rules += [Semantics(temperature, top_k, top_p) for top_k, top_p in COMMON]
    rules += [configured.at(other) for other in TEMPERATURES]
    return [rule for rule in dict.fromkeys(rules) if rule != configured]


def prompt_alternatives(asked: Semantics) -> list[Semantics]:
    """Rules of prompt log-probs, which are never truncated."""
    temperatures = dict.fromkeys((1.0, asked.temperature**2, *TEMPERATURES))
    return [Semantics(each) for each in temperatures if each != asked.temperature]


def explain_sampled(engine: np.ndarray, scores: Scores, configured: Semantics, limits: Limits) -> Cause | None:
    """Why the engine's log-probs of the tokens that it sampled are not those of ``configured``; None: no rule fits."""
    if deaf := _deaf_trainer(scores, configured):
        return deaf
    fits = [rule for rule in alternatives(configured) if _fits(engine, scores[rule], limits)]
    return _mistake(fits[0], configured, scores) if fits else _one_sided(engine, scores[configured], limits)


def explain_prompts(engine: np.ndarray, scores: Scores, asked: Semantics, limits: Limits) -> Cause | None:
    """Why the engine's prompt log-probs are not those at the temperature that it was asked for."""
    for rule in prompt_alternatives(asked):
        if _fits(engine, scores[rule], limits):
            return Cause(
                f"prompt log-probs at another temperature: asked for {asked.temperature:g}, got {rule.temperature:g}",
                "the engine's score must divide logits by the temperature (or raise ValueError, to be asked at 1)",
            )
    return None


def _fits(engine: np.ndarray, trainer: np.ndarray, limits: Limits) -> bool:
    return compare(engine, trainer).rms <= limits.rms


def _deaf_trainer(scores: Scores, configured: Semantics) -> Cause | None:
    """Where the trainer's own scores do not follow the settings, it is to blame."""
    own = scores[configured]
    if configured.truncated and np.array_equal(own, scores[configured.whole()]):
        return Cause(
            f"{configured.truncation()} not replayed by the trainer: its log-probs are the same without it",
            "sampling.top_k=0 sampling.top_p=1.0 sampling.min_p=0.0",
        )
    if configured.temperature != 1.0 and np.array_equal(own, scores[configured.at(1.0)]):
        return Cause(
            f"temperature applied on one side only: the trainer's log-probs are the same at "
            f"{configured.temperature:g} and at 1",
            "sampling.temperature=1.0",
        )
    return None


def _mistake(rule: Semantics, configured: Semantics, scores: Scores) -> Cause:
    """``rule`` fits instead of ``configured``."""
    temperature, cut = configured.temperature, configured.truncation()
    if rule == Semantics() and temperature != 1.0 and _sampled_at(scores, configured):
        return _raw(f"sampled at temperature {temperature:g}, returned at 1")
    if rule == Semantics() and temperature == 1.0:
        return _raw(f"not renormalised over what {cut} keeps")
    if rule == configured.whole() and configured.truncated:
        return _raw(f"temperature is in them, but they are not renormalised over what {cut} keeps")
    if rule.temperature != temperature:
        twice = rule.temperature == temperature**2 and rule.temperature != 1.0
        said = "twice by the engine" if twice else "on one side only"
        return Cause(
            f"temperature applied {said}: sampling.temperature={temperature:g}, and the engine's log-probs are "
            f"those at {rule.temperature:g}",
            f"sampling.temperature={rule.temperature:g}, or what in engine.args or the model's generation_config.json "
            "sets another one",
        )
    return Cause(
        f"{rule.truncation()} not replayed by the trainer: the engine truncates, the run's settings say "
        f"{cut or 'no truncation'}",
        " ".join(f"sampling.{part}" for part in rule.truncation().split())
        + ", or what in engine.args or the model's generation_config.json truncates",
    )


def _raw(how: str) -> Cause:
    return Cause(
        f"raw instead of processed log-probs: {how}",
        "processed log-probs in the engine (vLLM: logprobs_mode=processed_logprobs, which engine.args must not change)",
    )


def _sampled_at(scores: Scores, configured: Semantics) -> bool:
    """Whether the tokens are likelier under the configured temperature than under 1: then they were drawn with it."""
    return bool(np.sum(scores[configured.whole()] - scores[Semantics()]) > 0)


def _one_sided(engine: np.ndarray, trainer: np.ndarray, limits: Limits) -> Cause | None:
    """Log-probs over a part of the vocabulary lie above those over all of it, for every token."""
    difference = engine - trainer
    if not (np.all(np.isfinite(difference)) and difference.min() >= -limits.max and difference.mean() > limits.rms):
        return None
    return Cause(
        "truncated sampling not replayed by the trainer: every log-prob of the engine lies above the trainer's",
        "sampling.top_k, sampling.top_p and sampling.min_p as the engine has them",
    )
