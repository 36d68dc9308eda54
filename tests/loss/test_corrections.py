"""Corrections for w = π_old/μ against loops in plain numpy; off by default; denominators untouched."""

from __future__ import annotations

import math

import numpy as np
import pytest
from loss_cases import SEEDS, random_case

from streamrl.loss import Corrections, Level, correct, policy_loss

INF = math.inf


def log_w(case):
    with np.errstate(invalid="ignore"):
        difference = case.proximal - case.behaviour
    both = np.isneginf(case.proximal) & np.isneginf(case.behaviour)
    return np.where(both, 0.0, difference)


def derived(case, c):
    """(factor, dropped) of each trained token, one rule after the other."""
    logs, factor, dropped = log_w(case), np.ones(len(case.current)), np.zeros(len(case.current), dtype=bool)
    for row in case.rows():
        if not len(row):
            continue
        finite = [min(1e6, max(-1e6, logs[t])) for t in row]
        levels = {"sequence": sum(finite), "geometric": sum(finite) / len(row)}
        capped = [min(20.0, max(-20.0, logs[t])) for t in row]
        k3 = sum(math.expm1(x) - x for x in capped) / len(row)
        with np.errstate(invalid="ignore"):
            drifts = [
                0.0 if case.behaviour[t] == case.current[t] == -INF else case.behaviour[t] - case.current[t]
                for t in row
            ]
        drift = sum(min(1e6, max(-1e6, x)) for x in drifts) / len(row)
        low, high = (math.log(x) if 0 < x < INF else (-INF if x == 0 else INF) for x in (c.veto_low, c.veto_high))
        vetoed = any(logs[t] < low or logs[t] > high for t in row)
        for t in row:
            if c.weight != "none":
                x = levels.get(c.weight, logs[t])
                factor[t] = min(math.exp(max(-20.0, min(20.0, x))), c.weight_cap)
            if c.reject != "none":
                x = levels.get(c.reject, logs[t])
                w = 0.0 if x < -700 else (INF if x > 700 else math.exp(x))
                dropped[t] |= w < c.reject_low or w > c.reject_high
            dropped[t] |= k3 > c.max_k3 or vetoed or (case.advantages[t] < 0 and drift > c.opsm)
    return np.where(dropped, 0.0, factor), dropped


SETTINGS = {
    "token truncation": Corrections(weight=Level.TOKEN, weight_cap=1.2),
    "sequence truncation": Corrections(weight=Level.SEQUENCE, weight_cap=2.0),
    "geometric truncation": Corrections(weight=Level.GEOMETRIC, weight_cap=1.05),
    "icepop": Corrections(weight=Level.TOKEN, reject=Level.TOKEN, reject_low=0.7, reject_high=1.3),
    "token mask": Corrections(reject=Level.TOKEN, reject_low=0.5, reject_high=2.0),
    "sequence mask": Corrections(reject=Level.SEQUENCE, reject_low=0.5, reject_high=2.0),
    "geometric mask": Corrections(reject=Level.GEOMETRIC, reject_low=0.9, reject_high=1.1),
    "one-sided mask": Corrections(reject=Level.TOKEN, reject_high=1.1),
    "k3": Corrections(max_k3=0.05),
    "veto low": Corrections(veto_low=0.6),
    "veto high": Corrections(veto_high=1.8),
    "opsm": Corrections(opsm=0.02),
    "all": Corrections(Level.TOKEN, 1.5, Level.GEOMETRIC, 0.8, 1.25, 0.2, 1e-3, 3.0, 0.1),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_factors_are_those_of_the_derivation(name):
    fired = 0
    for seed in SEEDS:
        case = random_case(seed)
        found = correct(case.batch().cleaned(), SETTINGS[name])
        factor, dropped = derived(case, SETTINGS[name])
        np.testing.assert_allclose(found.factor.numpy()[case.mask], factor[case.mask], rtol=1e-9, err_msg=seed)
        np.testing.assert_array_equal(found.dropped.numpy(), dropped & case.mask)
        fired += int((factor != 1).sum())
    assert fired > len(SEEDS)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_loss_of_a_token_is_multiplied_and_its_denominator_stays(name):
    for seed in range(10):
        case = random_case(seed)
        loss, _ = policy_loss("tis", case.batch(), corrections=SETTINGS[name])
        factor, _ = derived(case, SETTINGS[name])
        case.weights = case.weights * factor
        assert loss.item() == pytest.approx(policy_loss("tis", case.batch())[0].item(), rel=1e-9, abs=1e-12)


def test_renormalised_weights_leave_the_dropped_tokens_out_of_the_denominators():
    case = random_case(3)
    corrections = Corrections(reject=Level.TOKEN, reject_low=0.7, reject_high=1.3, renormalise=True)
    _, dropped = derived(case, corrections)
    loss, _ = policy_loss("ppo", case.batch(weights=None), corrections=corrections)
    case.mask &= ~dropped
    expected, _ = policy_loss("ppo", case.batch(weights=None))
    assert dropped.any()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)


def test_everything_is_off_by_default():
    case = random_case(0)
    found = correct(case.batch().cleaned(), Corrections())
    assert (found.factor == 1).all()
    assert not found.dropped.any()
    assert not Corrections().active


def test_a_correction_carries_no_gradient():
    case = random_case(0, extreme=False)
    batch = case.batch(proximal=None)
    found = correct(batch.cleaned(), SETTINGS["token truncation"])
    assert not found.factor.requires_grad
    assert (found.factor[batch.mask] != 1).any()  # π of this very pass stands for π_old


def test_the_fraction_that_was_dropped_is_measured():
    case = random_case(3)
    _, measures = policy_loss("tis", case.batch(), corrections=SETTINGS["geometric mask"])
    _, dropped = derived(case, SETTINGS["geometric mask"])
    assert measures["dropped_fraction"].result() == pytest.approx(dropped[case.mask].mean())


def test_opsm_acts_without_proximal_log_probs_because_it_is_anchored_on_behaviour():
    case = random_case(1, extreme=False)
    case.proximal = case.current
    case.advantages[:] = -1.0
    found = correct(case.batch().cleaned(), Corrections(opsm=0.02))
    assert 0 < found.dropped.sum() < case.mask.sum()
    assert (case.advantages[found.dropped.numpy()] < 0).all()
