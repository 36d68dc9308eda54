"""The objective: policy losses, corrections, aggregation, advantages, KL and diagnostics as pure functions.

Names are imported on first use: the buffer needs advantages and weights, and no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "policy_loss": "policy",
    "evaluate": "policy",
    "batch_statistics": "policy",
    "register_loss": "policy",
    "loss_params": "policy",
    "LossBatch": "batch",
    "TokenLoss": "batch",
    "Measure": "measures",
    "Reduction": "measures",
    "merge": "measures",
    "correct": "corrections",
    "packed_weights": "aggregate",
    "token_weights": "reduce",
}
_LIGHT = {"OBJECTIVES": "objectives", "Corrections": "objective_params", "Level": "objective_params"}
__all__ = [*_HOMES, *_LIGHT]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"streamrl.loss.{_HOMES[name]}"), name)
    if name in _LIGHT:
        return getattr(importlib.import_module(f"streamrl.{_LIGHT[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
