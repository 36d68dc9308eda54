"""The loss of a value head, the critic behind GAE (PPO, arXiv 1707.06347)."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(values: Tensor, before: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Squared error ``½·(V − G)²`` of each token ``[T]``, with a gradient through ``values``.

    With a finite ``clip`` the larger of it and the error of V kept within ``clip`` of its value before the update, so
    that no token moves V far in one step. ``before`` and ``returns`` are constants.
    """
    before, returns = before.detach(), returns.detach()
    free = 0.5 * (values - returns).square()
    held = before + (values - before).clamp(-clip, clip)
    return torch.maximum(free, 0.5 * (held - returns).square())
