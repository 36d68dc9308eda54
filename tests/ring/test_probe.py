"""The parity gate's verdict."""

from __future__ import annotations

import math

from streamrl.actors.probe import ParityGate
from streamrl.runtime.messages import Scored

ENGINES = ["rollouter-0", "rollouter-1"]


def verdict(first: list[float], second: list[float]):
    gate = ParityGate("float32")
    assert gate.add("rollouter-0", Scored(version=0, logprobs=first), ENGINES) is None
    assert gate.add("trainer-0", Scored(version=0, logprobs=[-1.0, -2.0]), ENGINES) is None
    return gate.add("rollouter-1", Scored(version=0, logprobs=second), ENGINES)


def test_engines_that_agree_with_the_trainer_pass():
    passed = verdict([-1.0, -2.00001], [-1.0, -2.0])
    assert passed.passed
    assert math.isclose(passed.max, 1e-5, rel_tol=1e-3)
    assert math.isclose(passed.rms, 1e-5 / math.sqrt(2), rel_tol=1e-3)


def test_one_engine_that_is_off_fails_the_gate():
    assert not verdict([-1.0, -2.0], [-1.0, -2.01]).passed


def test_a_nan_of_any_engine_fails_the_gate():
    assert not verdict([-1.0, -2.0], [math.nan, -2.0]).passed
    assert not verdict([math.nan, -2.0], [-1.0, -2.0]).passed


def test_later_versions_are_not_judged():
    gate = ParityGate("float32")
    assert gate.add("trainer-0", Scored(version=1, logprobs=[-1.0]), []) is None
