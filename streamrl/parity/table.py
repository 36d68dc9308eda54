"""The gate's verdict for people: a few lines when it passed, the whole table otherwise, one line when a run ends."""

from __future__ import annotations

from rich.box import SIMPLE
from rich.console import Group
from rich.table import Table
from rich.text import Text

from streamrl.parity.compare import Limits
from streamrl.parity.verdict import GateVerdict, Measured, Verdict

NUMBERS = ("offset", "rms", "p999", "max", "k3")


def short(verdict: Verdict) -> list[str]:
    """One line of all gates, then what is worth a warning."""
    gates = ", ".join(f"{gate.name} {gate.word} (rms {gate.worst.comparison.rms:.1e})" for gate in verdict.gates)
    limit = verdict.gates[-1].worst.limits.rms
    count = f"{len(verdict.engines)} engine{'s' if len(verdict.engines) > 1 else ''}"
    return [f"parity of {count} with the trainer: {gates}; limit {limit:.0e}", *_warned(verdict)]


def reason(verdict: Verdict) -> str:
    """Why nothing is trained, in one line."""
    gate = verdict.failed[0]
    assert gate.cause is not None
    worst = gate.worst
    numbers = f"rms {worst.comparison.rms:.1e}, limit {worst.limits.rms:.0e}"
    return (
        f"parity gate {gate.name} failed: {gate.engine}: {gate.cause.text} ({numbers}); change: {gate.cause.setting}; "
        "parity=warn trains all the same"
    )


def full(verdict: Verdict) -> Group:
    """Gate by gate: what was compared, the numbers, the limits, the worst token, the verdict and what changes it."""
    table = Table(title="parity of engines and trainer: nats, engine − trainer", title_justify="left", box=SIMPLE)
    for heading in ("gate", "compared"):
        table.add_column(heading)
    for heading in ("tokens", "offset", "rms", "p99.9", "max", "k3"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for gate in verdict.gates:
        for line in gate.measured:
            first = line is gate.measured[0]
            word = Text(gate.word, _colour(gate)) if first else Text("")
            table.add_row(gate.name if first else "", line.what, str(line.comparison.tokens), *_numbers(line), word)
        table.add_section()
    table.add_row("", "limit", "", "", *_limits(verdict.gates[-1].measured[0].limits), "")
    lines = [Text(f"{name}: {line}") for name, line in verdict.facts.items()]
    for gate in verdict.gates:
        lines += [Text(line, _colour(gate)) for line in _details(gate)]
    return Group(table, *lines, *(Text(line, "yellow") for line in _warned(verdict)))


def _details(gate: GateVerdict) -> list[str]:
    worst = gate.worst
    lines = [f"{gate.name}, worst token, of {worst.engine}: {worst.worst}"] if worst.worst else []
    if gate.cause is not None:
        lines += [f"{gate.name} failed: {gate.engine}: {gate.cause.text}", f"  change: {gate.cause.setting}"]
    return lines


def _numbers(line: Measured) -> list[str]:
    if not line.comparison.tokens:
        return ["–"] * len(NUMBERS)
    return [f"{getattr(line.comparison, name):.1e}" for name in NUMBERS]


def _limits(limits: Limits) -> list[str]:
    return [f"{getattr(limits, name):.0e}" for name in NUMBERS[1:]]


def _colour(gate: GateVerdict) -> str:
    return "red" if not gate.passed else "green" if gate.judged else "dim"


def _warned(verdict: Verdict) -> list[str]:
    return [f"parity: warning: {line}" for line in verdict.warnings]
