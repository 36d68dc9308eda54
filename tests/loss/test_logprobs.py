"""The chunked fp32 head against float64 log_softmax, its gradient, and its memory bound."""

import pytest
import torch
from torch.nn.functional import log_softmax
from transformers import CohereConfig, Gemma2Config, GraniteConfig, Qwen3Config

from streamrl.loss import head
from streamrl.loss.head import HeadForm
from streamrl.loss.logprobs import token_logprobs

torch.set_num_threads(1)


def inputs(tokens=13, hidden=8, vocab=11, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    return (
        (scale * torch.randn(tokens, hidden, generator=generator)).to(dtype),
        torch.randn(vocab, hidden, generator=generator).to(dtype),
        torch.randn(vocab, generator=generator).to(dtype),
        torch.randint(vocab, (tokens,), generator=generator),
    )


def reference(hidden, weight, bias, targets, temperature):
    logits = (hidden.double() @ weight.double().T + (0 if bias is None else bias.double())) / temperature
    every = log_softmax(logits, dim=-1)
    return every.gather(1, targets[:, None]).squeeze(1), -(every.exp() * every).sum(-1)


@pytest.mark.parametrize("chunk", [None, 1, 5, 13])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_entropy_match_float64_log_softmax(chunk, temperature):
    hidden, weight, bias, targets = inputs(scale=8.0)
    logprobs, entropy, _ = token_logprobs(hidden, weight, targets, temperature, bias, chunk)
    expected, expected_entropy = reference(hidden, weight, bias, targets, temperature)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=1e-5, rtol=1e-6)


def test_the_head_runs_in_float32_for_a_bfloat16_body():
    hidden, weight, _, targets = inputs(tokens=200, hidden=64, dtype=torch.bfloat16, scale=3.0)
    logprobs = token_logprobs(hidden, weight, targets, 1.0).logprobs
    expected, _ = reference(hidden, weight, None, targets, 1.0)
    # A bfloat16 head is wrong by 1e-2 and more on logits of this size.
    torch.testing.assert_close(logprobs.double(), expected, atol=2e-5, rtol=1e-6)


@pytest.mark.parametrize("chunk", [4, None])
def test_gradients_are_those_of_finite_differences(chunk):
    hidden, weight, bias, targets = inputs(dtype=torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]
    assert torch.autograd.gradcheck(
        lambda h, w, b: token_logprobs(h, w, targets, 0.7, b, chunk)[0], leaves, eps=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_frozen_head_gets_no_gradient_and_passes_the_same_one_on(dtype):
    found = []
    for trained in (True, False):
        hidden, weight, bias, targets = inputs(dtype=dtype)
        hidden.requires_grad_()
        weight.requires_grad_(trained), bias.requires_grad_(trained)
        token_logprobs(hidden, weight, targets, 0.7, bias).logprobs.sum().backward()
        found.append(hidden.grad)
        assert (weight.grad is not None, bias.grad is not None) == (trained, trained)
    assert torch.equal(*found)


def test_a_tied_weight_gets_the_gradient_of_both_uses():
    _, weight, _, targets = inputs(vocab=11, hidden=8, dtype=torch.float64)
    weight.requires_grad_()
    embedded = weight[targets.flip(0)]
    token_logprobs(embedded, weight, targets, 1.0)[0].sum().backward()
    clone = weight.detach().clone().requires_grad_()
    reference(clone[targets.flip(0)], clone, None, targets, 1.0)[0].sum().backward()
    torch.testing.assert_close(weight.grad, clone.grad)


def test_the_weight_gradient_of_a_bfloat16_head_accumulates_in_float32():
    hidden, weight, _, targets = inputs(tokens=512, dtype=torch.bfloat16)
    weight.requires_grad_()
    token_logprobs(hidden, weight, targets, 1.0, chunk=1)[0].sum().backward()
    clone = weight.detach().double().requires_grad_()
    reference(hidden, clone, None, targets, 1.0)[0].sum().backward()
    # One rounding to bfloat16 (2^-9 relative) at the very end, not 512 of them.
    assert weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(weight.grad.double(), clone.grad, rtol=2**-8, atol=1e-3)


def test_entropy_has_no_gradient():
    hidden, weight, _, targets = inputs()
    assert not token_logprobs(hidden.requires_grad_(), weight, targets, 1.0).entropy.requires_grad


def test_no_targets_give_zero_gradients():
    hidden, weight, _, _ = inputs(tokens=0)
    token_logprobs(hidden, weight.requires_grad_(), torch.zeros(0, dtype=torch.int64), 1.0).logprobs.sum().backward()
    assert not weight.grad.any()


def test_logits_of_all_tokens_never_exist_at_once(monkeypatch):
    hidden, weight, _, targets = inputs(tokens=64)
    rows = []
    product = head._product
    monkeypatch.setattr(head, "_product", lambda h, *rest: rows.append(len(h)) or product(h, *rest))
    token_logprobs(hidden.requires_grad_(), weight, targets, 1.0, chunk=10)[0].sum().backward()
    assert rows == 2 * [10, 10, 10, 10, 10, 10, 4]


def test_a_low_precision_weight_is_never_whole_in_float32(monkeypatch):
    hidden, weight, _, targets = inputs(vocab=40, dtype=torch.bfloat16)
    monkeypatch.setattr(head, "BLOCK_ROWS", 16)
    rows = []
    upcast = head._upcast
    monkeypatch.setattr(head, "_upcast", lambda w: rows.append(len(w)) or upcast(w))
    result = token_logprobs(hidden.requires_grad_(), weight.requires_grad_(), targets, 1.0)
    result.logprobs.sum().backward()
    assert set(rows) == {16, 8}
    clones = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    expected, _ = reference(*clones, None, targets, 1.0)
    expected.sum().backward()
    torch.testing.assert_close(result.logprobs.double(), expected, atol=1e-5, rtol=1e-6)
    for own, clone in zip((hidden, weight), clones, strict=True):
        torch.testing.assert_close(own.grad.double(), clone.grad, rtol=2**-8, atol=1e-3)


SCALED = HeadForm(scale=0.25)
CAPPED = HeadForm(scale=2.0, cap=3.0)


@pytest.mark.parametrize("form", [SCALED, CAPPED])
def test_logits_are_scaled_and_capped_before_the_temperature(form):
    hidden, weight, bias, targets = inputs(scale=2.0)
    logits = form.scale * (hidden.double() @ weight.double().T + bias.double())
    logits = logits if form.cap is None else form.cap * (logits / form.cap).tanh()
    expected = log_softmax(logits / 0.7, dim=-1).gather(1, targets[:, None]).squeeze(1)
    found = token_logprobs(hidden, weight, targets, 0.7, bias, form=form).logprobs
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("form", [SCALED, CAPPED])
def test_gradients_go_through_scale_and_cap(form):
    hidden, weight, bias, targets = inputs(dtype=torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]
    assert torch.autograd.gradcheck(
        lambda h, w, b: token_logprobs(h, w, targets, 0.7, b, 4, form=form)[0], leaves, eps=1e-6, atol=1e-7
    )


def test_the_form_is_that_of_the_models_config():
    assert HeadForm.of(CohereConfig(logit_scale=0.0625)) == HeadForm(scale=0.0625)
    assert HeadForm.of(GraniteConfig(logits_scaling=8.0)) == HeadForm(scale=0.125)
    assert HeadForm.of(Gemma2Config(final_logit_softcapping=30.0)) == HeadForm(cap=30.0)
    assert HeadForm.of(Qwen3Config(), "bfloat16") == HeadForm(dtype=torch.bfloat16)


def test_a_bfloat16_head_rounds_its_logits_and_nothing_else():
    hidden, weight, _, targets = inputs(tokens=50, hidden=64, dtype=torch.bfloat16, scale=3.0)
    logits = (hidden.float() @ weight.float().T).bfloat16().double()
    expected = log_softmax(logits, dim=-1).gather(1, targets[:, None]).squeeze(1)
    found = token_logprobs(hidden, weight, targets, 1.0, form=HeadForm(dtype=torch.bfloat16)).logprobs
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-6)


def test_a_temperature_of_zero_is_refused():
    hidden, weight, _, targets = inputs()
    with pytest.raises(ValueError, match="temperature"):
        token_logprobs(hidden, weight, targets, 0.0)
