"""The numbers of the gate against derivations by hand, and what counts as too much."""

from __future__ import annotations

import math

import numpy as np
import pytest

from streamrl.parity.compare import ENOUGH, LIMITS, Comparison, Limits, compare, limits_of


def test_each_number_of_a_comparison_follows_from_its_definition() -> None:
    found = compare(np.array([-1.0, -2.0, -3.0]), np.array([-1.1, -2.0, -2.8]))
    assert (found.tokens, found.worst) == (3, 2)
    assert found.offset == pytest.approx((0.1 + 0.0 - 0.2) / 3)
    assert found.rms == pytest.approx(math.sqrt((0.01 + 0.04) / 3))
    assert found.max == pytest.approx(0.2)
    assert found.p999 == pytest.approx(0.1 + 0.998 * 0.1)  # linear between the two largest of three
    ratios = [math.exp(-0.1), 1.0, math.exp(0.2)]
    assert found.k3 == pytest.approx(sum(ratio - 1 - math.log(ratio) for ratio in ratios) / 3)


def test_k3_is_half_the_squared_rms_while_differences_are_small() -> None:
    noise = np.random.default_rng(0).normal(scale=1e-3, size=10_000)
    found = compare(noise, np.zeros(10_000))
    assert found.k3 == pytest.approx(found.rms**2 / 2, rel=1e-2)


@pytest.mark.parametrize("broken", [math.nan, -math.inf])
def test_a_value_that_is_not_finite_is_over_every_limit_and_is_the_worst(broken: float) -> None:
    found = compare(np.array([-1.0, broken, -9.0]), np.array([-1.0, broken, -1.0]))
    assert found.worst == 1
    said = found.exceeded(Limits(1e9, 1e9, 1e9, 1e9))
    assert [line.split()[0] for line in said] == ["rms", "max", "k3"]


def test_no_token_at_all_is_no_difference() -> None:
    assert compare(np.zeros(0), np.zeros(0)) == Comparison(0, 0.0, 0.0, 0.0, 0.0, 0.0, -1)
    assert compare(np.zeros(0), np.zeros(0)).exceeded(LIMITS["float32"]) == []


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got \(2,\) and \(3,\)"):
        compare(np.zeros(2), np.zeros(3))


def test_what_is_over_its_limit_is_named_with_both_numbers() -> None:
    found = Comparison(tokens=10, offset=0.0, rms=0.031, p999=0.1, max=0.2, k3=5e-4, worst=0)
    assert found.exceeded(Limits(rms=0.01, p999=0.2, max=0.1, k3=1e-3)) == [
        "rms 3.1e-02 > 1e-02",
        "max 2.0e-01 > 1e-01",
    ]


@pytest.mark.parametrize(("tokens", "said"), [(ENOUGH - 1, []), (ENOUGH, ["p999 3.0e-01 > 2e-01"])])
def test_of_few_tokens_the_largest_difference_is_not_held_against_the_limit_of_the_many(
    tokens: int, said: list[str]
) -> None:
    found = Comparison(tokens=tokens, offset=0.0, rms=0.03, p999=0.3, max=0.3, k3=5e-4, worst=0)
    assert found.exceeded(LIMITS["bfloat16"]) == said


def test_a_run_can_say_how_far_its_engines_may_be_off() -> None:
    assert limits_of("float32") == LIMITS["float32"]
    found = limits_of("float32", rms=2e-3)
    assert [found.rms, found.p999, found.max, found.k3] == pytest.approx([2e-3, 1e-2, 2e-2, 4e-5])


def test_limits_grow_as_noise_does_when_logits_are_divided_by_a_small_temperature() -> None:
    limits = Limits(rms=0.05, p999=0.25, max=0.5, k3=2.5e-3)
    assert limits.scaled(0.5) == Limits(rms=0.1, p999=0.5, max=1.0, k3=1e-2)
    assert limits.scaled(1.3) == limits
