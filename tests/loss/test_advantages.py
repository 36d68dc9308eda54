"""Advantages against hand derivations, and what must not change them."""

import numpy as np
import pytest

from streamrl.loss.advantages import EPSILON, RULES, advantages

NAMES = sorted(RULES)
REWARDS = [np.array([1.0, 0.0, 0.0, 1.0, 1.0]), np.array([0.5, -2.0, 3.0])]


def test_mean_subtracts_the_mean_of_the_group():
    first, second = advantages(REWARDS, "mean")
    np.testing.assert_allclose(first, [0.4, -0.6, -0.6, 0.4, 0.4], atol=1e-12)
    np.testing.assert_allclose(second, [0.0, -2.5, 2.5], atol=1e-12)
    assert first.dtype == np.float64


def test_mean_std_divides_by_the_bessel_corrected_deviation_of_the_group():
    first, second = advantages(REWARDS, "mean_std")
    # Variances by hand: (3·0.4² + 2·0.6²)/4 = 0.3 and (2.5² + 2.5²)/2 = 6.25.
    np.testing.assert_allclose(first, np.array([0.4, -0.6, -0.6, 0.4, 0.4]) / (np.sqrt(0.3) + EPSILON), rtol=1e-12)
    np.testing.assert_allclose(second, np.array([0.0, -2.5, 2.5]) / (2.5 + EPSILON), rtol=1e-12)


def test_leave_one_out_compares_with_the_mean_of_the_others():
    for rewards, result in zip(REWARDS, advantages(REWARDS, "leave_one_out"), strict=True):
        expected = [r - np.mean(np.delete(rewards, i)) for i, r in enumerate(rewards)]
        np.testing.assert_allclose(result, expected, atol=1e-12)


def test_batch_std_divides_centred_rewards_by_one_deviation_of_the_batch():
    centred = np.array([0.4, -0.6, -0.6, 0.4, 0.4, 0.0, -2.5, 2.5])
    expected = centred / (np.sqrt(np.square(centred).sum() / 7) + EPSILON)
    np.testing.assert_allclose(np.concatenate(advantages(REWARDS, "batch_std")), expected, rtol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_equal_rewards_and_a_single_trajectory_give_exact_zeros(name):
    # 0.1 × 3 has a mean that differs from 0.1 in the last bit.
    for result in advantages([np.full(3, 0.1), np.array([7.0])], name):
        assert not result.any()


@pytest.mark.parametrize("name", NAMES)
def test_advantages_do_not_depend_on_a_constant_added_to_a_group(name):
    shifted = [REWARDS[0] + 10.0, REWARDS[1] - 3.0]
    for result, expected in zip(advantages(shifted, name), advantages(REWARDS, name), strict=True):
        np.testing.assert_allclose(result, expected, atol=1e-9)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_reward_that_is_not_finite_is_refused_with_its_group(bad):
    with pytest.raises(ValueError, match="group 1"):
        advantages([np.array([0.0, 1.0]), np.array([0.0, bad])], "mean")


def test_an_unknown_advantage_is_refused():
    with pytest.raises(ValueError, match="batch_std"):
        advantages(REWARDS, "median")
