"""Values and gradients of the policy losses against derivations in plain float64 Python."""

import math

import pytest
import torch

from streamrl.loss.policy import policy_loss
from streamrl.schema import LossConfig

torch.set_num_threads(1)

# log-ratios from deep below to far above every bound, the last two over the cut of ±20; all signs of the advantage
LOG_RATIOS = [-0.5, -0.1, 0.0, 0.1, 0.5, 2.0, -0.5, 0.5, 0.5, 25.0, -25.0]
ADVANTAGES = [1.0, 1.0, -2.0, -1.0, 1.0, 0.5, -1.0, -1.5, 0.0, 1.0, -1.0]
BEHAVIOUR = [-1.0, -0.3, -2.0, -0.7, -1.2, -3.0, -0.9, -1.1, -0.6, -30.0, -0.1]
WEIGHTS = [0.1, 0.2, 0.05, 0.1, 0.15, 0.1, 0.05, 0.1, 0.05, 0.1, 0.1]


def run(config):
    behaviour = torch.tensor(BEHAVIOUR, dtype=torch.float64)
    current = (behaviour + torch.tensor(LOG_RATIOS, dtype=torch.float64)).requires_grad_()
    advantages, weights = (torch.tensor(x, dtype=torch.float64) for x in (ADVANTAGES, WEIGHTS))
    result = policy_loss(config, current, behaviour, advantages, weights)
    result.loss.backward()
    return result, current.grad


def tokens():
    return zip(LOG_RATIOS, ADVANTAGES, BEHAVIOUR, WEIGHTS, strict=True)


def test_tis_is_minus_the_capped_ratio_times_advantage_times_log_prob():
    result, gradient = run(LossConfig(name="tis", tis_cap=1.5))
    capped = [min(math.exp(ratio), 1.5) if ratio > -20 else math.exp(-20) for ratio in LOG_RATIOS]
    expected = [-w * c * a * (b + ratio) for c, (ratio, a, b, w) in zip(capped, tokens(), strict=True)]
    assert result.loss.item() == pytest.approx(sum(expected), rel=1e-12)
    # The ratio is a constant: the gradient flows through log π alone, at the cap too.
    expected = [-w * c * a for c, (_, a, _, w) in zip(capped, tokens(), strict=True)]
    torch.testing.assert_close(gradient, torch.tensor(expected, dtype=torch.float64))


def test_tis_counts_tokens_over_the_cap_and_never_those_without_advantage():
    result, _ = run(LossConfig(name="tis", tis_cap=1.5))
    assert result.clipped_high.tolist() == [r > math.log(1.5) and a != 0 for r, a, _, _ in tokens()]
    assert not result.clipped_low.any()


def test_ppo_is_the_smaller_of_the_plain_and_the_clipped_surrogate():
    result, gradient = run(LossConfig(name="ppo", clip_low=0.2, clip_high=0.3))
    loss, slopes = 0.0, []
    for ratio, a, _, w in tokens():
        r = math.exp(max(-20.0, min(20.0, ratio)))
        loss += -w * min(r * a, max(0.8, min(1.3, r)) * a)
        clipped = (a > 0 and r > 1.3) or (a < 0 and r < 0.8)
        # d(r·A)/d log π = r·A where the plain branch is taken and the ratio is not cut.
        slopes.append(0.0 if clipped or abs(ratio) > 20 else -w * r * a)
    assert result.loss.item() == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(gradient, torch.tensor(slopes, dtype=torch.float64))


def test_ppo_counts_clips_by_side_and_only_where_they_bind():
    result, _ = run(LossConfig(name="ppo", clip_low=0.2, clip_high=0.3))
    assert result.clipped_high.tolist() == [r > math.log(1.3) and a > 0 for r, a, _, _ in tokens()]
    assert result.clipped_low.tolist() == [r < math.log(0.8) and a < 0 for r, a, _, _ in tokens()]


def test_the_log_ratio_for_diagnostics_is_raw_and_detached():
    result, _ = run(LossConfig())
    torch.testing.assert_close(result.log_ratio, torch.tensor(LOG_RATIOS, dtype=torch.float64))
    assert not result.log_ratio.requires_grad


def test_tis_and_ppo_have_the_reinforce_gradient_on_policy():
    logprobs = torch.tensor([-0.5, -1.5, -0.1])
    advantages, weights = torch.tensor([1.0, -2.0, 0.5]), torch.full((3,), 1 / 3)
    for name in ("tis", "ppo"):
        current = logprobs.clone().requires_grad_()
        policy_loss(LossConfig(name=name), current, logprobs, advantages, weights).loss.backward()
        torch.testing.assert_close(current.grad, -advantages / 3)


def test_an_infinite_log_ratio_gives_a_finite_gradient():
    for name in ("tis", "ppo"):
        current = torch.tensor([-1.0, -1.0], requires_grad=True)
        behaviour, advantages = torch.tensor([-1e30, 1e30]), torch.tensor([-1.0, -1.0])
        policy_loss(LossConfig(name=name), current, behaviour, advantages, torch.ones(2)).loss.backward()
        assert torch.isfinite(current.grad).all()


def test_an_unknown_loss_is_refused():
    nothing = torch.zeros(0)
    with pytest.raises(ValueError, match="tis, ppo"):
        policy_loss(LossConfig(name="gspo"), nothing, nothing, nothing, nothing)
