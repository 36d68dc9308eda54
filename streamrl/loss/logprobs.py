"""Log-probs of given tokens through the head, in chunks: never ``[T, V]`` logits for all tokens at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from streamrl.loss.head import HeadForm, pull, wide
from streamrl.loss.truncation import Truncation, dropped

CHUNK_ELEMENTS = 1 << 24
"""Logits held at once unless ``chunk`` says otherwise: 64 MiB in float32."""
PLAIN = HeadForm()


class TokenLogprobs(NamedTuple):
    """What a policy says of given tokens, ``[T]`` each."""

    logprobs: Tensor
    """float32 (float64 for float64 weights); the only one with a gradient."""
    entropy: Tensor
    """Of the distribution that the log-prob belongs to, nats."""
    outside: Tensor
    """Bool, True where truncation would not have let the token be sampled."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    bias: Tensor | None = None,
    chunk: int | None = None,
    *,
    form: HeadForm = PLAIN,
    truncation: Truncation | None = None,
) -> TokenLogprobs:
    """``log softmax(logits / temperature)[targets]`` with the logits of ``form``, and the entropy of that distribution.

    ``hidden`` ``[T, H]``, ``weight`` ``[V, H]``, ``bias`` ``[V]``, ``targets`` int64 ``[T]``. ``chunk`` is the number
    of tokens whose logits exist at once. With ``truncation`` the distribution is renormalised over the tokens that it
    keeps and the target, which was sampled after all; the kept set is a constant for the gradient.

    The backward pass recomputes logits chunk by chunk and sums gradients of weight and bias, unless they are frozen, in
    float32; entropy is a diagnostic without gradient. Raises ``ValueError`` for a temperature that is not positive:
    greedy sampling has no gradient.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive to train on log-probs, got {temperature}")
    # Finding the kept set takes about three more copies of the logits.
    chunk = chunk or max(1, CHUNK_ELEMENTS // (weight.shape[0] * (1 if truncation is None else 4)))
    return TokenLogprobs(*_Function.apply(hidden, weight, bias, targets, temperature, chunk, form, truncation))


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk: int,
        form: HeadForm,
        truncation: Truncation | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprobs = torch.empty(targets.shape, dtype=wide(weight), device=hidden.device)
        entropy, normaliser, floor = (torch.empty_like(logprobs) for _ in range(3))
        last, outside = torch.empty_like(targets), torch.zeros_like(targets, dtype=torch.bool)
        room = _room(targets, weight, chunk)
        for span in _spans(len(targets), chunk):
            logits = form.logits(hidden[span], weight, bias, out=room[: len(targets[span])]).div_(temperature)
            gone = None
            if truncation is not None:
                floor[span], last[span] = truncation.bounds(logits)
                gone = dropped(logits, floor[span], last[span])
                outside[span] = gone.gather(1, targets[span, None]).squeeze(1)
                gone.scatter_(1, targets[span, None], False)
                logits.masked_fill_(gone, -torch.inf)
            normaliser[span] = torch.logsumexp(logits, dim=-1)
            every = logits.sub_(normaliser[span, None])
            logprobs[span] = every.gather(1, targets[span, None]).squeeze(1)
            # −Σ p·log p: the equal logsumexp − Σ p·z cancels where one token has nearly all the mass.
            probs = torch.exp(every)
            entropy[span] = -torch.linalg.vecdot(probs, every if gone is None else every.masked_fill_(gone, 0.0))
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, floor, last)
        ctx.temperature, ctx.chunk, ctx.form, ctx.truncates = temperature, chunk, form, truncation is not None
        ctx.mark_non_differentiable(entropy, outside)
        return logprobs, entropy, outside

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _entropy: Tensor, _outside: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normaliser, floor, last = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        sums = {"dtype": wide(weight), "device": weight.device}
        d_weight = torch.zeros(weight.shape, **sums) if ctx.needs_input_grad[1] else None  # a frozen head has none
        d_bias = torch.zeros(bias.shape, **sums) if ctx.needs_input_grad[2] else None
        room = _room(targets, weight, ctx.chunk)
        for span in _spans(len(targets), ctx.chunk):
            chosen = targets[span, None]
            logits = ctx.form.logits(hidden[span], weight, bias, out=room[: len(chosen)])
            slope = ctx.form.slope(logits)
            logits.div_(ctx.temperature)
            gone = dropped(logits, floor[span], last[span]).scatter_(1, chosen, False) if ctx.truncates else None
            probs = logits.sub_(normaliser[span, None]).exp_()
            if gone is not None:
                probs.masked_fill_(gone, 0.0)
            # d logp/d logits = onehot − softmax; the logits were divided by the temperature.
            scale = gradient[span, None] * (ctx.form.scale / ctx.temperature)
            d_logits = probs.mul_(-scale).scatter_add_(1, chosen, scale)
            if slope is not None:
                d_logits.mul_(slope)
            d_hidden[span] = pull(d_logits, hidden[span], weight, d_weight)
            if d_bias is not None:
                d_bias += d_logits.sum(0)
        of_weight = None if d_weight is None else d_weight.to(weight.dtype)
        of_bias = None if d_bias is None else d_bias.to(bias.dtype)
        return d_hidden, of_weight, of_bias, *(None,) * 5


def _room(targets: Tensor, weight: Tensor, chunk: int) -> Tensor:
    """Where the logits of every chunk are written, one after the other."""
    return torch.empty(min(chunk, len(targets)), len(weight), dtype=wide(weight), device=weight.device)


def _spans(length: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, length)) for start in range(0, length, chunk)]
