"""The learner replays truncated sampling: log-probs, gradients, counts, and what a KL term is taken against."""

import numpy as np
import pytest
import torch
from learner_cases import batch, group, settings, tiny_model, trajectory, varied_groups

from streamrl.loss.kl import kl_terms
from streamrl.loss.truncation import Truncation, dropped
from streamrl.policy.learner import Learner

RULE = Truncation(top_k=6, top_p=0.9)


def truncating(**loss):
    config = settings()
    config.sampling.temperature, config.sampling.top_k, config.sampling.top_p = 0.7, RULE.top_k, RULE.top_p
    for name, value in loss.items():
        setattr(config.loss, name, value)
    return config


def plain_logits(model, tokens):
    """``[T − 1, V]`` by the model's own forward pass, after temperature."""
    return model(input_ids=torch.tensor(tokens, dtype=torch.int64)[None], use_cache=False).logits[0, :-1] / 0.7


def on_policy(learner, groups):
    """``groups`` with the learner's own truncated log-probs as those of the sampler, at version 5."""
    for each in groups:
        for one in each.trajectories:
            scores = learner.score(one.tokens, 0.7, RULE)
            one.behaviour = np.where(one.sampled, scores, 0.0).astype(np.float32)
            one.versions = [(5, one.sampled_count)]
    return groups


def test_scores_are_renormalised_over_the_kept_tokens_and_the_token_itself():
    model, one = tiny_model(), trajectory("abcdef", "gh")
    logits = plain_logits(model, one.tokens).detach()
    targets = torch.tensor(one.tokens[1:], dtype=torch.int64)[:, None]
    gone = dropped(logits, *RULE.bounds(logits)).scatter(1, targets, False)
    expected = logits.double().masked_fill(gone, -torch.inf).log_softmax(1).gather(1, targets)[:, 0]
    found = Learner(truncating(), model).score(one.tokens, 0.7, RULE)[1:]
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)
    assert np.abs(found - Learner(truncating(), model).score(one.tokens, 0.7)[1:]).max() > 0.1


@pytest.mark.parametrize("proximal", ["behaviour", "recompute"])
def test_on_policy_every_ratio_is_one(proximal):
    learner = Learner(truncating(proximal=proximal), tiny_model())
    metrics = learner.step(batch(on_policy(learner, varied_groups()), oldest_allowed=5))
    assert metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["mismatch/max"] < 1e-5


@pytest.mark.parametrize("proximal", ["behaviour", "recompute"])
def test_tokens_outside_the_kept_set_are_counted_by_lag(proximal):
    model = tiny_model()
    one = trajectory("abc", "mnopabcd", versions=[(4, 3), (5, 5)])
    logits = plain_logits(model, one.tokens).detach()
    gone = dropped(logits, *RULE.bounds(logits))[np.arange(2, 10), one.tokens[3:]].double()
    assert 0 < gone[:3].mean() < 1
    assert 0 < gone[3:].mean() < 1
    config = truncating(proximal=proximal)
    config.engine.kv = "recompute"  # with keep, the tokens after the update would count to lag
    metrics = Learner(config, model).step(batch([group(one, advantages=[1.0])]))
    assert metrics["lag/outside_kept"] == pytest.approx(float(gone[:3].mean()))
    assert metrics["mismatch/outside_kept"] == pytest.approx(float(gone[3:].mean()))


def test_a_reference_policy_is_not_truncated():
    """At the start its distance is that of the truncated policy from the whole one: −log of the kept mass."""
    config = truncating()
    config.loss.kl.coefficient, config.loss.kl.reference = 0.1, "initial"
    learner = Learner(config, tiny_model())
    one = trajectory("abc", "defghijk")
    ours, theirs = (torch.tensor(learner.score(one.tokens, 0.7, rule)[3:]) for rule in (RULE, None))
    expected = kl_terms(ours, theirs, "k3").mean()
    metrics = learner.step(batch([group(one, advantages=[1.0])]))
    assert metrics["policy/kl_reference"] == pytest.approx(float(expected), rel=1e-4)


def test_entropy_is_that_of_the_truncated_distribution():
    config = truncating()
    config.sampling.top_k, config.sampling.top_p = 1, 1.0
    learner = Learner(config, tiny_model())
    prompt = trajectory("abc", "d")
    best = int(plain_logits(learner.model, prompt.tokens)[2].argmax())
    answer = trajectory("abc", chr(ord("a") + best))
    metrics = learner.step(batch([group(answer, advantages=[1.0])]))
    assert metrics["policy/entropy"] == pytest.approx(0.0, abs=1e-6)
