"""The estimator that the buffer calls: shaping before the baseline, lengths where a rule needs them."""

import numpy as np
import pytest

from streamrl.config import load_config
from streamrl.loss import kl, reduce
from streamrl.loss.advantages import RULES, advantages
from streamrl.loss.estimate import AdvantageEstimator
from streamrl.objective_checks import ADVANTAGES, AGGREGATIONS, KL_FORMS

REWARDS, LENGTHS = [np.array([1.0, 1.0, 0.0]), np.array([0.0, 1.0])], [np.array([20, 64, 50]), np.array([64, 10])]


def test_long_answers_lose_reward_before_the_baseline_is_taken():
    config = load_config(None, ["loss.overlong_cache=20", "loss.overlong_penalty=0.5"])
    found = AdvantageEstimator(config)(REWARDS, LENGTHS)
    shaped = [np.array([1.0, 0.5, -0.15]), np.array([-0.5, 1.0])]  # 50 tokens: 6 of 20 over, half the reward units
    for one, other in zip(found, shaped, strict=True):
        np.testing.assert_allclose(one, other - other.mean(), atol=1e-12)


@pytest.mark.parametrize("name", RULES)
def test_every_rule_that_the_settings_allow_is_there(name):
    found = AdvantageEstimator(load_config(None, [f"loss.advantage={name}"]))(REWARDS, LENGTHS)
    for one, other in zip(found, advantages(REWARDS, name, LENGTHS), strict=True):
        np.testing.assert_array_equal(one, other)


def estimated(settings, rewards):
    """Advantages as the batcher sees them (float64, exact zeros are left out) and as a micro-batch holds them."""
    found = np.concatenate(
        AdvantageEstimator(load_config(None, settings))(rewards, [np.full(len(r), 2) for r in rewards])
    )
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
