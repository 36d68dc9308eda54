"""The learner on one rank against an unpacked float64 reference, and what it refuses."""

import math

import numpy as np
import pytest
import torch
from learner_cases import (
    batch,
    distance,
    group,
    reference_logprobs,
    reference_step,
    settings,
    tiny_model,
    trajectory,
    varied_groups,
)

from streamrl.errors import ConfigError, DivergedError, StalenessError
from streamrl.metrics import KEYS
from streamrl.policy import learner as module
from streamrl.policy.learner import Learner
from streamrl.policy.optimizer import learning_rate
from streamrl.schema import TrainerConfig
from streamrl.types import TrainGroup


def state(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same(model, before):
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("max_grad_norm", [1e9, 0.01])
def test_a_step_is_the_unpacked_loss_clipped_and_given_to_adamw(max_grad_norm):
    # A large eps keeps AdamW's first step proportional to the gradient instead of to its sign.
    config = settings(max_grad_norm=max_grad_norm, eps=0.1)
    expected, model = tiny_model(), tiny_model()
    loss, norm = reference_step(expected, config, varied_groups())
    metrics = Learner(config, model).step(batch(varied_groups()))
    assert metrics["policy/loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["policy/grad_norm"] == pytest.approx(norm, rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, dict(expected.named_parameters())[name], rtol=1e-5, atol=1e-6, msg=name)


def observed(micro_batches, row_tokens=None):
    """(metrics, gradients) of a step on a fresh model."""
    model, gradients = tiny_model(), {}
    learner = Learner(settings(eps=0.1), model)
    learner._row_tokens = row_tokens or learner._row_tokens
    learner.optimizer.register_step_pre_hook(
        lambda *_: gradients.update({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    )
    metrics = learner.step(batch(*micro_batches))
    return {key: value for key, value in metrics.items() if not key.startswith("time/")}, gradients


def alone(groups):
    """The same trajectories, each a group and a micro-batch of its own: nothing that they share is computed once."""
    return [
        [TrainGroup(each.lease, each.env, [one], each.advantages[k : k + 1], each.token_weights[k : k + 1])]
        for each in groups
        for k, one in enumerate(each.trajectories)
    ]


SPLITS = {
    "two": lambda groups: [groups[:1], groups[1:]],
    "uneven, in another order, one empty": lambda groups: [[], groups[3:], groups[1:3], groups[:1]],
    "one trajectory each": alone,
    "reversed": lambda groups: [groups[::-1]],
}


@pytest.mark.parametrize("split", SPLITS)
def test_loss_metrics_and_gradient_are_those_of_one_micro_batch_to_1e_6(split):
    """The gradient relative to its norm, over all parameters; metrics relative to their value."""
    expected, gradients = observed([varied_groups()])
    found, ours = observed(SPLITS[split](varied_groups()))
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-7)
    assert distance(ours, gradients) < 1e-6


@pytest.mark.parametrize("row_tokens", [1, 8, 40])
def test_loss_metrics_and_gradient_do_not_depend_on_rows_and_their_padding(row_tokens):
    """Narrow rows split a group over several, wide ones hold several groups and more padding."""
    expected, gradients = observed([varied_groups()])
    found, ours = observed([varied_groups()], row_tokens)
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-7)
    assert distance(ours, gradients) < 1e-6


def test_every_metric_of_a_step_is_there():
    metrics = Learner(settings(), tiny_model()).step(batch(varied_groups()))
    of_the_learner = ("policy/", "lag/", "mismatch/", "update/", "value/", "by_length/")
    others = {"lag/evicted_groups", "lag/bound", "lag/headroom", "mismatch/canary_rms"}
    expected = {key for key in KEYS if key.startswith(of_the_learner)} - others
    assert set(metrics) == expected | {"trained_tokens", "time/forward_backward", "time/optimizer"}
    assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())


def test_scores_are_the_log_softmax_of_the_model_with_zero_first():
    model = tiny_model()
    one = trajectory("abcdef", "gh")
    scores = Learner(settings(), model).score(one.tokens, temperature=0.7)
    assert scores.dtype == np.float32
    assert scores[0] == 0.0
    np.testing.assert_allclose(scores[1:], reference_logprobs(model, one, 0.7).detach().numpy(), atol=1e-5)


@pytest.mark.parametrize("tokens", [[], [3]])
def test_scores_of_nothing_to_predict_are_zero(tokens):
    assert Learner(settings(), tiny_model()).score(tokens).tolist() == [0.0] * len(tokens)


def test_on_policy_every_ratio_is_one_and_nothing_is_clipped():
    model, groups = tiny_model(), varied_groups()
    config = settings()
    config.sampling.temperature = 0.7
    config.loss.name = "ppo"
    learner = Learner(config, model)
    for each in groups:
        for one in each.trajectories:
            one.behaviour = np.where(one.sampled, learner.score(one.tokens, 0.7), 0.0).astype(np.float32)
            one.versions = [(5, one.sampled_count)]
    metrics = learner.step(batch(*([each] for each in groups), oldest_allowed=5))
    assert metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["mismatch/max"] < 1e-5
    assert metrics["policy/ess_sequence"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["policy/clip_fraction"] == metrics["lag/max"] == 0.0


def test_tokens_over_the_lag_bound_have_no_influence_on_the_update():
    """The masked head of a trajectory may carry any behaviour log-prob, NaN included."""
    models = tiny_model(), tiny_model()
    for model, poison in zip(models, (-1.0, math.nan), strict=True):
        half_old = trajectory("abc", "defg", versions=[(2, 2), (5, 2)])
        half_old.behaviour[3:5] = poison
        metrics = Learner(settings(), model).step(batch([group(half_old, advantages=[1.0])]))
        assert metrics["lag/masked_tokens"] == 2
        assert metrics["trained_tokens"] == 2
    assert_same(models[0], state(models[1]))


def test_the_head_runs_on_trained_tokens_only(monkeypatch):
    """Neither on prompts and observations nor on tokens over the lag bound."""
    sizes = []
    inner = module.token_logprobs

    def counted(hidden, *rest, **named):
        sizes.append(len(hidden))
        return inner(hidden, *rest, **named)

    monkeypatch.setattr(module, "token_logprobs", counted)
    two_turns = trajectory("abcdefg", "de", observation="hij", second="kl", versions=[(2, 1), (5, 3)])
    metrics = Learner(settings(), tiny_model()).step(batch([group(two_turns, advantages=[1.0])]))
    assert sizes == [3] == [metrics["trained_tokens"]]


def test_lag_is_measured_on_trained_tokens_only():
    members = trajectory("ab", "cde", versions=[(2, 1), (4, 1), (5, 1)]), trajectory("ab", "fg", versions=[(5, 2)])
    metrics = Learner(settings(), tiny_model()).step(batch([group(*members)]))
    assert metrics["lag/max"] == 1.0
    assert metrics["lag/mean"] == pytest.approx(0.25)


def test_without_a_trainable_token_the_weights_stay_and_the_step_counts():
    model = tiny_model()
    learner = Learner(settings(weight_decay=0.1), model)
    before = state(model)
    all_stale = [group(trajectory("ab", "cd", versions=[(1, 2)]))]
    for empty in (batch(all_stale), batch([]), batch()):
        metrics = learner.step(empty)
        assert metrics["trained_tokens"] == metrics["policy/grad_norm"] == metrics["policy/loss"] == 0.0
    assert learner.updates == 3
    assert_same(model, before)


def test_a_loss_that_is_not_finite_stops_the_step_before_the_weights_change():
    model = tiny_model()
    learner = Learner(settings(), model)
    before = state(model)
    broken = trajectory("ab", "cd")
    broken.behaviour[3] = math.nan
    with pytest.raises(DivergedError, match="step 7: the loss on rank 0"):
        learner.step(batch([group(broken, advantages=[1.0])], step=7))
    assert_same(model, before)
    assert learner.step(batch(varied_groups()))["policy/grad_norm"] > 0


def test_a_gradient_that_is_not_finite_stops_the_step_before_the_weights_change():
    model = tiny_model()
    learner = Learner(settings(), model)
    before = state(model)
    # The loss still fits float32, the gradient does not.
    poisoned = group(trajectory("ab", "cd"), advantages=[3e38], weight=1.0)
    with pytest.raises(DivergedError, match="step 3: the gradient norm"):
        learner.step(batch([poisoned], step=3))
    assert_same(model, before)


def test_versions_from_the_future_are_refused():
    learner = Learner(settings(), tiny_model())
    with pytest.raises(StalenessError, match="version 6"):
        learner.step(batch([group(trajectory("ab", "cd", versions=[(6, 2)]))]))
    with pytest.raises(StalenessError, match="oldest_allowed 9"):
        learner.step(batch(oldest_allowed=9))


def test_other_attention_than_sdpa_is_refused_with_the_way_out():
    model = tiny_model()
    model.set_attn_implementation("eager")
    with pytest.raises(ConfigError, match="attn_implementation='sdpa'"):
        Learner(settings(), model)


def test_full_parameters_name_each_parameter_once():
    for tied in (True, False):
        model = tiny_model(tied)
        assert [name for name, _ in Learner(settings(), model).full_parameters()] == list(state(model))


def test_steps_on_a_fixed_batch_raise_the_log_prob_of_good_answers_over_bad_ones():
    good, bad = trajectory("abc", "de"), trajectory("abc", "fg")
    learner = Learner(settings(), tiny_model())

    def preference():
        return learner.score(good.tokens)[3:].sum() - learner.score(bad.tokens)[3:].sum()

    before = preference()
    for _ in range(3):
        learner.step(batch([group(good, bad, advantages=[1.0, -1.0])]))
    assert preference() > before + 1.0


def test_learning_rates_follow_the_schedule():
    config = TrainerConfig(lr=1.0, lr_warmup_steps=2)
    expected = {
        "constant": [0.5, 1.0, 1.0, 1.0, 1.0, 1.0],
        "linear": [0.5, 1.0, 1.0, 0.75, 0.5, 0.25],
        "cosine": [0.5, 1.0, 1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2],
    }
    for config.schedule, rates in expected.items():
        assert [learning_rate(config, update, 6) for update in range(6)] == pytest.approx(rates)
        assert learning_rate(config, 6, 6) == pytest.approx(1.0 if config.schedule == "constant" else 0.0)


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="constant, linear, cosine"):
        learning_rate(TrainerConfig(schedule="step"), 0, 10)


def test_the_step_uses_the_rate_of_its_update():
    learner = Learner(settings(schedule="linear"), tiny_model())
    rates = [learner.step(batch(varied_groups()))["policy/lr"] for _ in range(2)]
    assert rates == pytest.approx([1e-2, 0.9e-2])


def test_the_update_is_as_large_as_the_rate_says():
    models = tiny_model(), tiny_model()
    for model, trainer in zip(models, ({"lr": 1e-2, "lr_warmup_steps": 10}, {"lr": 1e-3}), strict=True):
        Learner(settings(**trainer), model).step(batch(varied_groups()))
    for name, parameter in models[0].named_parameters():
        torch.testing.assert_close(parameter.detach(), state(models[1])[name], msg=name)


def test_vectors_do_not_decay():
    model = tiny_model()
    learner = Learner(settings(weight_decay=0.5, lr=1e-3), model)
    before = state(model)
    nothing_learned = group(trajectory("ab", "cd"), advantages=[0.0])
    learner.step(batch([nothing_learned]))
    for name, parameter in model.named_parameters():
        factor = 1.0 - 0.5 * 1e-3 if parameter.ndim >= 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor, msg=name)
