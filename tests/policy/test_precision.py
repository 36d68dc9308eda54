"""A bfloat16 body over float32 masters: what the forward pass multiplies, how gradients add up, what is sent."""

import copy

import numpy as np
import pytest
import torch
from learner_cases import batch, group, settings, tiny_model, trajectory, varied_groups

from streamrl.policy.learner import Learner
from streamrl.policy.packing import pack
from streamrl.policy.precision import forward, freeze
from streamrl.policy.trained import as_sent

BF16 = torch.bfloat16


def low(head_dtype="float32", **trainer):
    config = settings(**trainer)
    config.model.dtype, config.model.head_dtype = "bfloat16", head_dtype
    return config


def rounded(model):
    return freeze(copy.deepcopy(model), BF16)


def hidden_states(model, packed):
    """Of the source tokens, as transformers computes them."""
    body = model.model(packed.tokens, attention_mask=packed.attention_mask(), position_ids=packed.positions)
    return body.last_hidden_state.flatten(0, 1)[packed.source]


def gradients(learner, *micro_batches):
    found = {}
    handle = learner.optimizer.register_step_pre_hook(
        lambda *_: found.update({name: p.grad.clone() for name, p in learner.model.named_parameters()})
    )
    learner.step(batch(*micro_batches))
    handle.remove()
    return found


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head_dtype", ["float32", "bfloat16"])
def test_scores_are_those_of_transformers_in_bfloat16_but_for_the_head(tied, head_dtype):
    model, one = tiny_model(tied), trajectory("a", "bcdefghij")
    packed = pack([group(one)], 5, 3, 64)
    lower = rounded(model)
    hidden = hidden_states(lower, packed)
    assert hidden.dtype == BF16
    weight = lower.lm_head.weight
    logits = hidden.float() @ weight.float().T if head_dtype == "float32" else (hidden @ weight.T).float()
    expected = logits.log_softmax(1).gather(1, packed.target[:, None])[:, 0]
    found = Learner(low(head_dtype), model).score(one.tokens)[1:]
    np.testing.assert_allclose(found, expected.detach().numpy(), atol=1e-5)


def test_an_update_too_small_for_bfloat16_moves_the_masters_and_leaves_what_is_sent():
    model = tiny_model()
    learner = Learner(low(lr=1e-6), model)
    masters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    before = {name: tensor.clone() for name, tensor in learner.full_parameters()}
    learner.step(batch(varied_groups()))
    moved = torch.cat([(parameter - masters[name]).abs().flatten() for name, parameter in model.named_parameters()])
    assert (moved > 0).float().mean() > 0.9
    assert moved.max() < 2e-6
    sent = [(tensor != before[name]).flatten() for name, tensor in learner.full_parameters()]
    assert torch.cat(sent).float().mean() < 0.01


def test_small_updates_add_up_until_bfloat16_shows_them():
    model = tiny_model()
    learner = Learner(low(lr=1e-4), model)
    before = {name: tensor.clone() for name, tensor in learner.full_parameters()}
    for _ in range(20):
        learner.step(batch(varied_groups()))
    sent = [(tensor != before[name]).flatten() for name, tensor in learner.full_parameters()]
    assert torch.cat(sent).float().mean() > 0.5


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_sent_as_the_forward_pass_rounds_them(tied):
    model = tiny_model(tied)
    sent = dict(Learner(low(), model).full_parameters())
    expected = dict(rounded(model).named_parameters())
    assert list(sent) == list(expected) == [name for name, _ in as_sent(model, "bfloat16")]
    for (name, plan), tensor in zip(as_sent(model, "bfloat16"), sent.values(), strict=True):
        assert (plan.dtype, plan.shape) == (tensor.dtype, tensor.shape) == (BF16, expected[name].shape)
        torch.testing.assert_close(tensor, expected[name].detach(), rtol=0, atol=0)


def test_gradients_of_micro_batches_add_up_in_float32():
    groups = varied_groups()
    parts = [gradients(Learner(low(), tiny_model()), [each]) for each in groups]
    whole = gradients(Learner(low(), tiny_model()), *([each] for each in groups))
    for name, gradient in whole.items():
        assert gradient.dtype == torch.float32
        assert all((part[name].to(BF16) == part[name]).all() for part in parts), "one backward pass is bfloat16"
        expected = torch.stack([part[name].double() for part in parts]).sum(0)
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-7)


def test_gradients_are_those_of_float32_to_the_precision_of_bfloat16():
    exact = gradients(Learner(settings(), tiny_model()), varied_groups())
    found = gradients(Learner(low(), tiny_model()), varied_groups())
    for name, gradient in exact.items():
        assert (found[name] - gradient).norm() < 0.05 * gradient.norm(), name


def test_a_value_head_stays_in_float32():
    config = low()
    config.loss.advantage = "gae"
    learner = Learner(config, tiny_model())
    with torch.no_grad():
        learner._policy.value.weight.fill_(1 + 2**-12)  # bfloat16 would round it to 1
    packed = pack([group(trajectory("abc", "de"))], 5, 3, 64)
    expected = hidden_states(rounded(learner.model), packed).double().sum(1) * (1 + 2**-12)
    found = forward(learner._policy, BF16, packed, 1.0)[3]
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    assert learner.step(batch(varied_groups()))["value/loss"] > 0


def test_a_frozen_reference_is_kept_in_bfloat16_and_agrees_with_the_start():
    config = low()
    config.loss.kl.coefficient, config.loss.kl.reference = 0.1, "initial"
    learner = Learner(config, tiny_model())
    assert {parameter.dtype for parameter in learner._reference.parameters()} == {BF16}
    assert learner.step(batch(varied_groups()))["policy/kl_reference"] == 0.0
