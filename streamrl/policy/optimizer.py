"""AdamW (arXiv 1711.05101), its learning-rate schedule, and clipping by the global gradient norm."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from streamrl.policy.parallel import local
from streamrl.schema import TrainerConfig

SCHEDULES = ("constant", "linear", "cosine")


def make_optimizer(model: nn.Module, config: TrainerConfig) -> torch.optim.AdamW:
    """Fused AdamW over the (possibly sharded) parameters; vectors such as norms and biases do not decay."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def learning_rate(config: TrainerConfig, update: int, updates: int) -> float:
    """Learning rate of ``update`` (from 0) of ``updates``.

    It rises linearly over ``lr_warmup_steps`` updates, the last of which already has the full rate; ``linear`` and
    ``cosine`` then fall so that the rate *after* the last update would be 0. Raises ``ValueError`` for an unknown name.
    """
    if config.schedule not in SCHEDULES:
        raise ValueError(f"trainer.schedule must be one of {', '.join(SCHEDULES)}, got {config.schedule!r}")
    if update < config.lr_warmup_steps:
        return config.lr * (update + 1) / config.lr_warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = max(updates - config.lr_warmup_steps, 1)
    done = min((update - config.lr_warmup_steps) / span, 1.0)
    return config.lr * (1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done)))


def gradient_norm(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None) -> float:
    """2-norm of the whole gradient over all shards; collective over ``group``, equal on all ranks."""
    gradients = _gradients(parameters)
    if not gradients:
        return 0.0
    squares = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float64)).square().sum()
    if group is not None:
        dist.all_reduce(squares, group=group)
    return math.sqrt(float(squares))


def clip_gradients(parameters: Iterable[nn.Parameter], norm: float, limit: float) -> None:
    """Scale gradients in place so that their global ``norm`` is at most ``limit``; no collective."""
    gradients = _gradients(parameters)
    if norm > limit and gradients:
        torch._foreach_mul_(gradients, limit / norm)


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [local(p.grad) for p in parameters if p.grad is not None]
