"""Values and gradients of every policy loss against the derivations by hand, in float64 to 1e-9."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from derivations import LOSSES, covariances, surrogate
from loss_cases import SEEDS, random_case

from streamrl.loss import OBJECTIVES, LossBatch, batch_statistics, loss_params, policy_loss

# Every parameter away from its default at least once, tight enough to act on the cases.
SETTINGS = [
    ("reinforce", {}),
    ("rloo", {}),
    ("gpg", {}),
    ("tis", {}),
    ("tis", {"cap": 1.1}),
    ("ppo", {}),
    ("ppo", {"clip_low": 0.05, "clip_high": 0.4, "dual_clip": 1.5}),
    ("ppo", {"delta": 1.6}),
    ("grpo", {}),
    ("dr_grpo", {}),
    ("dapo", {}),
    ("gspo", {}),
    ("gspo", {"clip_low": 0.2, "clip_high": 0.3}),
    ("gspo_token", {"clip_low": 0.2, "clip_high": 0.3}),
    ("cispo", {}),
    ("cispo", {"floor": 0.8, "cap": 1.28}),
    ("sapo", {}),
    ("sapo", {"tau_pos": 0.5, "tau_neg": 3.0}),
    ("gmpo", {}),
    ("gmpo", {"clip_low": 0.1, "clip_high": 0.2}),
    ("decoupled_ppo", {"weight_cap": 1.3}),
    ("decoupled_ppo", {"weight_cap": 1.3, "weight_rule": "truncate", "dual_clip": 2.0, "clip_high": 0.1}),
    ("dppo", {}),
    ("dppo", {"clip_low": 0.02, "clip_high": 0.04, "pull": 0.5}),
    ("dppo", {"divergence": "kl", "clip_low": 0.005, "clip_high": 0.003}),
    ("dppo", {"divergence": "absolute", "clip_high": 0.05}),
    ("dppo", {"cap": 1.2, "pull": 0.0, "clip_low": 0.15, "clip_high": 0.15}),
    ("m2po", {"clip_low": 0.05, "clip_high": 0.05}),
    ("m2po", {"budget": 0.5}),
    ("m2po", {"budget": 1e4}),
    ("m2po", {"moment_rule": "mask"}),
    ("topr", {}),
    ("topr", {"cap": 1.4}),
    ("vespo", {}),
    ("vespo", {"k_pos": 1.1, "lambda_pos": 1.3, "k_neg": 2.3, "lambda_neg": 0.7}),
    ("kl_cov", {"cov_share": 0.2}),
    ("kl_cov", {"cov_share": 0.2, "pull": 1.0}),
]


def plain(params) -> dict:
    return {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}


def run(name, case, params, **changes):
    batch = case.batch(**changes)
    loss, measures = policy_loss(name, batch, params)
    loss.backward()
    return loss.item(), batch.current.grad.numpy(), measures


@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=lambda x: x if isinstance(x, str) else "-".join(x))
@pytest.mark.parametrize("per_token", [False, True], ids=["row", "token"])
def test_value_and_gradient_are_those_of_the_derivation(name, settings, per_token):
    params = loss_params(name, **settings)
    for seed in SEEDS:
        case = random_case(seed, per_token=per_token)
        value, gradient, _ = run(name, case, params)
        expected, slopes = LOSSES[name](case, **plain(params))
        # Ties of selections are broken by the last bit, so that infinite tokens may share a fate differently.
        scale = max(1.0, abs(expected))
        assert value == pytest.approx(expected, rel=1e-9, abs=1e-9 * scale), seed
        np.testing.assert_allclose(gradient, slopes, rtol=1e-9, atol=1e-9 * max(1, np.abs(slopes).max()), err_msg=seed)


def test_every_loss_has_a_derivation():
    assert set(LOSSES) | {"clip_cov"} == set(OBJECTIVES)
    assert {name for name, _ in SETTINGS} == set(LOSSES)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_nothing_trained_gives_zero_and_a_zero_gradient(name):
    case = random_case(0)
    case.mask[:] = False
    value, gradient, measures = run(name, case, None)
    assert value == 0.0
    assert not gradient.any()
    assert {measure.result() for measure in measures.values()} == {0.0}
    empty = case.take(np.zeros(0, dtype=int))
    assert run(name, empty, None)[0] == 0.0


@pytest.mark.parametrize("name", OBJECTIVES)
def test_without_advantage_there_is_no_policy_gradient_and_no_clip(name):
    case = random_case(3)
    case.advantages[:] = 0.0
    params = loss_params(name, pull=0.0) if "pull" in plain(OBJECTIVES[name].params) else None
    value, gradient, measures = run(name, case, params)
    assert value == 0.0
    assert not gradient.any()
    assert measures["clip_fraction"].result() == 0.0


@pytest.mark.parametrize("name", OBJECTIVES)
def test_on_policy_the_gradient_is_that_of_reinforce(name):
    """Up to nothing at all: each surrogate has slope 1 at ratio 1, over rows with one advantage and equal weights."""
    for seed in range(10):
        case = random_case(seed, extreme=False)
        case.proximal = case.behaviour = case.current
        case.weights = np.linspace(0.1, 0.2, case.sequences)[case.segments]
        settings = {"cov_low": 1e6, "cov_high": 2e6} if name == "clip_cov" else {}
        _, gradient, _ = run(name, case, loss_params(name, **settings))
        expected = np.where(case.mask, -case.weights * case.advantages, 0.0)
        np.testing.assert_allclose(gradient, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_token_that_is_not_a_number_reaches_the_loss(name):
    """A NaN log-prob must stop the run, not be cleaned away."""
    case = random_case(1, extreme=False)
    case.advantages[:] = 1.0
    case.current[np.flatnonzero(case.mask)[0]] = math.nan
    assert math.isnan(run(name, case, None)[0])


@pytest.mark.parametrize("name", [n for n in OBJECTIVES if n != "decoupled_ppo"])
def test_without_proximal_log_probs_behaviour_takes_their_place(name):
    case = random_case(5)
    value, gradient, _ = run(name, case, None, proximal=None)
    case.proximal = case.behaviour
    expected, slopes, _ = run(name, case, None)
    assert value == expected
    np.testing.assert_array_equal(gradient, slopes)


def test_decoupled_ppo_never_drops_its_behaviour_weight_silently():
    with pytest.raises(ValueError, match="needs proximal log-probs"):
        run("decoupled_ppo", random_case(0), None, proximal=None)


def test_clip_cov_draws_its_share_from_the_candidates_and_leaves_the_rest_alone():
    params = loss_params("clip_cov", cov_low=0.1, cov_high=3.0, cov_share=0.1)
    drawn_before = set()
    for seed in SEEDS:
        case = random_case(seed, extreme=False, per_token=True)
        value, gradient, measures = run("clip_cov", case, params)
        expected, free = {}, {}
        for t in np.flatnonzero(case.mask):
            r = math.exp(case.current[t] - case.proximal[t])
            expected[t] = surrogate(r, False, case.advantages[t], 0.2, 0.2)
            clipped = (r < 0.8 and case.advantages[t] < 0) or (r > 1.2 and case.advantages[t] > 0)
            free[t] = not clipped and 0.1 < covariances(case)[t] < 3.0
        wanted = min(max(1, int(0.1 * len(expected))), sum(free.values()))
        lost = [t for t in expected if gradient[t] == 0 and expected[t][1] != 0]
        assert all(free[t] for t in lost)
        assert measures["drawn"].result() * len(expected) == pytest.approx(wanted)
        kept = sum(case.weights[t] * loss for t, (loss, _) in expected.items() if t not in lost)
        assert value == pytest.approx(kept, rel=1e-9, abs=1e-12)
        drawn_before |= {(seed, t) for t in lost}
    assert len(drawn_before) > len(SEEDS)


def test_gspo_and_gspo_token_agree_where_advantages_are_constant_in_the_row():
    for seed in SEEDS:
        case = random_case(seed, extreme=False)
        case.weights = np.linspace(0.1, 0.2, case.sequences)[case.segments]
        params = loss_params("gspo", clip_low=0.1, clip_high=0.1)
        (value, gradient, _), (other, slopes, _) = run("gspo", case, params), run("gspo_token", case, params)
        assert value == pytest.approx(other, rel=1e-12)
        np.testing.assert_allclose(gradient, slopes, rtol=1e-9, atol=1e-15)


def test_gspo_with_the_epsilon_of_ppo_almost_never_clips():
    case = random_case(2, extreme=False, spread=0.1)
    own = run("gspo", case, None)[2]["clip_fraction"].result()
    borrowed = run("gspo", case, loss_params("gspo", clip_low=0.2, clip_high=0.2))[2]["clip_fraction"].result()
    assert own > 0.2
    assert borrowed == 0.0


def test_m2po_keeps_the_second_moment_of_harmful_tokens_within_the_budget():
    """What the clip leaves: every harmful token at most at the bound, and their mean of ℓ² below the budget."""
    tight = loss_params("m2po", clip_low=0.0, clip_high=0.0)
    for seed in SEEDS:
        case = random_case(seed)
        bound = float(batch_statistics("m2po", case.batch(), tight)["bound"])
        with np.errstate(invalid="ignore"):  # −∞ − −∞ where both are impossible
            logs = np.where(case.mask, case.current - case.behaviour, 0.0)
        harm = ((case.advantages > 0) & (logs > 0)) | ((case.advantages < 0) & (logs < 0))
        left = np.minimum(np.abs(logs[harm & case.mask]), bound)
        assert not len(left) or np.square(left).mean() <= 0.04 + 1e-9


def test_measures_count_clips_by_side_and_by_sign_of_the_advantage():
    log_ratios = np.array([0.5, 0.5, 0.5, -0.5, -0.5, -0.5, 2.0])
    advantages = torch.tensor([1.0, -1.0, 0.0, 1.0, -1.0, 0.0, -1.0], dtype=torch.float64)
    behaviour = torch.full((7,), -3.0, dtype=torch.float64)
    batch = LossBatch(
        behaviour + torch.tensor(log_ratios),
        behaviour,
        advantages,
        torch.ones(7, dtype=torch.bool),
        torch.zeros(7, dtype=torch.int64),
    )
    _, measures = policy_loss("ppo", batch, loss_params("ppo", dual_clip=3.0))
    found = {name: round(measure.result() * 7) for name, measure in measures.items() if "fraction" in name}
    assert found == {
        "clip_fraction": 3,
        "dual_clip_fraction": 1,
        "dropped_fraction": 0,
        "capped_fraction": 0,
        "clip_fraction_low": 1,
        "clip_fraction_low_positive": 0,
        "clip_fraction_low_negative": 1,
        "clip_fraction_high": 1,
        "clip_fraction_high_positive": 1,
        "clip_fraction_high_negative": 0,
    }
    assert measures["slope_positive"].result() == pytest.approx(math.exp(-0.5) / 2)
    assert measures["slope_negative"].result() == pytest.approx(math.exp(0.5) / 3)
