"""The trainer's side of the gate: many rows in one pass, each by its own rule, and how the pass was computed."""

from __future__ import annotations

import numpy as np
import pytest
from parity_support import VOCABULARY, Trainer, build, settings

from streamrl.parity.records import Asked, Semantics, TrainerFacts
from streamrl.policy.parity import answer


def rows() -> list[list[int]]:
    generator = np.random.default_rng(3)
    return [generator.integers(0, VOCABULARY, size=length).tolist() for length in (7, 1, 30, 2, 0, 19, 30)]


@pytest.mark.parametrize("token_budget", [16384, 32, 2])
def test_rows_that_share_a_pass_get_the_scores_that_they_get_alone(token_budget: int) -> None:
    config = settings()
    config.trainer.token_budget = token_budget
    learner = Trainer(config, build())
    for row, found in zip(rows(), learner.score_all(rows(), 0.7), strict=True):
        assert found.shape == (len(row),)
        assert found == pytest.approx(learner.score(row, 0.7), abs=1e-5)


def test_each_row_is_answered_in_its_place_by_the_rule_that_it_was_asked_for() -> None:
    learner = Trainer(settings(), build())
    rules = [
        Semantics(),
        Semantics(0.5),
        Semantics(),
        Semantics(0.5, top_k=3),
        Semantics(0.5),
        Semantics(),
        Semantics(),
    ]
    found = answer(learner, [Asked(row, rule) for row, rule in zip(rows(), rules, strict=True)])
    for row, rule, scores in zip(rows(), rules, found.rows, strict=True):
        if not rule.truncated:
            assert scores == pytest.approx(learner.score(row, rule.temperature).tolist(), abs=1e-5)
    truncated, whole = found.rows[3][1], learner.score(rows()[3], 0.5)[1]
    assert truncated > whole, "renormalised over three tokens and the one that was sampled"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("dtype", "head"), [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")])
def test_the_facts_are_those_of_a_forward_pass(tied: bool, dtype: str, head: str) -> None:
    config = settings()
    config.model.dtype, config.model.head_dtype = dtype, head
    assert answer(Trainer(config, build(tied)), []).facts == TrainerFacts(dtype, head, tied)
