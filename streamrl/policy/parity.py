"""The trainer's side of the parity gate (C7): its log-probs of what engines scored and sampled, and how it computes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from streamrl.loss.truncation import Truncation
from streamrl.parity.records import Asked, TrainerFacts, TrainerReport
from streamrl.parity.weights import Perturbed
from streamrl.policy.learner import Learner
from streamrl.policy.parallel import local, rows_of_rank
from streamrl.policy.trained import sent_parameters

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
    """Log-probs of each row by the rule, and under the weights, that it is asked for. Collective."""
    rows: list[list[float]] = [[]] * len(asked)
    for rule, perturbed in dict.fromkeys((each.semantics, each.rehearsed) for each in asked):
        own = [i for i, each in enumerate(asked) if (each.semantics, each.rehearsed) == (rule, perturbed)]
        truncation = Truncation(rule.top_k, rule.top_p, rule.min_p) if rule.truncated else None
        with rehearsed(learner) if perturbed else contextlib.nullcontext():
            scores = learner.score_all([asked[index].tokens for index in own], rule.temperature, truncation)
        for index, row in zip(own, scores, strict=True):
            rows[index] = row.tolist()
    return TrainerReport(rows, observe(learner))


@contextlib.contextmanager
def rehearsed(learner: Learner) -> Iterator[None]:
    """Within this the trainer has the weights that engines rehearse with, for adapters. Collective."""
    sent = Perturbed({name: tensor.clone() for name, tensor in learner.full_parameters()})
    parameters = sent_parameters(learner.model)
    own = {name: local(parameter).detach() for name, parameter in parameters.items()}
    kept = {name: shard.clone() for name, shard in own.items()}
    try:
        for name, shard in own.items():
            shard.copy_(rows_of_rank(sent[name], parameters[name]))
        yield
    finally:
        for name, shard in own.items():
            shard.copy_(kept[name])


def observe(learner: Learner) -> TrainerFacts:
    """Watch one forward pass: its first matrix product is of the body, its last of the head. Collective."""
    model = learner.model
    with _Products() as watch:
        learner.score([0, 0])
    first, last = (str(dtype).removeprefix("torch.") for dtype in (watch.dtypes[0], watch.dtypes[-1]))
    return TrainerFacts(first, last, model.get_output_embeddings().weight is model.get_input_embeddings().weight)
