"""The learner with every loss: pre-update passes, KL, several updates, against unpacked float64 references."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from learner_cases import batch, group, reference_logprobs, settings, tiny_model, trajectory, varied_groups

from streamrl.config import conf_folder, load_config
from streamrl.errors import DivergedError
from streamrl.loss import OBJECTIVES, LossBatch, loss_params, policy_loss
from streamrl.loss.kl import kl_terms
from streamrl.policy.learner import Learner
from streamrl.policy.step_loss import split

FAST = {"eps": 0.1}
"""A large eps keeps AdamW's first step proportional to the gradient instead of to its sign."""


def flat(model, groups, oldest_allowed=3):
    """(current with gradient, the rest of a ``LossBatch``) of one trajectory at a time, float64."""
    columns = {"current": [], "behaviour": [], "advantages": [], "weights": [], "segments": []}
    row = 0
    for each in groups:
        for one, advantage, weight in zip(each.trajectories, each.advantages, each.token_weights, strict=True):
            versions = np.repeat(*np.array(one.versions).reshape(-1, 2).T)
            trained = np.flatnonzero(one.sampled)[versions >= oldest_allowed]
            size = len(trained)
            columns["current"].append(reference_logprobs(model, one)[trained - 1])
            columns["behaviour"].append(torch.tensor(one.behaviour[trained]).double())
            columns["advantages"].append(torch.full((size,), advantage, dtype=torch.float64))
            columns["weights"].append(torch.full((size,), weight, dtype=torch.float64))
            columns["segments"].append(torch.full((size,), row))
            row += 1
    joined = {name: torch.cat(parts) for name, parts in columns.items()}
    return LossBatch(**joined, mask=torch.ones(len(joined["current"]), dtype=torch.bool), sequences=row)


def descend(model, loss, config):
    """AdamW on ``loss``; the gradient norm."""
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))
    t = config.trainer
    torch.optim.AdamW(model.parameters(), lr=t.lr, betas=(t.beta1, t.beta2), eps=t.eps, weight_decay=0.0).step()
    return norm


def assert_same_parameters(model, expected):
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, dict(expected.named_parameters())[name], rtol=2e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "decoupled_ppo"])
def test_a_step_with_each_loss_is_the_loss_on_unpacked_log_probs(name):
    config = settings(**FAST)
    config.loss.name = name
    expected, model = tiny_model(), tiny_model()
    reference = flat(expected, varied_groups())
    loss, _ = policy_loss(name, reference)
    norm = descend(expected, loss, config)
    metrics = Learner(config, model).step(batch(*([each] for each in varied_groups())))
    assert metrics["policy/loss"] == pytest.approx(loss.item(), rel=2e-5)
    assert metrics["policy/grad_norm"] == pytest.approx(norm, rel=2e-5)
    assert_same_parameters(model, expected)


@pytest.mark.parametrize("name", ["decoupled_ppo", "gspo", "ppo"])
def test_two_updates_measure_the_second_against_the_policy_before_the_first(name):
    config = settings(**FAST)
    config.trainer.lr = 0.3
    config.loss.name, config.loss.proximal, config.loss.updates_per_batch = name, "recompute", 2
    groups = numbered_groups()
    parts = split([groups], 2)
    expected, model = tiny_model(), tiny_model()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=0.3, betas=(0.9, 0.95), eps=0.1, weight_decay=0.0)
    before = [flat(expected, part[0]).current.detach() for part in parts]
    losses = []
    for part, proximal in zip(parts, before, strict=True):
        optimizer.zero_grad()
        plain = flat(expected, part[0])
        loss, _ = policy_loss(name, LossBatch(**{**vars(plain), "proximal": proximal}))
        (2 * loss).backward()
        optimizer.step()
        losses.append(loss.item())
    metrics = Learner(config, model).step(batch(groups))
    assert metrics["policy/loss"] == pytest.approx(sum(losses), rel=1e-4)
    assert metrics["update/k3"] > 1e-4
    assert_same_parameters(model, expected)


def test_a_second_update_that_diverges_says_that_the_first_one_stands():
    config = settings()
    config.loss.updates_per_batch = 2
    groups = numbered_groups()
    groups[1].trajectories[0].behaviour = np.full_like(groups[1].trajectories[0].behaviour, math.nan)
    model = tiny_model()
    before = model.get_input_embeddings().weight.detach().clone()
    with pytest.raises(DivergedError, match="step 1, update 2: .* the weights are those of the update before"):
        Learner(config, model).step(batch(groups))
    assert not torch.equal(model.get_input_embeddings().weight, before)


def test_the_first_update_has_no_update_ratio():
    config = settings()
    metrics = Learner(config, tiny_model()).step(batch(varied_groups()))
    assert metrics["update/k3"] == 0.0
    assert metrics["update/ess"] == 1.0


def numbered_groups():
    """``varied_groups`` with a lease each, as the buffer hands them out."""
    groups = varied_groups()
    for lease, each in enumerate(groups):
        each.lease = lease
    return groups


def test_a_group_takes_part_in_one_update_wherever_it_lies():
    varied = numbered_groups()
    parts = split([varied[:2], [], varied[2:]], 3)
    assert [[[g.lease for g in micro] for micro in part] for part in parts] == [
        [[0], [], [3]],
        [[1], [], [4]],
        [[], [], [2, 5]],
    ]


@pytest.mark.parametrize(
    ("form", "off_policy", "cap"), [("k2", False, math.inf), ("k3", True, math.inf), ("k3_plus", True, 1.5)]
)
def test_a_kl_term_pulls_towards_the_frozen_start(form, off_policy, cap):
    config = settings(**FAST)
    config.loss.kl.coefficient, config.loss.kl.reference = 0.5, "initial"
    config.loss.kl.form, config.loss.kl.off_policy, config.loss.kl.ratio_cap = form, off_policy, cap
    expected, model, start = tiny_model(), tiny_model(), tiny_model()
    learner = Learner(config, model)
    learner.step(batch(varied_groups()))
    expected.load_state_dict(model.state_dict())
    plain = flat(expected, varied_groups())
    reference = flat(start, varied_groups()).current.detach()
    terms = kl_terms(plain.current, reference, form, plain.behaviour if off_policy else None, cap)
    loss = policy_loss("tis", plain)[0] + 0.5 * (plain.weights * terms).sum()
    norm = descend(expected, loss, config)
    metrics = learner.step(batch(varied_groups()))
    assert metrics["policy/loss"] == pytest.approx(loss.item(), rel=2e-5)
    assert metrics["policy/grad_norm"] == pytest.approx(norm, rel=2e-5)
    kl = kl_terms(plain.current.detach(), reference, "k3").mean()
    assert metrics["policy/kl_reference"] == pytest.approx(float(kl), rel=1e-3)


def test_kl_as_a_reward_is_taken_off_the_advantage_of_each_token():
    config = settings(**FAST)
    config.loss.kl.coefficient, config.loss.kl.reference, config.loss.kl.place = 0.5, "initial", "reward"
    model, expected, start = tiny_model(), tiny_model(), tiny_model()
    learner = Learner(config, model)
    learner.step(batch(varied_groups()))
    expected.load_state_dict(model.state_dict())
    plain = flat(expected, varied_groups())
    k1 = (plain.current - flat(start, varied_groups()).current).detach()
    loss, _ = policy_loss("tis", LossBatch(**{**vars(plain), "advantages": plain.advantages - 0.5 * k1}))
    norm = descend(expected, loss, config)
    metrics = learner.step(batch(varied_groups()))
    assert metrics["policy/loss"] == pytest.approx(loss.item(), rel=2e-5)
    assert metrics["policy/grad_norm"] == pytest.approx(norm, rel=2e-5)


def test_a_checkpoint_may_be_the_reference(tmp_path):
    other = tiny_model(seed=3)
    other.save_pretrained(tmp_path)
    config = settings()
    config.loss.kl.coefficient, config.loss.kl.reference = 0.1, str(tmp_path)
    model = tiny_model()
    plain, theirs = flat(model, varied_groups()), flat(other, varied_groups())
    expected = float(kl_terms(plain.current.detach(), theirs.current.detach(), "k3").mean())
    metrics = Learner(config, model).step(batch(varied_groups()))
    assert metrics["policy/kl_reference"] == pytest.approx(expected, rel=1e-4)


def test_the_reference_never_moves():
    config = settings(lr=1e-3)
    config.loss.kl.coefficient, config.loss.kl.reference = 0.1, "initial"
    learner = Learner(config, tiny_model())
    found = [learner.step(batch(varied_groups()))["policy/kl_reference"] for _ in range(3)]
    assert found[0] == 0.0
    assert 0.0 < found[1] < found[2]


def test_earlier_turns_count_less_under_a_turn_discount():
    config = settings(**FAST)
    config.loss.name, config.loss.turn_discount = "reinforce", 0.25
    two_turns = group(trajectory("aab", "cd", observation="ee", second="fg"), advantages=[1.0])
    expected, model = tiny_model(), tiny_model()
    plain = flat(expected, [two_turns])
    discounts = torch.tensor([0.25, 0.25, 1.0, 1.0], dtype=torch.float64)
    loss = -(plain.weights * discounts * plain.current).sum()
    norm = descend(expected, loss, config)
    metrics = Learner(config, model).step(batch([two_turns]))
    assert metrics["policy/grad_norm"] == pytest.approx(norm, rel=2e-5)


def test_a_turn_that_lost_its_old_tokens_still_counts_as_a_turn():
    config = settings(**FAST)
    config.loss.name, config.loss.turn_discount = "reinforce", 0.25
    first_fresh = trajectory("aab", "cd", observation="ee", second="fg", versions=[(5, 2), (2, 2)])
    metrics = Learner(config, tiny_model()).step(batch([group(first_fresh, advantages=[1.0])]))
    plain = flat(tiny_model(), [group(first_fresh, advantages=[1.0])])
    assert metrics["policy/loss"] == pytest.approx(
        -0.25 * float((plain.weights * plain.current).sum().detach()), rel=1e-5
    )


def values_of(policy, one):
    """``[T − 1]``: the value before each token but the first, of one trajectory alone."""
    tokens = torch.tensor(one.tokens, dtype=torch.int64)[None]
    hidden = policy.model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state[0, :-1]
    return policy.value(hidden).squeeze(1).double()


def step_rewards(one, steps, reward):
    """The reward of each step: that of a turn where the turn ends, the rest of the whole at the very end."""
    ends = [t for t in np.flatnonzero(one.sampled) if t + 1 == len(one.sampled) or not one.sampled[t + 1]]
    given = dict(zip(ends, one.turn_rewards, strict=True)) if one.turn_rewards else {}
    found = [given.get(step[-1], 0.0) for step in steps]
    found[-1] += reward - sum(one.turn_rewards)
    return found


def actor_critic_loss(policy, groups, config, whiten):
    """REINFORCE with advantages by GAE, and the value head's squared error, on one trajectory at a time."""
    value, terms = config.loss.value, []
    for each in groups:
        for one, reward, weight in zip(each.trajectories, each.advantages, each.token_weights, strict=True):
            sampled = np.flatnonzero(one.sampled)
            turn = np.cumsum(np.diff(sampled, prepend=sampled[0] - 1) > 1)
            steps = [sampled[turn == k] for k in range(turn.max() + 1)] if value.step == "turn" else sampled[:, None]
            values = values_of(policy, one)
            starts = [values[step[0] - 1].item() for step in steps] + [0.0]
            given = step_rewards(one, steps, reward)
            deltas = [given[k] + value.gamma * starts[k + 1] - starts[k] for k in range(len(steps))]
            for k, step in enumerate(steps):
                advantage = sum((value.gamma * value.lam) ** j * delta for j, delta in enumerate(deltas[k:]))
                for t in step:
                    logp = reference_logprobs(policy.model, one)[t - 1]
                    terms.append((weight, advantage, logp, values[t - 1], advantage + starts[k]))
    advantages = np.array([advantage for _, advantage, *_ in terms])
    if whiten:
        advantages = (advantages - advantages.mean()) / np.sqrt(advantages.var(ddof=1) + 1e-8)
    return sum(
        weight * (-advantage * logp + 0.5 * value.coefficient * (v - target) ** 2)
        for advantage, (weight, _, logp, v, target) in zip(advantages, terms, strict=True)
    )


@pytest.mark.parametrize(("step", "whiten"), [("token", True), ("token", False), ("turn", True)])
def test_a_value_head_gives_advantages_of_tokens_and_learns_returns(step, whiten):
    config = settings(**FAST)
    config.loss.name, config.loss.advantage = "reinforce", "gae"
    config.loss.value.gamma, config.loss.value.lam = 0.9, 0.8
    config.loss.value.step, config.loss.value.whiten = step, whiten
    learner = Learner(config, tiny_model())
    learner.step(batch(varied_groups(), oldest_allowed=0))  # now the head is not 0 any more
    expected = copy.deepcopy(learner._policy)
    loss = actor_critic_loss(expected, varied_groups(), config, whiten)
    norm = descend(expected, loss, config)
    metrics = learner.step(batch(*([each] for each in varied_groups()), oldest_allowed=0))
    assert metrics["policy/loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["policy/grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("step", ["token", "turn"])
def test_rewards_of_turns_come_at_the_ends_of_their_turns(step):
    def groups():
        made = varied_groups()
        for one in made[2].trajectories[:2]:
            one.turn_rewards = [0.75, -0.5]
        made[0].trajectories[1].turn_rewards = [2.0]
        return made

    config = settings(**FAST)
    config.loss.name, config.loss.advantage, config.loss.value.whiten = "reinforce", "gae", False
    config.loss.value.gamma, config.loss.value.lam, config.loss.value.step = 0.9, 0.8, step
    learner = Learner(config, tiny_model())
    learner.step(batch(groups(), oldest_allowed=0))
    expected, without = copy.deepcopy(learner._policy), copy.deepcopy(learner._policy)
    loss = actor_critic_loss(expected, groups(), config, whiten=False)
    assert loss.item() != pytest.approx(actor_critic_loss(without, varied_groups(), config, False).item(), rel=1e-3)
    norm = descend(expected, loss, config)
    metrics = learner.step(batch(*([each] for each in groups()), oldest_allowed=0))
    assert metrics["policy/loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["policy/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_a_value_head_explains_more_and_more_of_the_returns():
    config = settings()
    config.loss.advantage = "gae"
    learner = Learner(config, tiny_model())
    found = [learner.step(batch(varied_groups())) for _ in range(30)]
    assert found[0]["value/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert found[-1]["value/explained_variance"] > 0.2
    assert found[-1]["value/loss"] < found[0]["value/loss"]


def test_the_value_head_is_trained_but_not_published():
    config = settings()
    config.loss.advantage = "gae"
    learner = Learner(config, tiny_model())
    learner.step(batch(varied_groups()))
    assert learner._policy.value.weight.abs().max() > 0
    assert not [name for name, _ in learner.full_parameters() if "value" in name]


def test_truncated_trajectories_stay_in_the_batch_but_get_no_policy_gradient():
    config = settings(**FAST)
    config.loss.mask_truncated = True
    truncated, silent = varied_groups(), varied_groups()
    truncated[3].trajectories[0].truncated = True
    silent[3].advantages = np.zeros(1)
    found = Learner(config, tiny_model()).step(batch(truncated))
    expected = Learner(config, tiny_model()).step(batch(silent))
    assert found["policy/grad_norm"] == pytest.approx(expected["policy/grad_norm"], rel=1e-6)
    assert found["trained_tokens"] == expected["trained_tokens"]


def test_asked_otherwise_the_weight_of_dropped_and_stale_tokens_goes_to_the_rest():
    config = settings(**FAST)
    config.loss.correction.reject, config.loss.correction.reject_high = "token", 0.3
    stays = Learner(config, tiny_model()).step(batch(varied_groups(), oldest_allowed=4))
    config.loss.correction.renormalise = True
    leaves = Learner(config, tiny_model()).step(batch(*([each] for each in varied_groups()), oldest_allowed=4))
    plain = flat(tiny_model(), varied_groups(), oldest_allowed=4)
    kept = (plain.current - plain.behaviour).exp() <= 0.3
    stale = 1  # one token of version 3, in a group with a weight of 0.05 like all of them
    assert 0 < kept.sum() < len(kept)
    factor = float((plain.weights.sum() + 0.05 * stale) / plain.weights[kept].sum())
    assert stays["lag/masked_tokens"] == stale
    assert leaves["policy/loss"] == pytest.approx(factor * stays["policy/loss"], rel=1e-5)
    assert leaves["policy/grad_norm"] == pytest.approx(factor * stays["policy/grad_norm"], rel=1e-5)


def test_environments_are_reported_apart():
    groups = varied_groups()
    groups[0].env = "words"
    one = batch(groups)
    one.stats = {"reward/letters/mean": 0.0, "reward/words/mean": 0.0, "reward/mean": 0.0}
    metrics = Learner(settings(), tiny_model()).step(one)
    assert metrics["policy/words/tokens"] + metrics["policy/letters/tokens"] == metrics["trained_tokens"]
    assert metrics["policy/words/tokens"] == 12


@pytest.mark.parametrize("path", sorted((conf_folder() / "loss").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_preset_trains(path):
    config = load_config(None, [f"loss={path.stem}"])
    config.trainer = settings().trainer
    metrics = Learner(config, tiny_model()).step(batch(varied_groups()))
    assert math.isfinite(metrics["policy/loss"])
    assert metrics["policy/grad_norm"] > 0


def test_a_loss_of_ones_own_trains_by_module_and_function():
    config = settings()
    config.loss.name, config.loss.args = "test_objectives:squared", {}
    metrics = Learner(config, tiny_model()).step(batch(varied_groups()))
    plain = flat(tiny_model(), varied_groups())
    expected = float((plain.weights * plain.advantages * plain.current**2).sum().detach())
    assert metrics["policy/loss"] == pytest.approx(expected, rel=1e-5)
    assert loss_params("test_objectives:squared") is not None


def squared(batch, params):
    """A user's loss."""
    return batch.advantages * batch.current**2
