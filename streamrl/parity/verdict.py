"""What the gates say: plain data, and how it is kept in ``summary.json`` and events."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from streamrl.parity.compare import Comparison, Limits
from streamrl.parity.evidence import Evidence
from streamrl.parity.records import TrainerFacts
from streamrl.parity.semantics import Cause


@dataclass(frozen=True)
class Measured:
    """One line of the table: what was compared, by the engine where it is worst."""

    what: str
    engine: str
    comparison: Comparison
    limits: Limits
    worst: str
    """The worst token in its context."""


@dataclass(frozen=True)
class GateVerdict:
    name: str
    passed: bool
    measured: list[Measured]
    cause: Cause | None = None
    engine: str = ""
    """Whose fault it is, where it is one engine's."""
    judged: bool = True
    """False where another gate explains what is seen."""

    @property
    def word(self) -> str:
        """``passed``, ``failed`` or ``not judged``."""
        return "failed" if not self.passed else "passed" if self.judged else "not judged"

    @property
    def worst(self) -> Measured:
        """The line with the largest rms."""
        return max(self.measured, key=lambda line: size(line.comparison))


@dataclass(frozen=True)
class Verdict:
    """What the three gates say."""

    gates: list[GateVerdict]
    engines: list[str]
    facts: dict[str, str]
    """How each side really computes, one line each; engines that are alike share one."""
    warnings: list[str] = field(default_factory=list)

    @property
    def failed(self) -> list[GateVerdict]:
        return [gate for gate in self.gates if not gate.passed]

    @property
    def passed(self) -> bool:
        return not self.failed


def size(comparison: Comparison) -> float:
    """Its rms; NaN is larger than any number."""
    return math.inf if math.isnan(comparison.rms) else comparison.rms


def facts_of(every: Sequence[Evidence], trainer: TrainerFacts) -> dict[str, str]:
    lines: dict[str, list[str]] = {}
    for each in every:
        facts = each.report.facts
        switches = {
            "prefix caching": facts.prefix_caching,
            "async scheduling": facts.async_scheduling,
            "cascade attention": facts.cascade_attention,
            "chunked prefill": facts.chunked_prefill,
        }
        on = [name for name, value in switches.items() if value]
        line = (
            f"{facts.engine}, body {facts.dtype}, head {facts.head_dtype}{' (tied)' if facts.tied else ''}, "
            f"{facts.logprobs} log-probs, kv {facts.kv}, {', '.join(on) + ' on' if on else 'no caching or async paths'}"
        )
        lines.setdefault(line, []).append(each.engine)
    own = f"body {trainer.dtype}, head {trainer.head_dtype}{' (tied)' if trainer.tied else ''}"
    return {_joined(names): line for line, names in lines.items()} | {"trainer": own}


def warnings_of(every: Sequence[Evidence]) -> list[str]:
    found: dict[str, list[str]] = {}
    for each in every:
        facts = each.report.facts
        if facts.async_scheduling:
            line = "async scheduling is on: version labels may come a token late; engine.async_scheduling=false"
            found.setdefault(line, []).append(each.engine)
        if facts.cascade_attention:
            line = "cascade attention is on: it sums in another order; take it out of engine.args"
            found.setdefault(line, []).append(each.engine)
        for note in each.report.notes:
            found.setdefault(note, []).append(each.engine)
    return [f"{_joined(names)}: {line}" for line, names in found.items()]


def _joined(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]} … {names[-1]} ({len(names)})"


def summary_of(verdict: Verdict) -> dict[str, Mapping[str, object]]:
    """What ``summary.json`` and events keep: each gate's numbers over its worst part, None for NaN and infinity."""
    found: dict[str, Mapping[str, object]] = {}
    for gate in verdict.gates:
        worst = gate.worst
        numbers = {name: value if math.isfinite(value) else None for name, value in asdict(worst.comparison).items()}
        found[gate.name] = {
            "passed": gate.passed,
            "verdict": gate.word.replace(" ", "_"),
            "tokens": sum(line.comparison.tokens for line in gate.measured),
            **{name: numbers[name] for name in ("offset", "rms", "p999", "max", "k3")},
            "limit": worst.limits.rms,
            "engine": gate.engine or worst.engine,
            "cause": gate.cause.text if gate.cause else "",
            "setting": gate.cause.setting if gate.cause else "",
        }
    return found
