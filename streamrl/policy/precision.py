"""What the trainer computes in, and what it keeps: float32 master weights, a body in ``model.dtype``.

With ``bfloat16`` every forward pass sees the weights rounded to bfloat16, exactly as they are sent to the engines; each
backward pass leaves one bfloat16 gradient per weight, and these are summed over micro-batches and ranks in float32.
Optimizer steps too small for a bfloat16 weight to show stay in the master weights until enough of them add up. Several
ranks leave the rounding to FSDP2, one rank does the same here. A value head stays in float32. Weights that are frozen
beside adapters have no master: they are loaded in ``model.dtype``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

MASTER_DTYPE = "float32"
"""Of what is trained, whatever it computes in."""


def compute_dtype(name: str) -> torch.dtype:
    """The dtype of ``model.dtype``."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def mixed_precision(dtype: torch.dtype) -> MixedPrecisionPolicy:
    """How FSDP2 computes in ``dtype`` over float32 parameters."""
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


def forward(policy: nn.Module, dtype: torch.dtype, *inputs: Any) -> tuple[Tensor, ...]:
    """``policy(*inputs)`` with the parameters of its ``model`` in ``dtype``; their gradients reach the masters."""
    outputs: tuple[Tensor, ...]
    if isinstance(policy, FSDPModule):  # it casts what it gathers
        outputs = policy(*inputs)
        return outputs
    rounded = {
        name: parameter.to(dtype)
        for name, parameter in policy.named_parameters()
        if name.startswith("model.") and parameter.dtype != dtype
    }
    outputs = torch.func.functional_call(policy, rounded, inputs) if rounded else policy(*inputs)
    return outputs


@torch.no_grad()
def freeze(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """``model`` with its parameters in ``dtype``, not to be trained; buffers (rotary frequencies) stay as they are."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)
    return model
