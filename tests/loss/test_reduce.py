"""Loss weights: the weighted sum must equal the mean that the name promises."""

import numpy as np
import pytest
import torch

from streamrl.loss import packed_weights
from streamrl.loss.reduce import RULES, token_weights

COUNTS = [np.array([3, 1, 2]), np.array([4, 4])]
RNG = np.random.default_rng(0)
LOSSES = [[RNG.normal(size=n) for n in group] for group in COUNTS]
FLAT = [tokens for group in LOSSES for tokens in group]

EXPECTED = {
    "token_mean": np.concatenate(FLAT).mean(),
    "sequence_mean_token_mean": np.mean([tokens.mean() for tokens in FLAT]),
    "sequence_mean_token_sum": np.mean([tokens.sum() for tokens in FLAT]),
    "constant_length": np.mean([tokens.sum() for tokens in FLAT]) / 16,
    "prompt_mean": np.mean([np.concatenate(group).mean() for group in LOSSES]),
}


@pytest.mark.parametrize("name", sorted(RULES))
def test_the_weighted_sum_is_the_mean_that_the_name_says(name):
    weights = token_weights(COUNTS, name, 16)
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
    for row in token_weights([np.array([0, 0]), np.array([0])], name, 16):
        assert np.isfinite(row).all()


def test_prompt_mean_counts_an_empty_prompt():
    assert token_weights([np.array([2, 2]), np.array([0, 0])], "prompt_mean")[0] == pytest.approx(1 / 8)


def test_an_unknown_aggregation_and_a_negative_count_are_refused():
    with pytest.raises(ValueError, match="prompt_mean"):
        token_weights(COUNTS, "mean")
    with pytest.raises(ValueError, match="negative"):
        token_weights([np.array([-1])], "token_mean")
    with pytest.raises(ValueError, match="constant_length needs a positive length, got None"):
        token_weights(COUNTS, "constant_length")


@pytest.mark.parametrize("name", sorted(RULES))
def test_packed_tokens_in_any_order_have_the_weights_of_their_sequence(name):
    counts, prompts = np.concatenate(COUNTS), np.repeat(np.arange(len(COUNTS)), [len(c) for c in COUNTS])
    order = np.random.default_rng(1).permutation(counts.sum())
    segments = np.repeat(np.arange(len(counts)), counts)[order]
    found = packed_weights(
        torch.ones(len(order), dtype=torch.bool), torch.tensor(segments), name, prompts=torch.tensor(prompts), length=16
    )
    expected = np.concatenate(token_weights(COUNTS, name, 16))[segments]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-15)


def test_the_mask_of_packed_weights_decides_what_is_in_the_denominators():
    segments = torch.tensor([0, 0, 0, 1])
    sampled, kept = torch.ones(4, dtype=torch.bool), torch.tensor([True, False, True, True])
    assert packed_weights(sampled, segments, "token_mean").tolist() == [0.25] * 4
    assert packed_weights(kept, segments, "token_mean").tolist() == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])
    assert packed_weights(kept, segments, "sequence_mean_token_mean", sequences=4).tolist() == pytest.approx(
        [1 / 8, 0, 1 / 8, 1 / 4]
    )
    with pytest.raises(ValueError, match="prompt_mean needs the prompt of each sequence"):
        packed_weights(kept, segments, "prompt_mean")
