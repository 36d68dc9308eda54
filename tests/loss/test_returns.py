"""Token-level returns, GAE, turn discounts and length shaping against definitions written as sums."""

import numpy as np
import pytest
import torch

from streamrl.loss.returns import discounted_returns, gae, turn_discounts
from streamrl.loss.shaping import length_reward, overlong_penalty
from streamrl.loss.value import value_loss


def packed(seed, holes=True):
    """Rewards, values, mask, segments and turns of five sequences, one of a single token, one without any."""
    rng = np.random.default_rng(seed)
    segments = np.repeat(np.arange(5), [6, 1, 8, 4, 5])
    mask = rng.random(len(segments)) < 0.7 if holes else np.ones(len(segments), dtype=bool)
    mask[segments == 1], mask[segments == 3] = True, False
    turns = np.concatenate([np.sort(rng.integers(0, 3, n)) for n in np.bincount(segments)])
    rewards, values = rng.normal(size=len(segments)), rng.normal(size=len(segments))
    return rewards, values, mask, segments, turns


def rows(mask, segments):
    found = [np.flatnonzero(mask & (segments == i)) for i in range(5)]
    return [row for row in found if len(row)]


@pytest.mark.parametrize("seed", range(5))
def test_a_return_is_the_discounted_sum_of_what_was_sampled_after_it(seed):
    rewards, _, mask, segments, _ = packed(seed)
    expected = np.zeros(len(rewards))
    for row in rows(mask, segments):
        for i, t in enumerate(row):
            expected[t] = sum(0.9**k * rewards[u] for k, u in enumerate(row[i:]))
    np.testing.assert_allclose(discounted_returns(rewards, mask, segments, 0.9), expected, rtol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_with_turns_only_a_new_turn_discounts(seed):
    rewards, _, mask, segments, turns = packed(seed)
    expected = np.zeros(len(rewards))
    for row in rows(mask, segments):
        for i, t in enumerate(row):
            expected[t] = sum(0.9 ** (turns[u] - turns[t]) * rewards[u] for u in row[i:])
    np.testing.assert_allclose(discounted_returns(rewards, mask, segments, 0.9, turns), expected, rtol=1e-12)


def test_an_outcome_is_shared_out_by_the_turns_that_were_left():
    turns, segments = np.array([0, 0, 1, 2, 0, 0]), np.array([0, 0, 0, 0, 1, 1])
    mask = np.array([True, False, True, True, True, True])
    np.testing.assert_allclose(turn_discounts(turns, mask, segments, 0.5), [0.25, 0, 0.5, 1, 1, 1])


@pytest.mark.parametrize("seed", range(5))
def test_gae_is_the_weighted_sum_of_temporal_differences(seed):
    rewards, values, mask, segments, _ = packed(seed)
    expected, returns = np.zeros(len(rewards)), np.zeros(len(rewards))
    for row in rows(mask, segments):
        after = [*values[row[1:]], 0.0]
        deltas = [rewards[t] + 0.9 * v - values[t] for t, v in zip(row, after, strict=True)]
        for i, t in enumerate(row):
            expected[t] = sum((0.9 * 0.8) ** k * delta for k, delta in enumerate(deltas[i:]))
            returns[t] = expected[t] + values[t]
    found = gae(rewards, values, mask, segments, gamma=0.9, lam=0.8)
    np.testing.assert_allclose(found[0], expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(found[1], returns, rtol=1e-10, atol=1e-12)


def test_with_lambda_one_the_advantage_is_the_return_less_the_value():
    rewards, values, mask, segments, _ = packed(0)
    found, returns = gae(rewards, values, mask, segments, gamma=0.9, lam=1.0)
    plain = discounted_returns(rewards, mask, segments, 0.9)
    np.testing.assert_allclose(found, np.where(mask, plain - values, 0.0), atol=1e-12)
    np.testing.assert_allclose(returns, plain, atol=1e-12)


def test_holes_carry_value_and_advantage_through():
    """The same as without the holes."""
    rewards, values, mask, segments, _ = packed(3)
    found, _ = gae(rewards, values, mask, segments)
    dense, _ = gae(rewards[mask], values[mask], mask[mask], segments[mask])
    np.testing.assert_array_equal(found[mask], dense)
    assert not found[~mask].any()


@pytest.mark.parametrize("seed", range(5))
def test_gae_over_turns_takes_a_turn_as_one_step(seed):
    rewards, values, mask, segments, turns = packed(seed)
    found, _ = gae(rewards, values, mask, segments, gamma=0.9, lam=0.8, turns=turns)
    for row in rows(mask, segments):
        steps = [row[turns[row] == turn] for turn in np.unique(turns[row])]
        starts = [values[step[0]] for step in steps] + [0.0]
        deltas = [rewards[s].sum() + 0.9 * starts[k + 1] - starts[k] for k, s in enumerate(steps)]
        for k, step in enumerate(steps):
            expected = sum(0.72**j * delta for j, delta in enumerate(deltas[k:]))
            np.testing.assert_allclose(found[step], expected, rtol=1e-10)


def test_the_value_loss_is_the_larger_error_with_and_without_the_clip():
    rng = np.random.default_rng(0)
    old, new, returns = rng.normal(size=(3, 50))
    for clip in (np.inf, 0.3):
        values = torch.tensor(new, requires_grad=True)
        loss = value_loss(values, torch.tensor(old), torch.tensor(returns), clip)
        loss.sum().backward()
        for i, (v, o, g) in enumerate(zip(new, old, returns, strict=True)):
            kept = min(max(v, o - clip), o + clip)
            free, held = 0.5 * (v - g) ** 2, 0.5 * (kept - g) ** 2
            assert loss[i].item() == pytest.approx(max(free, held), rel=1e-12)
            slope = v - g if free >= held or abs(v - o) <= clip else 0.0
            assert values.grad[i].item() == pytest.approx(slope, rel=1e-12)


def test_the_overlong_penalty_falls_linearly_over_the_cache():
    found = overlong_penalty(np.array([0, 80, 90, 95, 100, 130]), longest=100, cache=20)
    np.testing.assert_allclose(found, [0, 0, -0.5, -0.75, -1, -1])
    with pytest.raises(ValueError, match="at most longest=100, got 101"):
        overlong_penalty(np.array([1]), 100, 101)


def test_the_length_reward_prefers_short_answers_and_never_rewards_wrong_ones():
    lengths, correct = np.array([10, 20, 30, 10]), np.array([True, True, True, False])
    np.testing.assert_allclose(length_reward(lengths, correct), [0.5, 0.0, -0.5, 0.0])
    assert not length_reward(np.array([7, 7]), np.array([True, False])).any()
