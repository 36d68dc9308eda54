"""The gate as a state machine: reports in, questions to the trainer out, one verdict at the end. No I/O."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from streamrl.errors import ParityError
from streamrl.parity.compare import limits_of
from streamrl.parity.evidence import Evidence, Pair
from streamrl.parity.judge import judge, needs_alternatives
from streamrl.parity.records import REHEARSED, SAMPLED, SCORED, Asked, EngineReport, Row, Semantics, TrainerReport
from streamrl.parity.semantics import alternatives, prompt_alternatives
from streamrl.parity.verdict import Verdict
from streamrl.schema import Config

Key = tuple[str, int, Semantics]
"""Engine, number of its row, rule."""


@dataclass
class _Question:
    keys: list[Key] = field(default_factory=list)
    rows: list[Asked] = field(default_factory=list)

    def add(self, engine: str, index: int, row: Row, rule: Semantics) -> None:
        self.keys.append((engine, index, rule))
        self.rows.append(Asked(row.tokens, rule, row.part == REHEARSED))


class ParityGate:
    """``add`` each engine's report, ``ask`` the trainer once all are there, ``answer`` until there is a verdict."""

    def __init__(self, config: Config) -> None:
        self._temperature = config.sampling.temperature
        self._rms = config.parity.rms
        self._reports: dict[str, EngineReport] = {}
        self._asked: _Question | None = None
        self._scores: dict[Key, np.ndarray] = {}
        self.verdict: Verdict | None = None

    def add(self, engine: str, report: EngineReport) -> None:
        """Of two reports of one engine the newer counts, as long as the trainer was not asked.

        Raises ``ParityError`` for a row whose parts do not fit each other.
        """
        if self._asked is None:
            for row in report.rows:
                _check(engine, row)
            self._reports[engine] = report

    def ask(self, engines: Collection[str]) -> list[Asked] | None:
        """All rows as configured, once, when every one of ``engines`` has reported; else None."""
        if self._asked is not None or not engines or not self._reports.keys() >= set(engines):
            return None
        self._reports = {name: self._reports[name] for name in engines}
        self._asked = _Question()
        for name, report in self._reports.items():
            for index, row in enumerate(report.rows):
                self._asked.add(name, index, row, row.semantics)
        return self._asked.rows

    def answer(self, trainer: TrainerReport) -> list[Asked] | Verdict:
        """The verdict, or what the trainer has to score as well before there is one."""
        assert self._asked is not None and len(trainer.rows) == len(self._asked.keys), "an answer to another question"
        for key, scores in zip(self._asked.keys, trainer.rows, strict=True):
            start = self._reports[key[0]].rows[key[1]].start
            self._scores[key] = np.asarray(scores)[start:]
        every = [self._evidence(name, trainer.facts.dtype) for name in self._reports]
        if more := self._further(every):
            self._asked = more
            return more.rows
        self.verdict = judge(every, trainer.facts)
        return self.verdict

    def _further(self, every: list[Evidence]) -> _Question | None:
        """The rules that may explain the first engine that differs, once."""
        if any(key[2] != self._reports[key[0]].rows[key[1]].semantics for key in self._scores):
            return None
        question = _Question()
        for evidence in (each for each in every if needs_alternatives(each)):
            for index, row in enumerate(evidence.report.rows):
                rules = {SAMPLED: alternatives, SCORED: prompt_alternatives}.get(row.part)
                for rule in rules(row.semantics) if rules else []:
                    question.add(evidence.engine, index, row, rule)
            return question
        return None

    def _evidence(self, engine: str, dtype: str) -> Evidence:
        report = self._reports[engine]
        pairs = [Pair(row, {}) for row in report.rows]
        for (name, index, rule), scores in self._scores.items():
            if name == engine:
                pairs[index].trainer[rule] = scores
        return Evidence(engine, report, pairs, limits_of(dtype, self._rms).scaled(self._temperature))


def _check(engine: str, row: Row) -> None:
    count, labelled = len(row.tokens) - row.start, sum(count for _, count in row.versions)
    if len(row.logprobs) != count or (row.labelled and labelled != count):
        raise ParityError(
            f"{engine}: {row.part}: expected a log-prob and a version for each of {count} tokens, got "
            f"{len(row.logprobs)} log-probs and {labelled} versions: the engine's generate or score is broken"
        )
