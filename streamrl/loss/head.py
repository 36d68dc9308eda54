"""From the last hidden state to logits: the head that the trainer and the embedded engine share.

The product is float32 by default whatever the dtype of the body (MiniMax-M1, arXiv 2506.13585; ScaleRL, arXiv
2510.13786): a bfloat16 logit between 16 and 32 has a spacing of 0.125, which no later upcast can undo. Operands in
bfloat16 are exact in float32, so that two float32 heads over the same bfloat16 weights agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK_ROWS = 1 << 13
"""Rows of a low-precision weight that exist in float32 at once: 32 MiB for a hidden size of 1024."""


@dataclass(frozen=True)
class HeadForm:
    """What a model does to the product of hidden state and weight, and how the product is rounded."""

    scale: float = 1.0
    """Factor on logits: Cohere multiplies them, Granite divides."""
    cap: float | None = None
    """Logits become ``cap · tanh(logits / cap)``, as in Gemma."""
    dtype: torch.dtype = torch.float32
    """Of the product as it comes out; anything but float32 loses bits."""

    @staticmethod
    def of(config: Any, dtype: str = "float32") -> HeadForm:
        """The form that a transformers config describes."""
        text = config.get_text_config()
        factor, divisor = (float(getattr(text, name, None) or 1) for name in ("logit_scale", "logits_scaling"))
        return HeadForm(factor / divisor, getattr(text, "final_logit_softcapping", None), getattr(torch, dtype))

    def operand(self, weight: Tensor) -> Tensor:
        """``weight`` as many calls of ``logits`` want it: upcast once where each would do so."""
        return _upcast(weight) if self.dtype == torch.float32 and not _accumulates(weight) else weight

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Logits ``[n, V]`` of ``hidden`` ``[n, H]``, ``weight`` ``[V, H]``, ``bias`` ``[V]``, in ``out`` if given.

        float32 (float64 for float64 weights). Without gradient: ``loss/logprobs.py`` has its own backward pass.
        """
        if out is None:
            out = torch.empty(len(hidden), len(weight), dtype=wide(weight), device=hidden.device)
        if self.dtype != torch.float32:
            shift = None if bias is None else bias.to(self.dtype)
            out.copy_(torch.nn.functional.linear(hidden.to(self.dtype), weight.to(self.dtype), shift))
        else:
            _product(hidden, weight, out)
            if bias is not None:
                out.add_(bias)
        if self.scale != 1:
            out.mul_(self.scale)
        return out if self.cap is None else out.div_(self.cap).tanh_().mul_(self.cap)

    def slope(self, logits: Tensor) -> Tensor | None:
        """∂ logits / ∂ (scale · product), from the logits ``[n, V]`` as ``logits`` gave them; None: 1 everywhere."""
        return None if self.cap is None else (logits / self.cap).square_().neg_().add_(1)


def pull(gradient: Tensor, hidden: Tensor, weight: Tensor, d_weight: Tensor | None) -> Tensor:
    """The backward pass of the product: adds to ``d_weight`` ``[V, H]``, returns the gradient of ``hidden`` ``[n, H]``.

    Without ``d_weight`` the weight is frozen. ``gradient`` ``[n, V]`` is that of the product; sums are float32 (float64
    for float64 weights).
    """
    if _accumulates(weight) and hidden.dtype == weight.dtype:
        low = gradient.to(weight.dtype)
        if d_weight is not None:
            for rows in _blocks(weight):
                d_weight[rows] += torch.mm(low[:, rows].T, hidden, out_dtype=torch.float32)
        return torch.mm(low, weight, out_dtype=torch.float32)
    body = hidden.to(wide(weight))
    d_hidden = torch.zeros_like(body)
    for rows in _blocks(weight):
        d_hidden.addmm_(gradient[:, rows], _upcast(weight[rows]))
        if d_weight is not None:
            d_weight[rows].addmm_(gradient[:, rows].T, body)
    return d_hidden


def wide(weight: Tensor) -> torch.dtype:
    """What sums over ``weight`` are kept in."""
    return torch.promote_types(weight.dtype, torch.float32)


def _product(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
    if _accumulates(weight) and hidden.dtype == weight.dtype:
        out.copy_(torch.mm(hidden, weight.T, out_dtype=torch.float32))
        return
    body = hidden.to(wide(weight))
    for rows in _blocks(weight):
        torch.mm(body, _upcast(weight[rows]).T, out=out[:, rows])


def _accumulates(weight: Tensor) -> bool:
    """Whether the device multiplies low-precision operands into a float32 result; torch 2.13 does on CUDA only."""
    return weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16)


def _blocks(weight: Tensor) -> list[slice]:
    """Rows to convert at once; all of them where there is nothing to convert."""
    rows = len(weight) if weight.dtype == wide(weight) else BLOCK_ROWS
    return [slice(start, start + rows) for start in range(0, len(weight), rows)]


def _upcast(tensor: Tensor) -> Tensor:
    """At least float32; no copy where it already is."""
    return tensor.to(wide(tensor))
