"""Numbers that add up over micro-batches and ranks before they are divided once: typed reductions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor


class Reduction(StrEnum):
    SUM = "sum"
    MEAN = "mean"
    """Sum of numerators over sum of denominators; 0 where nothing was counted."""
    MAX = "max"


@dataclass(frozen=True)
class Measure:
    """A metric of one part of a batch, without a gradient."""

    reduction: Reduction
    value: Tensor
    """float64 scalar: the sum, the numerator, or the maximum."""
    count: Tensor | None = None
    """float64 scalar, the denominator of a mean."""

    def result(self) -> float:
        """The number, once every part is in."""
        if self.reduction is not Reduction.MEAN:
            return float(self.value)
        assert self.count is not None
        return float(self.value) / float(self.count) if float(self.count) else 0.0


def mean_over(values: Tensor, chosen: Tensor) -> Measure:
    """Mean of ``values`` ``[T]`` (bool or float) where ``chosen`` bool ``[T]``."""
    kept = torch.where(chosen, values.detach().double(), 0.0)
    return Measure(Reduction.MEAN, kept.sum(), chosen.double().sum())


def total(value: Tensor) -> Measure:
    """A scalar that adds up."""
    return Measure(Reduction.SUM, value.detach().double())


def merge(parts: Iterable[Mapping[str, Measure]]) -> dict[str, Measure]:
    """The measures of all parts as one, name by name; a name that a part lacks counts as nothing there."""
    merged: dict[str, Measure] = {}
    for part in parts:
        for name, new in part.items():
            old = merged.get(name)
            if old is None:
                merged[name] = new
            elif new.reduction is Reduction.MAX:
                merged[name] = Measure(Reduction.MAX, torch.maximum(old.value, new.value))
            else:
                count = None if new.count is None or old.count is None else old.count + new.count
                merged[name] = Measure(new.reduction, old.value + new.value, count)
    return merged
