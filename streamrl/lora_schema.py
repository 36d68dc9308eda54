"""The settings ``model.lora.*``; a part of the tree in ``streamrl/schema.py``."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class LoraConfig:
    """Train low-rank adapters (LoRA, arXiv 2106.09685) in place of the whole model (docs/lora.md)."""

    rank: int = 0
    """r of the two factors that each adapted layer gets. 0: off, all weights are trained."""
    alpha: float = 32.0
    """An adapted layer computes ``W·x + alpha/rank · B·A·x``."""
    targets: list[str] = field(default_factory=list)
    """Linear layers of the blocks to adapt, by the end of their names, such as ``q_proj``. Empty: all of them."""
