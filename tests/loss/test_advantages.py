"""Advantages against hand derivations, and what must not change them."""

import math
import statistics

import numpy as np
import pytest

from streamrl.loss.advantages import BY_LENGTH, EPSILON, RULES, advantages, whiten

NAMES = sorted(RULES)
OVER_TOKENS = ["reinforce_pp", "reinforce_pp_baseline"]
RELATIVE = [name for name in NAMES if name not in OVER_TOKENS]
REWARDS = [np.array([1.0, 0.0, 0.0, 1.0, 1.0]), np.array([0.5, -2.0, 3.0])]
LENGTHS = [np.array([4, 1, 3, 2, 5]), np.array([2, 6, 0])]


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


def test_batch_std_of_raw_rewards_divides_by_the_deviation_of_all_rewards():
    every = np.concatenate(REWARDS)
    scale = np.sqrt(np.square(every - every.mean()).sum() / 7) + EPSILON
    expected = np.array([0.4, -0.6, -0.6, 0.4, 0.4, 0.0, -2.5, 2.5]) / scale
    np.testing.assert_allclose(np.concatenate(advantages(REWARDS, "batch_std_raw")), expected, rtol=1e-12)


def test_opo_subtracts_the_mean_weighted_by_length():
    first, second = advantages(REWARDS, "opo", LENGTHS)
    np.testing.assert_allclose(first, REWARDS[0] - 11 / 15, atol=1e-12)  # (4 + 2 + 5)/15
    np.testing.assert_allclose(second, REWARDS[1] - (1 - 12) / 8, atol=1e-12)


def test_maxrl_divides_by_the_mean_and_gives_zero_without_one():
    first, second, third = advantages([*REWARDS, np.array([-1.0, 1.0])], "maxrl")
    np.testing.assert_allclose(first, np.array([0.4, -0.6, -0.6, 0.4, 0.4]) / 0.6, rtol=1e-12)
    np.testing.assert_allclose(second, [0.0, -5.0, 5.0], atol=1e-12)
    assert not third.any()


def test_gpg_scales_by_the_share_of_trajectories_with_a_reward():
    centred = np.array([0.4, -0.6, -0.6, 0.4, 0.4, 0.0, -2.5, 2.5])
    np.testing.assert_allclose(np.concatenate(advantages(REWARDS, "gpg")), centred * 8 / 6, atol=1e-12)
    with_equal = [*REWARDS, np.array([2.0, 2.0])]
    found = np.concatenate(advantages(with_equal, "gpg_informative"))
    np.testing.assert_allclose(found, np.append(centred, [0.0, 0.0]) * 10 / 8, atol=1e-12)


@pytest.mark.parametrize("name", OVER_TOKENS)
def test_reinforce_pp_whitens_over_the_tokens_of_the_batch(name):
    values = np.concatenate(REWARDS)
    if name == "reinforce_pp_baseline":
        values = np.array([0.4, -0.6, -0.6, 0.4, 0.4, 0.0, -2.5, 2.5])
    tokens = np.repeat(values, np.concatenate(LENGTHS))
    scale = np.sqrt(tokens.var(ddof=1) + 1e-8)
    found = np.concatenate(advantages(REWARDS, name, LENGTHS))
    np.testing.assert_allclose(found, (values - tokens.mean()) / scale, rtol=1e-12)
    assert np.repeat(found, np.concatenate(LENGTHS)).mean() == pytest.approx(0.0, abs=1e-12)


def test_whitening_counts_what_is_in_the_mask():
    values, mask = np.array([1.0, 50.0, 3.0, 5.0]), np.array([True, False, True, True])
    np.testing.assert_allclose(whiten(values, mask)[mask], [-1, 0, 1], atol=1e-8)
    assert not whiten(values, np.array([True, False, False, False])).any()


@pytest.mark.parametrize("name", BY_LENGTH)
def test_rules_that_weigh_by_length_refuse_to_guess_it(name):
    with pytest.raises(ValueError, match=f"advantage {name} needs the lengths"):
        advantages(REWARDS, name)


@pytest.mark.parametrize("name", NAMES)
def test_no_group_and_an_empty_one_are_no_error(name):
    assert advantages([], name, []) == []
    assert [len(each) for each in advantages([np.zeros(0), REWARDS[0]], name, [np.zeros(0), LENGTHS[0]])] == [0, 5]


@pytest.mark.parametrize("name", RELATIVE)
def test_equal_rewards_and_a_single_trajectory_give_exact_zeros(name):
    # 0.1 × 3 has a mean that differs from 0.1 in the last bit.
    for result in advantages([np.full(3, 0.1), np.array([7.0])], name, [np.array([1, 2, 3]), np.array([4])]):
        assert not result.any()


@pytest.mark.parametrize("name", sorted({*NAMES} - {"maxrl", "gpg", "batch_std_raw", "reinforce_pp"}))
def test_advantages_do_not_depend_on_a_constant_added_to_a_group(name):
    shifted = [REWARDS[0] + 10.0, REWARDS[1] - 3.0]
    found, wanted = (advantages(rewards, name, LENGTHS) for rewards in (shifted, REWARDS))
    for result, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(result, expected, atol=1e-9)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_reward_that_is_not_finite_is_refused_with_its_group(bad):
    with pytest.raises(ValueError, match="group 1"):
        advantages([np.array([0.0, 1.0]), np.array([0.0, bad])], "mean")


def test_an_unknown_advantage_is_refused():
    with pytest.raises(ValueError, match="batch_std"):
        advantages(REWARDS, "median")


def plain(name, groups, lengths):
    """Every rule once more, in Python's own arithmetic; groups of equal rewards and lone trajectories included."""
    every = [r for group in groups for r in group]
    mean = statistics.fmean
    centred = [[r - mean(group) if len(set(group)) > 1 else 0.0 for r in group] for group in groups]
    deviation = statistics.stdev(every)
    of_centred = math.sqrt(sum(c * c for row in centred for c in row) / (len(every) - 1))
    informative = sum(len(group) for group in groups if len(set(group)) > 1)

    def whitened(rows):
        pairs = [pair for row, counts in zip(rows, lengths, strict=True) for pair in zip(row, counts, strict=True)]
        tokens = [value for value, count in pairs for _ in range(count)]
        return [[(v - mean(tokens)) / math.sqrt(statistics.variance(tokens) + 1e-8) for v in row] for row in rows]

    def of_group(i, group):
        own, counts = centred[i], lengths[i]
        weighted = sum(r * n for r, n in zip(group, counts, strict=True)) / sum(counts)
        spread = statistics.stdev(group) if len(set(group)) > 1 else 0.0
        return {
            "mean": own,
            "mean_std": [c / (spread + 1e-6) for c in own],
            "leave_one_out": [r - (sum(group) - r) / (len(group) - 1) if len(set(group)) > 1 else 0.0 for r in group],
            "batch_std": [c / (of_centred + 1e-6) for c in own],
            "batch_std_raw": [c / (deviation + 1e-6) for c in own],
            "opo": [r - weighted if len(set(group)) > 1 else 0.0 for r in group],
            "maxrl": [c / mean(group) if mean(group) else 0.0 for c in own],
            "gpg": [c * len(every) / max(sum(r != 0 for r in every), 1) for c in own],
            "gpg_informative": [c * len(every) / max(informative, 1) for c in own],
        }[name]

    if name in OVER_TOKENS:
        return whitened(groups if name == "reinforce_pp" else centred)
    return [of_group(i, group) for i, group in enumerate(groups)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", NAMES)
def test_random_batches_agree_with_plain_arithmetic(name, seed):
    rng = np.random.default_rng(seed)
    groups = [rng.choice([0.0, 1.0, 0.3, -0.5], size=n).tolist() for n in (1, 2, 4, 8, int(rng.integers(1, 9)))]
    groups.append([0.1, 0.1, 0.1])
    lengths = [rng.integers(1, 20, len(group)).tolist() for group in groups]
    found = advantages([np.array(group) for group in groups], name, [np.array(each) for each in lengths])
    for one, expected in zip(found, plain(name, groups, lengths), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-9, atol=1e-9)
