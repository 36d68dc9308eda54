"""The gate as a state machine: whom it waits for, whose word counts, and what it refuses to compare."""

from __future__ import annotations

import pytest
from parity_support import settings

from streamrl.errors import ParityError
from streamrl.parity.gate import ParityGate
from streamrl.parity.records import SAMPLED, SCORED, EngineReport, Row, Semantics, TrainerFacts, TrainerReport
from streamrl.parity.verdict import Verdict
from streamrl.ports import EngineFacts

FACTS = EngineFacts(engine="test", dtype="float32", head_dtype="float32", tied=False, logprobs="processed")
TRAINER = TrainerFacts("float32", "float32", False)


def report(*logprobs: float) -> EngineReport:
    tokens = list(range(len(logprobs) + 1))
    return EngineReport(FACTS, [Row(SCORED, tokens, 1, list(logprobs), Semantics())])


def answered(gate: ParityGate, rows: int, *logprobs: float) -> Verdict:
    found = gate.answer(TrainerReport([[0.0, *logprobs]] * rows, TRAINER))
    assert isinstance(found, Verdict)
    return found


def test_the_trainer_is_asked_once_and_when_every_engine_has_reported() -> None:
    gate = ParityGate(settings())
    gate.add("a", report(-1.0, -2.0))
    assert gate.ask(["a", "b"]) is None
    gate.add("b", report(-1.0, -2.0))
    assert gate.ask(["a", "b"]) is not None
    assert gate.ask(["a", "b"]) is None
    verdict = answered(gate, 2, -1.0, -2.0)
    assert verdict.passed
    assert verdict.engines == ["a", "b"]


def test_nobody_to_ask_is_no_verdict() -> None:
    assert ParityGate(settings()).ask([]) is None


def test_of_an_engine_that_was_replaced_the_newer_report_counts() -> None:
    gate = ParityGate(settings())
    gate.add("a", report(-9.0, -9.0))
    gate.add("a", report(-1.0, -2.0))
    assert gate.ask(["a"]) is not None
    assert answered(gate, 1, -1.0, -2.0).passed


def test_a_report_that_comes_after_the_question_changes_nothing() -> None:
    gate = ParityGate(settings())
    gate.add("a", report(-1.0, -2.0))
    gate.ask(["a"])
    gate.add("a", report(-9.0, -9.0))
    assert answered(gate, 1, -1.0, -2.0).passed


def test_an_engine_without_a_single_row_does_not_pass() -> None:
    gate = ParityGate(settings())
    gate.add("a", EngineReport(FACTS, []))
    assert gate.ask(["a"]) == []
    (failed,) = answered(gate, 0).failed
    assert failed.cause is not None
    assert failed.cause.text.startswith("nothing to compare")


@pytest.mark.parametrize(
    ("logprobs", "versions", "said"),
    [
        ([-1.0], [(0, 2)], "1 log-probs and 2 versions"),
        ([-1.0, -2.0], [(0, 1)], "2 log-probs and 1 versions"),
        ([-1.0, -2.0], [], "2 log-probs and 0 versions"),
    ],
)
def test_rows_whose_parts_do_not_fit_are_refused(
    logprobs: list[float], versions: list[tuple[int, int]], said: str
) -> None:
    row = Row(SAMPLED, [5, 6, 7], 1, logprobs, Semantics(), versions)
    with pytest.raises(
        ParityError, match=f"a: sampled: expected a log-prob and a version for each of 2 tokens.*{said}"
    ):
        ParityGate(settings()).add("a", EngineReport(FACTS, [row]))


def test_the_limit_is_the_runs_own_where_it_gives_one() -> None:
    config = settings()
    config.parity.rms = 2e-3
    for logprob, passed in ((-1.001, True), (-1.003, False)):
        gate = ParityGate(config)
        gate.add("a", report(-1.0))
        gate.ask(["a"])
        found = gate.answer(TrainerReport([[0.0, logprob]], TRAINER))
        assert isinstance(found, Verdict) == passed
