"""What is known of one engine: its rows, and the trainer's log-probs of the same tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from streamrl.parity.compare import Comparison, Limits, compare
from streamrl.parity.records import EngineReport, Row, Semantics
from streamrl.types import expand_versions

CONTEXT = 12
"""Tokens before the worst one that a table shows."""


@dataclass(frozen=True)
class Pair:
    """A row of one engine, and the trainer's log-probs of the same tokens under each rule that was asked for."""

    row: Row
    trainer: dict[Semantics, np.ndarray]
    """float ``[len(tokens) − start]``; ``row.semantics`` is always there."""

    @property
    def engine(self) -> np.ndarray:
        return np.asarray(self.row.logprobs)

    @property
    def configured(self) -> np.ndarray:
        return self.trainer[self.row.semantics]

    @property
    def current(self) -> np.ndarray:
        """bool: which tokens are labelled with the version under test, or were scored under it."""
        if not self.row.versions:
            return np.ones(len(self.row.logprobs), dtype=bool)
        return expand_versions(self.row.versions) >= 0


@dataclass(frozen=True)
class Evidence:
    """All that is known of one engine."""

    engine: str
    report: EngineReport
    pairs: list[Pair]
    limits: Limits

    def part(self, *names: str) -> list[Pair]:
        return [pair for pair in self.pairs if pair.row.part in names]

    def compare(self, *names: str) -> Comparison:
        """Of the tokens of these parts that carry the version under test."""
        pairs = self.part(*names)
        empty = [np.zeros(0)]
        return compare(
            np.concatenate([pair.engine[pair.current] for pair in pairs] or empty),
            np.concatenate([pair.configured[pair.current] for pair in pairs] or empty),
        )

    def differs(self, *names: str) -> bool:
        return bool(self.compare(*names).exceeded(self.limits))


def context(evidence: Evidence, parts: tuple[str, ...], index: int) -> str:
    """``…2+3=[5] …: engine −0.10, trainer −2.30``: token number ``index`` of the parts, counted as in ``compare``.

    Empty for −1, where there was none to compare.
    """
    if index < 0:
        return ""
    texts = evidence.report.texts
    for pair in evidence.part(*parts):
        positions = np.flatnonzero(pair.current)
        if index < len(positions):
            place = int(positions[index])
            at = pair.row.start + place
            before = "".join(texts.get(token, f"<{token}>") for token in pair.row.tokens[max(0, at - CONTEXT) : at])
            own = texts.get(pair.row.tokens[at], f"<{pair.row.tokens[at]}>")
            dots = "…" if at > CONTEXT else ""
            before, own = before.replace("\n", "⏎"), own.replace("\n", "⏎")
            return (
                f"{dots}{before}[{own}] (token {at} of {len(pair.row.tokens)}, id {pair.row.tokens[at]}): "
                f"engine {pair.engine[place]:.4f}, trainer {pair.configured[place]:.4f}"
            )
        index -= len(positions)
    return ""
