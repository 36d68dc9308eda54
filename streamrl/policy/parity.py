"""The trainer's side of the parity gate (C7): its log-probs of what engines scored and sampled, and how it computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from streamrl.loss.truncation import Truncation
from streamrl.parity.records import Asked, TrainerFacts, TrainerReport
from streamrl.policy.learner import Learner

_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.linear)


class _Products(TorchDispatchMode):
    """Sees the dtype in which each matrix product comes out while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in _PRODUCTS:
            self.dtypes.append(result.dtype)
        return result


def answer(learner: Learner, asked: Sequence[Asked]) -> TrainerReport:
    """Log-probs of each row by the rule that it is asked for. Collective."""
    rows: list[list[float]] = [[]] * len(asked)
    for rule in dict.fromkeys(each.semantics for each in asked):
        own = [index for index, each in enumerate(asked) if each.semantics == rule]
        truncation = Truncation(rule.top_k, rule.top_p, rule.min_p) if rule.truncated else None
        scores = learner.score_all([asked[index].tokens for index in own], rule.temperature, truncation)
        for index, row in zip(own, scores, strict=True):
            rows[index] = row.tolist()
    return TrainerReport(rows, observe(learner))


def observe(learner: Learner) -> TrainerFacts:
    """Watch one forward pass: its first matrix product is of the body, its last of the head. Collective."""
    model = learner.model
    with _Products() as watch:
        learner.score([0, 0])
    first, last = (str(dtype).removeprefix("torch.") for dtype in (watch.dtypes[0], watch.dtypes[-1]))
    return TrainerFacts(first, last, model.get_output_embeddings().weight is model.get_input_embeddings().weight)
