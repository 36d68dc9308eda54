"""KL forms: values, gradients, and what they estimate, from the whole distribution of a small vocabulary."""

import math

import numpy as np
import pytest
import torch

from streamrl.loss.kl import FORMS, kl_penalty, kl_terms

LOG_RATIOS = np.array([0.0, 1e-7, -1e-7, 0.3, -0.4, 2.0, -3.0, 25.0, -25.0, math.inf, -math.inf])
"""x = log π_ref − log π"""


def derived(form, x):
    """(value, derivative by log π) of one token."""
    cut = max(-20.0, min(20.0, x))
    moving = 1.0 if abs(x) <= 20 else 0.0  # dx/dlog π = −1
    e = math.expm1(cut)
    value, slope = {
        "k1": (-cut, 1.0),
        "k2": (cut * cut / 2, -cut),
        "k3": (e - cut, -e),
        "k3_plus": (e - cut, -cut),
        "absolute": (abs(cut), -float(np.sign(cut))),
    }[form]
    return value, slope * moving


def logs(x):
    """Pairs (log π_ref, log π) with that difference, small numbers exact."""
    if math.isinf(x):
        return (-math.inf, -1.0) if x < 0 else (-1.0, -math.inf)
    return (x, 0.0)


@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients_are_those_of_the_derivation(form):
    pairs = [logs(x) for x in LOG_RATIOS]
    reference, current = (torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True))
    current.requires_grad_()
    terms = kl_terms(current, reference, form)
    terms.sum().backward()
    expected = [derived(form, x) for x in LOG_RATIOS]
    np.testing.assert_allclose(terms.detach(), [value for value, _ in expected], rtol=1e-9, atol=1e-20)
    np.testing.assert_allclose(current.grad, [slope for _, slope in expected], rtol=1e-9, atol=1e-20)


def distributions():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    current = logits[0].clone().requires_grad_()
    return current, torch.log_softmax(logits[1], 0), torch.log_softmax(logits[2], 0)


def exact_gradient(current, reference):
    logp = torch.log_softmax(current, 0)
    (logp.exp() * (logp - reference)).sum().backward()
    gradient, current.grad = current.grad.clone(), None
    return gradient


@pytest.mark.parametrize("form", ["k1", "k3", "k3_plus"])
def test_k1_and_k3_have_the_expectation_of_the_divergence(form):
    current, reference, _ = distributions()
    logp = torch.log_softmax(current.detach(), 0)
    mean = (logp.exp() * kl_terms(logp, reference, form)).sum()
    assert float(mean) == pytest.approx(float((logp.exp() * (logp - reference)).sum()), rel=1e-12)


@pytest.mark.parametrize(("form", "right"), [("k1", False), ("k2", True), ("k3", False), ("k3_plus", True)])
def test_as_a_loss_only_k2_and_k3_plus_have_the_gradient_of_the_divergence(form, right):
    current, reference, _ = distributions()
    exact = exact_gradient(current, reference)
    logp = torch.log_softmax(current, 0)
    (logp.detach().exp() * kl_terms(logp, reference, form)).sum().backward()
    assert torch.allclose(current.grad, exact, rtol=1e-9) == right
    if form == "k1":
        assert current.grad.abs().max() < 1e-12


@pytest.mark.parametrize("form", ["k1", "k3"])
def test_off_policy_a_differentiable_ratio_makes_value_and_gradient_unbiased(form):
    current, reference, behaviour = distributions()
    exact = exact_gradient(current, reference)
    logp = torch.log_softmax(current, 0)
    mean = (behaviour.exp() * kl_terms(logp, reference, form, behaviour)).sum()
    mean.backward()
    assert float(mean.detach()) == pytest.approx(float((logp.exp() * (logp - reference)).sum().detach()), rel=1e-9)
    torch.testing.assert_close(current.grad, exact)


def test_off_policy_a_capped_ratio_is_a_constant_weight():
    current = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    behaviour, reference = torch.tensor([-3.0, -1.0]).double(), torch.tensor([-1.5, -1.0]).double()
    terms = kl_terms(current, reference, "k2", behaviour, ratio_cap=2.0)
    terms.sum().backward()
    weight = np.minimum(np.exp([2.0, -1.0]), 2.0)
    x = np.array([-0.5, 1.0])
    np.testing.assert_allclose(terms.detach(), weight * x**2 / 2, rtol=1e-12)
    np.testing.assert_allclose(current.grad, -weight * x, rtol=1e-12)


def test_the_penalty_on_rewards_is_k1_and_has_no_gradient():
    current = torch.tensor([-1.0, -2.0], requires_grad=True)
    penalty = kl_penalty(current, torch.tensor([-1.5, -1.0]), 0.1)
    torch.testing.assert_close(penalty, torch.tensor([0.05, -0.1]))
    assert not penalty.requires_grad


def test_small_divergences_do_not_cancel_in_float32():
    current = torch.zeros(1, dtype=torch.float32)
    term = kl_terms(current, torch.full((1,), 1e-4), "k3")
    assert float(term) == pytest.approx(5e-9, rel=1e-3)


def test_an_unknown_form_is_refused():
    with pytest.raises(ValueError, match="k3_plus.*got 'k4'"):
        kl_terms(torch.zeros(1), torch.zeros(1), "k4")
