"""Log-probs of given tokens through an fp32 head, in chunks: never ``[T, V]`` logits for all tokens at once.

The head runs in float32 whatever the dtype of the body (MiniMax-M1, arXiv 2506.13585; ScaleRL, arXiv 2510.13786): a
bfloat16 logit between 16 and 32 has a spacing of 0.125, which no later upcast can undo.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 1 << 24
"""Logits held at once unless ``chunk`` says otherwise: 64 MiB in float32."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    bias: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``log softmax((hidden @ weightᵀ + bias) / temperature)[targets]`` and the entropy of that distribution.

    ``hidden`` ``[T, H]``, ``weight`` ``[V, H]``, ``bias`` ``[V]``, ``targets`` int64 ``[T]``; both results are float32
    ``[T]`` (float64 for float64 input). ``chunk`` is the number of tokens whose logits exist at once. The backward pass
    recomputes logits chunk by chunk and accumulates gradients of weight and bias in float32; entropy is a diagnostic
    without gradient. Raises ``ValueError`` for a temperature that is not positive: greedy sampling has no gradient.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive to train on log-probs, got {temperature}")
    chunk = chunk or max(1, CHUNK_ELEMENTS // weight.shape[0])
    return _TokenLogprobs.apply(hidden, weight, bias, targets, temperature, chunk)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        head, shift = _upcast(weight), _upcast(bias)
        assert head is not None
        logprobs = torch.empty(targets.shape, dtype=head.dtype, device=hidden.device)
        entropy, normaliser = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for span in _spans(len(targets), chunk):
            logits = _logits(hidden[span], head, shift, temperature)
            normaliser[span] = torch.logsumexp(logits, dim=-1)
            every = logits.sub_(normaliser[span, None])
            logprobs[span] = every.gather(1, targets[span, None]).squeeze(1)
            # −Σ p·log p: the equal logsumexp − Σ p·z cancels where one token has nearly all the mass.
            entropy[span] = -torch.linalg.vecdot(torch.exp(every), every)
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normaliser = ctx.saved_tensors
        head, shift = _upcast(weight), _upcast(bias)
        assert head is not None
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(head)
        d_bias = None if shift is None else torch.zeros_like(shift)
        for span in _spans(len(targets), ctx.chunk):
            body = hidden[span].to(head.dtype)
            probs = torch.exp(_logits(body, head, shift, ctx.temperature) - normaliser[span, None])
            # d logp/d logits = onehot − softmax; the logits were divided by the temperature.
            scale = gradient[span] / ctx.temperature
            d_logits = probs.mul_(-scale[:, None]).scatter_add_(1, targets[span, None], scale[:, None])
            d_hidden[span] = (d_logits @ head).to(hidden.dtype)
            d_weight.addmm_(d_logits.T, body)
            if d_bias is not None:
                d_bias += d_logits.sum(0)
        return (
            d_hidden,
            d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def _upcast(tensor: Tensor | None) -> Tensor | None:
    """At least float32; no copy where it already is."""
    return None if tensor is None else tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _logits(hidden: Tensor, head: Tensor, shift: Tensor | None, temperature: float) -> Tensor:
    logits = torch.nn.functional.linear(hidden.to(head.dtype), head, shift)
    return logits if temperature == 1.0 else logits.div_(temperature)


def _spans(length: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, length)) for start in range(0, length, chunk)]
