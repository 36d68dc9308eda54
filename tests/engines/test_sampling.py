"""The sampler against distributions that are computed independently."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from streamrl.engines.sampling import Penalties, SamplerInputs, penalise, sample, truncate, uniforms
from streamrl.errors import DivergedError


def inputs(
    n: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, greedy: bool = False
) -> SamplerInputs:
    return SamplerInputs(
        temperature=np.full(n, temperature),
        top_k=np.full(n, top_k),
        top_p=np.full(n, top_p),
        min_p=np.full(n, min_p),
        greedy=np.full(n, greedy),
        seed=np.arange(n, dtype=np.uint64),
        position=np.zeros(n, dtype=np.int64),
    )


def reference(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Processed probabilities of one row, token by token in order of probability."""
    weights = np.exp(np.float64(logits) / temperature - np.max(logits) / temperature)
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    order = [token for token in order if weights[token] >= min_p * weights.max()]
    if top_k:
        order = order[:top_k]
    kept, mass, whole = [], 0.0, weights[order].sum()
    for token in order:
        if mass >= top_p:
            break
        kept.append(token)
        mass += weights[token] / whole
    probabilities = np.zeros_like(weights)
    probabilities[kept] = weights[kept] / weights[kept].sum()
    return probabilities


CASES = [
    (1.0, 0, 1.0, 0.0),
    (0.6, 0, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.3, 0, 0.8, 0.0),
    (0.8, 6, 0.9, 0.0),
    (1.2, 0, 1.0, 0.1),
    (0.9, 8, 0.9, 0.05),
]


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), CASES)
def test_sampled_frequencies_follow_the_processed_distribution(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    n = 40_000
    logits = np.random.default_rng(1).normal(size=12).astype(np.float32) * 1.5
    tokens, _ = sample(torch.from_numpy(logits).expand(n, -1), inputs(n, temperature, top_k, top_p, min_p))
    expected = reference(logits, temperature, top_k, top_p, min_p) * n
    observed = np.bincount(tokens, minlength=12)
    assert observed[expected == 0].sum() == 0
    possible = expected > 0
    chi_square = ((observed - expected)[possible] ** 2 / expected[possible]).sum()
    degrees = possible.sum() - 1
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees)


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), CASES)
def test_logprobs_are_those_of_the_renormalised_distribution(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = np.random.default_rng(2).normal(size=(300, 12)).astype(np.float32) * 2
    tokens, logprobs = sample(torch.from_numpy(logits), inputs(300, temperature, top_k, top_p, min_p))
    expected = [
        np.log(reference(row, temperature, top_k, top_p, min_p)[token])
        for row, token in zip(logits, tokens, strict=True)
    ]
    np.testing.assert_allclose(logprobs, expected, atol=1e-6)
    assert logprobs.dtype == np.float32


def test_a_greedy_row_takes_the_most_likely_token_and_its_plain_logprob() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 0.0]])
    tokens, logprobs = sample(logits, inputs(2, greedy=True))
    assert tokens.tolist() == [1, 0]
    np.testing.assert_allclose(logprobs, [logits[0].log_softmax(0)[1], logits[1].log_softmax(0)[0]], atol=1e-6)


def test_rows_with_different_parameters_get_what_each_would_get_alone() -> None:
    logits = torch.from_numpy(np.random.default_rng(3).normal(size=(50, 20)).astype(np.float32))
    rng = np.random.default_rng(4)
    mixed = SamplerInputs(
        temperature=rng.uniform(0.5, 2.0, 50),
        top_k=rng.integers(0, 6, 50),
        top_p=rng.choice([1.0, 0.7, 0.95], 50),
        min_p=rng.choice([0.0, 0.1], 50),
        greedy=rng.random(50) < 0.2,
        seed=rng.integers(0, 2**63, 50).astype(np.uint64),
        position=rng.integers(0, 100, 50),
    )
    together = sample(logits, mixed)
    for row in range(50):
        one = slice(row, row + 1)
        own = {name: column[one] for name, column in vars(mixed).items() if column is not None}
        alone = sample(logits[one], SamplerInputs(**own))
        assert (alone[0][0], alone[1][0]) == (together[0][row], together[1][row])


def test_a_token_of_probability_zero_is_never_chosen_at_either_end(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]]).expand(2, -1)
    ends = np.array([0.0, 1 - 2.0**-53])
    monkeypatch.setattr("streamrl.engines.sampling.uniforms", lambda seed, position: ends)
    tokens, _ = sample(logits, inputs(2))
    assert tokens.tolist() == [1, 2]


def test_top_p_keeps_the_token_that_crosses_the_bound_and_top_k_counts_first() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    seen = {
        (top_k, top_p): set(sample(logits.expand(500, -1), inputs(500, top_k=top_k, top_p=top_p))[0].tolist())
        for top_k, top_p in [(0, 0.49), (0, 0.51), (0, 0.79), (0, 0.81), (2, 0.61), (2, 0.64), (1, 1.0)]
    }
    assert seen == {
        (0, 0.49): {0},
        (0, 0.51): {0, 1},
        (0, 0.79): {0, 1},
        (0, 0.81): {0, 1, 2},
        (2, 0.61): {0},  # of 0.5 and 0.3 the first has 0.625
        (2, 0.64): {0, 1},
        (1, 1.0): {0},
    }


def test_top_k_alone_keeps_a_tail_that_rounding_would_hide_from_top_p() -> None:
    scaled = torch.tensor([[-60.0, 0.0, -50.0]], dtype=torch.float64)
    off = torch.tensor([0.0], dtype=torch.float64)
    kept = truncate(scaled, off, torch.tensor([2]), off + 1)
    assert kept.tolist() == [[-torch.inf, 0.0, -50.0]]


def test_min_p_keeps_a_token_exactly_as_likely_as_its_bound_and_always_the_likeliest() -> None:
    logits = torch.tensor([0.0, -1.0, -2.0], dtype=torch.float64)
    bounds = torch.tensor([0.0, np.exp(-2.0), np.exp(-1.0), 0.5, 1.0], dtype=torch.float64)
    off = torch.zeros(5, dtype=torch.int64)
    kept = truncate(logits.expand(5, -1), bounds, off, off + 1.0)
    assert kept.isfinite().sum(dim=1).tolist() == [3, 3, 2, 1, 1]


def test_penalties_fall_on_tokens_so_far_and_on_nothing_else() -> None:
    """Prompt 0 1, sampled 1 2 2; the third row is another request without penalties."""
    tokens = np.array([[0, 1, 1, 2, 2], [3, 9, 9, 9, 9]])
    penalties = Penalties(
        rows=np.array([0, 2]),
        repetition=np.array([2.0, 2.0]),
        presence=np.array([0.5, 0.0]),
        frequency=np.array([0.25, 1.0]),
        tokens=tokens,
        prompt_length=np.array([2, 1]),
        length=np.array([5, 1]),
    )
    logits = torch.tensor([4.0, -1.0, 3.0, 1.0], dtype=torch.float64)
    first, last = penalise(logits.expand(2, -1), penalties).tolist()
    assert first == [4 / 2, -1 * 2 - 0.25 - 0.5, 3 / 2 - 2 * 0.25 - 0.5, 1.0]
    assert last == [4.0, -1.0, 3.0, 1 / 2]  # what lies past the end of a row is ignored
    three = replace(inputs(3, greedy=True), penalties=penalties)
    chosen, logprobs = sample(logits.float().expand(3, -1), three)
    assert chosen.tolist() == [0, 0, 0]
    expected = [torch.tensor(row).log_softmax(0)[0] for row in (first, logits.tolist(), last)]
    np.testing.assert_allclose(logprobs, expected, atol=1e-6)


def test_uniform_numbers_are_even_and_unrelated_between_seeds_and_positions() -> None:
    seeds, positions = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200), indexing="ij")
    grid = uniforms(seeds.ravel(), positions.ravel()).reshape(200, 200)
    assert len(np.unique(grid)) == grid.size
    assert 0 <= grid.min() < 1e-3 < 0.999 < grid.max() < 1
    counts = np.histogram(grid, bins=50, range=(0, 1))[0]
    assert ((counts - 800) ** 2 / 800).sum() < 49 + 4 * np.sqrt(98)
    for shifted in (grid[1:, :-1] - grid[:-1, 1:], grid[1:] - grid[:-1], grid[:, 1:] - grid[:, :-1]):
        # The difference of two independent uniforms has variance 1/6.
        assert abs(shifted.var() - 1 / 6) < 0.005


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_an_error(bad: float) -> None:
    with pytest.raises(DivergedError, match="1 of 2 sequences"):
        sample(torch.tensor([[0.0, 1.0], [bad, 0.0]]), inputs(2))
