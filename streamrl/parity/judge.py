"""From the log-probs of all engines and of the trainer to a verdict: semantics, then path, then numerics (C7).

A gate that fails names its cause. What an earlier gate explains is not held against a later one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from streamrl.parity.compare import Limits, compare
from streamrl.parity.evidence import Evidence, context
from streamrl.parity.records import IN_FLIGHT, REHEARSED, SAMPLED, SCORED, SHARED, EngineReport, TrainerFacts
from streamrl.parity.semantics import Cause, explain_prompts, explain_sampled
from streamrl.parity.verdict import GateVerdict, Measured, Verdict, facts_of, size, warnings_of

EVERY_PART = (SCORED, SAMPLED, SHARED, IN_FLIGHT)
UNDER_ADAPTERS = 2.0
"""How far engine and trainer may be apart under adapters that were perturbed, in limits of the others: logits grow."""
BOUNDARY = 2
"""Tokens at a boundary that a wrong label explains; more of them mean wrong keys and values."""


def needs_alternatives(evidence: Evidence) -> bool:
    """Whether only more scores can tell what is wrong: it is not the weights."""
    return not evidence.report.weights and evidence.differs(SAMPLED, SCORED)


def judge(every: Sequence[Evidence], trainer: TrainerFacts) -> Verdict:
    """The verdict on all engines. Rows that differ were asked again under the rules of ``semantics.py``."""
    semantics = _gate("semantics", every, ((SAMPLED,), (SCORED,)), _semantics)
    adapters = ((REHEARSED,),) if any(each.part(REHEARSED) for each in every) else ()
    path = _gate("path", every, ((SHARED,), (IN_FLIGHT,), *adapters), _path)
    numerics = _gate("numerics", every, (EVERY_PART,), lambda evidence: _facts_differ(evidence.report, trainer))
    if semantics.passed and path.passed and numerics.passed:
        numerics = _gate("numerics", every, (EVERY_PART,), _unexplained)
    gates = [semantics, path, numerics]
    if not all(gate.passed for gate in gates):
        gates = [replace(gate, judged=not gate.passed or not _any_over(gate)) for gate in gates]
    return Verdict(gates, [each.engine for each in every], facts_of(every, trainer), warnings_of(every))


def _gate(
    name: str, every: Sequence[Evidence], lines: Sequence[tuple[str, ...]], find: Callable[[Evidence], Cause | None]
) -> GateVerdict:
    measured = [_measured(parts, every) for parts in lines]
    for evidence in every:
        if (cause := find(evidence)) is not None:
            return GateVerdict(name, False, measured, cause, evidence.engine)
    return GateVerdict(name, True, measured)


def _any_over(gate: GateVerdict) -> bool:
    return any(line.comparison.exceeded(line.limits) for line in gate.measured)


def _measured(parts: tuple[str, ...], every: Sequence[Evidence]) -> Measured:
    """Of the engine where the rms is largest."""
    compared = [(each, each.compare(*parts)) for each in every]
    worst, comparison = max(compared, key=lambda pair: size(pair[1]))
    what = parts[0] if len(parts) == 1 else "all tokens"
    limits = _adapter_limits(worst) if parts == (REHEARSED,) else worst.limits
    return Measured(what, worst.engine, comparison, limits, context(worst, parts, comparison.worst))


# Semantics ------------------------------------------------------------------------------------------------------------


def _semantics(evidence: Evidence) -> Cause | None:
    if evidence.report.weights:
        return None  # wrong weights are the path's, and no rule explains them
    if silent := _silent(evidence):
        return silent
    for part, explain in ((SAMPLED, explain_sampled), (SCORED, explain_prompts)):
        pairs = evidence.part(part)
        if not evidence.differs(part):
            continue
        engine = np.concatenate([pair.engine for pair in pairs])
        rules = set.intersection(*(set(pair.trainer) for pair in pairs))
        if len(rules) == 1:
            return None  # another engine differs too, and was asked about first
        scores = {rule: np.concatenate([pair.trainer[rule] for pair in pairs]) for rule in rules}
        cause = explain(engine, scores, pairs[0].row.semantics, evidence.limits)
        if cause is not None:
            return cause
    if evidence.differs(SAMPLED) and not evidence.differs(SCORED):
        return Cause(
            "the engine's log-probs of sampled tokens follow no known rule, while its prompt log-probs are right",
            "whatever in engine.args changes sampling (penalties, logit processors, speculative decoding)",
        )
    return None


def _silent(evidence: Evidence) -> Cause | None:
    """A comparison of nothing must pass no gate."""
    for part in dict.fromkeys(pair.row.part for pair in evidence.pairs) or (SCORED,):
        if not any(len(pair.engine) for pair in evidence.part(part)):
            return Cause(
                f"nothing to compare: the engine answered the part {part!r} of the probe without a single token",
                "what ends answers before their first token, in engine.args or the model's generation_config.json",
            )
    return None


# Path -----------------------------------------------------------------------------------------------------------------


def _path(evidence: Evidence) -> Cause | None:
    report = evidence.report
    if report.weights:
        return Cause(report.weights, "the engine's load (engine.name), and sync.*: what was sent was verified")
    return (
        _unadapted(evidence)
        or _mislabelled(evidence)
        or _behind(evidence)
        or _stale_prefix(evidence)
        or _overtaken(evidence)
    )


def _unadapted(evidence: Evidence) -> Cause | None:
    """Scores under adapters that are not 0, where those of version 0 are right."""
    pairs = evidence.part(REHEARSED)
    if not pairs or evidence.differs(SCORED):
        return None
    over = evidence.compare(REHEARSED).exceeded(_adapter_limits(evidence))
    if not over:
        return None
    base = np.concatenate([pair.engine for pair in evidence.part(SCORED)])
    if not compare(np.concatenate([pair.engine for pair in pairs]), base).exceeded(evidence.limits):
        return Cause(
            "the adapters have no effect: under any of them the engine scores as the base does",
            "the engine's load (engine.name): its requests must go through the adapters that it was given",
        )
    return Cause(
        f"the engine computes something else with adapters than the trainer ({', '.join(over)}), and the same without: "
        "layers are mixed up, or the scale alpha/rank differs",
        "model.lora.*, and nothing in engine.args that changes adapters",
    )


def _adapter_limits(evidence: Evidence) -> Limits:
    return evidence.limits.times(UNDER_ADAPTERS)


def _mislabelled(evidence: Evidence) -> Cause | None:
    labels = {version for pair in evidence.part(SHARED, SAMPLED) for version, _ in pair.row.versions}
    if labels <= {0}:
        return None
    return Cause(
        f"tokens sampled after the update carry version {min(labels)} of before it: labels come late",
        "engine.async_scheduling=false",
    )


def _behind(evidence: Evidence) -> Cause | None:
    before, pairs = evidence.report.before, evidence.part(SCORED)
    if not before or not evidence.differs(SCORED):
        return None
    old = np.concatenate([np.asarray(row) for row in before])
    if not compare(np.concatenate([pair.engine for pair in pairs]), old).rms <= evidence.limits.rms:
        return None  # NaN is like nothing, itself included
    return Cause(
        "the weights are one version behind: the engine scores as it did before the update",
        "the engine's load (engine.name): it must change the weights that serve",
    )


def _stale_prefix(evidence: Evidence) -> Cause | None:
    if evidence.differs(SAMPLED) or not evidence.differs(SHARED):
        return None
    return Cause(
        "a prefix cache is stale across a weight update: prompts that were cached before it give other log-probs, "
        "fresh prompts the right ones",
        "engine.prefix_caching=false (or a cache salt of the version with every request)",
    )


def _overtaken(evidence: Evidence) -> Cause | None:
    """Requests in flight across the update: their labels, then what they keep."""
    pairs = [pair for pair in evidence.part(IN_FLIGHT) if pair.current.any()]
    if evidence.differs(SAMPLED) or not pairs:
        return None
    limit = evidence.limits.max
    bad = [~(np.abs(pair.engine - pair.configured) <= limit) for pair in pairs]
    after = [wrong[pair.current] for wrong, pair in zip(bad, pairs, strict=True)]
    if any(wrong.any() for wrong in after):
        if all(not wrong[BOUNDARY:].any() for wrong in after):
            return Cause(
                "labels are off by one: the first tokens labelled with the new version were sampled by the old one",
                "engine.async_scheduling=false",
            )
        kv = evidence.report.facts.kv
        return Cause(
            "wrong keys and values after resume: requests in flight do not sample by the new weights "
            + ("over the keys and values that they keep" if kv == "keep" else "over recomputed keys and values"),
            f"engine.kv={'recompute' if kv == 'keep' else 'keep'}",
        )
    stale = [wrong[~pair.current] for wrong, pair in zip(bad, pairs, strict=True)]
    if all(len(old) > BOUNDARY and not old[-1] and np.mean(old[:-BOUNDARY]) > 0.5 for old in stale):
        return Cause(
            "labels are off by one: the last tokens labelled with the old version were sampled by the new one",
            "engine.async_scheduling=false",
        )
    return None


# Numerics -------------------------------------------------------------------------------------------------------------


def _facts_differ(report: EngineReport, trainer: TrainerFacts) -> Cause | None:
    """One-sided numerics are refused whatever the numbers say: they grow with the model's logits."""
    facts = report.facts
    if facts.head_dtype != trainer.head_dtype:
        return Cause(
            f"the head multiplies in different dtypes: {facts.head_dtype} in the engine, {trainer.head_dtype} in the "
            f"trainer ({'tied to' if trainer.tied else 'not tied to'} the embedding)",
            "model.head_dtype=float32, and nothing in engine.args that sets the head's dtype",
        )
    if facts.dtype != trainer.dtype:
        return Cause(
            f"the body computes in different dtypes: {facts.dtype} in the engine, {trainer.dtype} in the trainer",
            "model.dtype, and nothing in engine.args that sets another one",
        )
    if facts.tied != trainer.tied:
        return Cause(
            f"head and embedding are {'one parameter' if facts.tied else 'two parameters'} in the engine and "
            f"{'one' if trainer.tied else 'two'} in the trainer",
            "tie_word_embeddings in the model's config.json",
        )
    return None


def _unexplained(evidence: Evidence) -> Cause | None:
    over = evidence.compare(*EVERY_PART).exceeded(evidence.limits)
    if not over:
        return None
    return Cause(
        f"engine and trainer differ by more than rounding: {', '.join(over)}, and nothing that is known explains it",
        "model.dtype=float32 (to tell rounding from wrong weights), then engine.args (attention backend, quantisation)",
    )
