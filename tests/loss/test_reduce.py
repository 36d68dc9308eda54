"""Loss weights: the weighted sum must equal the mean that the name promises."""

import numpy as np
import pytest

from streamrl.loss.reduce import RULES, token_weights

COUNTS = [np.array([3, 1, 2]), np.array([4, 4])]
RNG = np.random.default_rng(0)
LOSSES = [[RNG.normal(size=n) for n in group] for group in COUNTS]
FLAT = [tokens for group in LOSSES for tokens in group]

EXPECTED = {
    "token_mean": np.concatenate(FLAT).mean(),
    "sequence_mean_token_mean": np.mean([tokens.mean() for tokens in FLAT]),
    "sequence_mean_token_sum": np.mean([tokens.sum() for tokens in FLAT]),
    "prompt_mean": np.mean([np.concatenate(group).mean() for group in LOSSES]),
}


@pytest.mark.parametrize("name", sorted(RULES))
def test_the_weighted_sum_is_the_mean_that_the_name_says(name):
    weights = token_weights(COUNTS, name)
    total = sum(
        weight * tokens.sum()
        for group, row in zip(LOSSES, weights, strict=True)
        for tokens, weight in zip(group, row, strict=True)
    )
    assert total == pytest.approx(EXPECTED[name], rel=1e-12)


@pytest.mark.parametrize("name", ["sequence_mean_token_mean", "sequence_mean_token_sum"])
def test_a_trajectory_without_sampled_tokens_stays_in_the_denominator(name):
    with_empty = token_weights([np.array([2, 0]), np.array([2, 2])], name)
    per_token = 0.5 if name == "sequence_mean_token_mean" else 1.0
    assert with_empty[0][0] == pytest.approx(per_token / 4)


@pytest.mark.parametrize("name", sorted(RULES))
def test_counts_of_zero_give_finite_weights(name):
    for row in token_weights([np.array([0, 0]), np.array([0])], name):
        assert np.isfinite(row).all()


def test_prompt_mean_counts_an_empty_prompt():
    assert token_weights([np.array([2, 2]), np.array([0, 0])], "prompt_mean")[0] == pytest.approx(1 / 8)


def test_an_unknown_aggregation_and_a_negative_count_are_refused():
    with pytest.raises(ValueError, match="prompt_mean"):
        token_weights(COUNTS, "mean")
    with pytest.raises(ValueError, match="negative"):
        token_weights([np.array([-1])], "token_mean")
