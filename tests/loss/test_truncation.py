"""The kept set recomputed from logits, and log-probs, entropy and gradients over it, against plain float64."""

import math

import numpy as np
import pytest
import torch

from streamrl.engines.sampling import truncate
from streamrl.loss import truncation as module
from streamrl.loss.logprobs import token_logprobs
from streamrl.loss.truncation import Truncation, dropped
from streamrl.schema import SamplingConfig

torch.set_num_threads(1)
RULES = [
    Truncation(top_k=1),
    Truncation(top_k=4),
    Truncation(top_k=100),
    Truncation(top_p=0.3),
    Truncation(top_p=0.9),
    Truncation(top_p=0.999999),
    Truncation(min_p=0.05),
    Truncation(min_p=1.0),
    Truncation(top_k=5, top_p=0.83),
    Truncation(top_k=6, top_p=0.9, min_p=0.02),
]


def kept_by(logits, rule: Truncation) -> list[bool]:
    """One row, as the rules read: min-p, top-k with ties, top-p over what is left, lower token ids first."""
    probabilities = np.exp(np.asarray(logits, dtype=np.float64) - max(logits))
    kept = probabilities >= rule.min_p * probabilities.max()
    if rule.top_k:
        kept &= probabilities >= np.sort(probabilities)[::-1][: rule.top_k][-1]
    left = np.where(kept, probabilities, 0.0) / probabilities[kept].sum()
    mass, chosen = 0.0, np.zeros(len(left), dtype=bool)
    for token in np.argsort(-left, kind="stable"):
        if rule.top_p < 1 and mass >= rule.top_p:
            break
        chosen[token] = kept[token]
        mass += left[token]
    return chosen.tolist()


def found(logits, rule: Truncation) -> list[list[bool]]:
    rows = torch.as_tensor(logits)
    return (~dropped(rows, *rule.bounds(rows))).tolist()


def random_logits(rows=40, vocab=23, ties=False, seed=0):
    logits = 2.0 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    return logits.round() if ties else logits


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_kept_set_is_what_the_rules_say(rule, ties):
    logits = random_logits(ties=ties)
    assert found(logits, rule) == [kept_by(row, rule) for row in logits.tolist()]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_kept_set_does_not_depend_on_how_many_candidates_are_looked_at_first(rule, monkeypatch):
    logits = random_logits(ties=True)
    expected = found(logits, rule)
    monkeypatch.setattr(module, "SHORTLIST", 2)
    assert found(logits, rule) == expected


def test_of_equal_tokens_top_p_keeps_the_lower_ids_and_top_k_all():
    logits = [[0.0, 1.0, 0.0, 0.0, 0.0]]
    # e / (e + 4) = 0.405, each of the others 0.149: the second of these crosses 0.6.
    assert found(logits, Truncation(top_p=0.6)) == [[True, True, True, False, False]]
    assert found(logits, Truncation(top_k=2)) == [[True] * 5]


def test_settings_that_truncate_nothing_are_no_truncation():
    assert Truncation.of(SamplingConfig()) is None
    assert Truncation.of(SamplingConfig(top_p=0.9)) == Truncation(top_p=0.9)


def inputs(tokens=12, hidden=8, vocab=23, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    return (
        torch.randn(tokens, hidden, generator=generator, dtype=dtype),
        torch.randn(vocab, hidden, generator=generator, dtype=dtype),
        torch.randint(vocab, (tokens,), generator=generator),
    )


def renormalised(hidden, weight, targets, temperature, kept):
    """log p over the kept tokens and each row's own target, and its entropy; differentiable."""
    kept = kept.scatter(1, targets[:, None], True)
    logits = (hidden.double() @ weight.double().T / temperature).masked_fill(~kept, -torch.inf)
    every = logits.log_softmax(1)
    plain = every.masked_fill(~kept, 0.0)
    return every.gather(1, targets[:, None])[:, 0], -(every.exp() * plain).sum(1)


def kept_in(hidden, weight, temperature, rule):
    logits = hidden.double() @ weight.double().T / temperature
    return torch.tensor([kept_by(row, rule) for row in logits.tolist()])


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_log_probs_and_entropy_are_those_of_the_renormalised_distribution(rule, chunk):
    hidden, weight, targets = inputs(dtype=torch.float32)
    result = token_logprobs(hidden, weight, targets, 0.7, chunk=chunk, truncation=rule)
    kept = kept_in(hidden, weight, 0.7, rule)
    logprobs, entropy = renormalised(hidden, weight, targets, 0.7, kept)
    torch.testing.assert_close(result.logprobs.double(), logprobs, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(result.entropy.double(), entropy, atol=1e-5, rtol=1e-6)
    assert result.outside.tolist() == (~kept.gather(1, targets[:, None])[:, 0]).tolist()


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_gradients_are_those_of_the_renormalised_distribution_with_its_kept_set_constant(rule, chunk):
    hidden, weight, targets = inputs()
    ours = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    theirs = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    scale = torch.linspace(-1, 2, len(targets), dtype=torch.float64)
    (scale * token_logprobs(*ours, targets, 0.7, chunk=chunk, truncation=rule).logprobs).sum().backward()
    (scale * renormalised(*theirs, targets, 0.7, kept_in(hidden, weight, 0.7, rule))[0]).sum().backward()
    for own, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own.grad, expected.grad)


def test_a_token_that_was_sampled_although_it_is_outside_is_kept_and_told():
    weight = torch.tensor([[3.0], [2.0], [1.0]])
    result = token_logprobs(torch.ones(2, 1), weight, torch.tensor([0, 2]), 1.0, truncation=Truncation(top_k=1))
    assert result.outside.tolist() == [False, True]
    # Alone in its kept set; then against the one token that top-k keeps: e / (e + e³).
    assert result.logprobs.tolist() == pytest.approx([0.0, -math.log1p(math.e**2)])
    assert result.entropy.tolist() == pytest.approx([0.0, binary_entropy(1 / (1 + math.e**2))])


def binary_entropy(p: float) -> float:
    return -p * math.log(p) - (1 - p) * math.log1p(-p)


def test_logits_that_are_not_finite_give_log_probs_that_are_not_finite():
    weight = torch.tensor([[1.0], [math.nan], [0.0]])
    result = token_logprobs(torch.ones(1, 1), weight, torch.tensor([0]), 1.0, truncation=Truncation(5, 0.9, 0.1))
    assert not result.logprobs.isfinite().any()


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_kept_set_is_that_of_the_embedded_engine(rule, ties):
    logits = random_logits(ties=ties, seed=1).double()
    columns = (torch.full((len(logits),), value) for value in (rule.min_p, rule.top_k, rule.top_p))
    min_p, top_k, top_p = columns
    engines = truncate(logits, min_p.double(), top_k, top_p.double()) > -torch.inf
    assert found(logits, rule) == engines.tolist()
