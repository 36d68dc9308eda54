"""The estimator that the buffer calls: shaping before the baseline, lengths where a rule needs them."""

import numpy as np
import pytest

from streamrl.config import load_config
from streamrl.loss import kl, reduce
from streamrl.loss.advantages import RULES, advantages
from streamrl.loss.estimate import AdvantageEstimator
from streamrl.objective_checks import ADVANTAGES, AGGREGATIONS, KL_FORMS

EPISODES = [np.arange(3), np.arange(2)]
REWARDS, LENGTHS = [np.array([1.0, 1.0, 0.0]), np.array([0.0, 1.0])], [np.array([20, 64, 50]), np.array([64, 10])]


def test_long_answers_lose_reward_before_the_baseline_is_taken():
    config = load_config(None, ["loss.overlong_cache=20", "loss.overlong_penalty=0.5"])
    found = AdvantageEstimator(config)(REWARDS, LENGTHS, EPISODES)
    shaped = [np.array([1.0, 0.5, -0.15]), np.array([-0.5, 1.0])]  # 50 tokens: 6 of 20 over, half the reward units
    for one, other in zip(found, shaped, strict=True):
        np.testing.assert_allclose(one, other - other.mean(), atol=1e-12)


@pytest.mark.parametrize("name", RULES)
def test_every_rule_that_the_settings_allow_is_there(name):
    found = AdvantageEstimator(load_config(None, [f"loss.advantage={name}"]))(REWARDS, LENGTHS, EPISODES)
    for one, other in zip(found, advantages(REWARDS, name, LENGTHS), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_trajectories_of_an_episode_with_the_same_reward_count_once_and_share_its_advantage():
    """Episode 0 was recorded in two trajectories: by hand, mean (1 + 0 + 2)/3 = 1, not (1 + 1 + 0 + 2)/4."""
    estimator = AdvantageEstimator(load_config(None, ["loss.advantage=mean"]))
    (found,) = estimator([np.array([1.0, 1.0, 0.0, 2.0])], [np.full(4, 5)], [np.array([0, 0, 1, 2])])
    assert found.tolist() == [0.0, 0.0, -1.0, 1.0]


def test_equal_rewards_of_different_episodes_count_each():
    """Mean (1 + 1 + 1 + 0)/4."""
    estimator = AdvantageEstimator(load_config(None, ["loss.advantage=mean"]))
    (found,) = estimator([np.array([1.0, 1.0, 1.0, 0.0])], [np.full(4, 5)], [np.arange(4)])
    assert found.tolist() == [0.25, 0.25, 0.25, -0.75]


def test_branches_of_an_episode_with_different_rewards_are_compared_with_each_other():
    """Samples 3, 1 of episode 0 and 2 of episode 1; the mean is 2, and the others' mean of 3 is 1.5."""
    estimator = AdvantageEstimator(load_config(None, ["loss.advantage=leave_one_out"]))
    (found,) = estimator([np.array([3.0, 1.0, 3.0, 2.0])], [np.full(4, 5)], [np.array([0, 0, 0, 1])])
    assert found.tolist() == [1.5, -1.5, 1.5, 0.0]


@pytest.mark.parametrize("name", RULES)
def test_an_episode_recorded_in_parts_gets_what_it_would_in_one_piece(name):
    """Every rule: the same rewards, the tokens of episode 1 in three trajectories of 7 + 20 + 23 instead of one."""
    estimator = AdvantageEstimator(load_config(None, [f"loss.advantage={name}"]))
    whole = estimator([np.array([2.0, 1.0, 0.0]), np.array([0.0, 1.0])], [np.array([20, 50, 64]), LENGTHS[1]], EPISODES)
    parts = estimator(
        [np.array([2.0, 1.0, 1.0, 1.0, 0.0]), np.array([0.0, 1.0])],
        [np.array([20, 7, 20, 23, 64]), LENGTHS[1]],
        [np.array([0, 1, 1, 1, 2]), np.arange(2)],
    )
    np.testing.assert_array_equal(parts[0], whole[0][[0, 1, 1, 1, 2]])
    np.testing.assert_array_equal(parts[1], whole[1])


def test_the_longest_trajectory_of_an_episode_decides_its_penalty_on_length():
    """Of 64 tokens 44 are free; 54 are half of the cache of 20 over, and so is the episode with 10 + 54."""
    config = load_config(None, ["loss.overlong_cache=20", "loss.overlong_penalty=1.0", "loss.advantage=gae"])
    (found,) = AdvantageEstimator(config)([np.array([1.0, 1.0, 1.0])], [np.array([10, 54, 54])], [np.array([0, 0, 1])])
    assert found.tolist() == [0.5, 0.5, 0.5]


def estimated(settings, rewards):
    """Advantages as the batcher sees them (float64, exact zeros are left out) and as a micro-batch holds them."""
    lengths, episodes = [np.full(len(r), 2) for r in rewards], [np.arange(len(r)) for r in rewards]
    found = np.concatenate(AdvantageEstimator(load_config(None, settings))(rewards, lengths, episodes))
    return found[found != 0].astype(np.float32)


@pytest.mark.parametrize(
    "settings",
    [
        ["loss=dppo"],
        ["loss.kl.coefficient=0.1", "loss.kl.reference=initial"],
        ["loss=kl_cov", "loss.advantage=mean"],
        ["loss.correction.renormalise=true"],
    ],
)
def test_trajectories_without_advantage_are_left_out_unless_the_loss_moves_or_counts_them(settings):
    rewards = [np.array([1.0, 1.0]), np.array([0.0, 1.0])]
    assert estimated([], rewards).tolist() == [-0.5, 0.5]
    assert estimated(settings, rewards).tolist() == [0.0, 0.0, -0.5, 0.5]


def test_with_a_value_head_rewards_are_handed_on_zeros_too():
    rewards = [np.array([1.0, 0.0]), np.array([0.0, -2.0])]
    assert estimated(["loss.advantage=gae"], rewards).tolist() == [1.0, 0.0, 0.0, -2.0]


def test_the_settings_allow_what_there_is():
    assert set(ADVANTAGES) == {*RULES, "gae"}
    assert set(AGGREGATIONS) == set(reduce.RULES)
    assert set(KL_FORMS) == set(kl.FORMS)
