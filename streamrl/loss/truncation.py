"""Truncated sampling seen from the trainer: which tokens the sampler could have chosen, from the trainer's own logits.

The order is the engine's (``types.SamplingParams``): min-p, then top-k, then top-p over what is left, renormalised.
Min-p and top-k keep every token that ties with the last one; top-p keeps the fewest most likely tokens that reach its
mass, the one that crosses the bound included, and of equal ones those with the lower token id. So whatever the rules,
the kept set of a row is all logits over a *floor*, and of those equal to it the ones up to a *last* token id.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from streamrl.schema import SamplingConfig

SHORTLIST = 1024
"""Most likely tokens that top-p looks at before it sorts a whole row."""


@dataclass(frozen=True)
class Truncation:
    """How all requests of a run truncate. 0, 1.0 and 0.0 switch a rule off."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @staticmethod
    def of(sampling: SamplingConfig) -> Truncation | None:
        """What the settings say; None where nothing is truncated."""
        found = Truncation(sampling.top_k, sampling.top_p, sampling.min_p)
        return None if found == Truncation() else found

    def bounds(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Floor (as ``logits``) and last token id (int64), both ``[n]``, of ``logits`` ``[n, V]`` after temperature."""
        count, vocabulary = logits.shape
        floor = logits.new_full((count,), -torch.inf)
        if self.min_p > 0:
            floor = logits.amax(1) + math.log(self.min_p)
        if self.top_k > 0:
            floor = torch.maximum(floor, logits.topk(min(self.top_k, vocabulary), dim=1).values[:, -1])
        last = torch.full_like(floor, vocabulary, dtype=torch.int64)
        if self.top_p >= 1 or not count:
            return floor, last
        total = logits.masked_fill(logits < floor[:, None], -torch.inf).logsumexp(1)
        crossing, wanted = self._nucleus(logits, floor, total)
        tied = logits == crossing[:, None]
        # Few rows end in a tie that top-p cuts through.
        for row in (tied.sum(1) > wanted).nonzero().flatten().tolist():
            last[row] = tied[row].nonzero().flatten()[wanted[row] - 1]
        return crossing, last

    def _nucleus(self, logits: Tensor, floor: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """The logit ``[n]`` that crosses ``top_p``, and how many of those equal to it are kept, int64 ``[n]``."""
        crossing, wanted = self._among(min(SHORTLIST, logits.shape[1]), logits, floor, total)
        more = (wanted == 0).nonzero().flatten()
        if len(more):
            crossing[more], wanted[more] = self._among(logits.shape[1], logits[more], floor[more], total[more])
        return crossing, wanted

    def _among(self, size: int, logits: Tensor, floor: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """The same from the ``size`` largest logits of each row; 0 kept where these may not reach the mass."""
        ordered = logits.topk(size, dim=1).values
        probabilities = (ordered.double() - total[:, None]).exp()
        before = probabilities.cumsum(1) - probabilities
        kept = ((before < self.top_p) & (ordered >= floor[:, None])).sum(1).clamp(min=1)
        crossing = ordered.gather(1, kept[:, None] - 1)
        wanted = kept - (ordered > crossing).sum(1)
        if size < logits.shape[1]:
            wanted.masked_fill_(kept == size, 0)
        return crossing[:, 0], wanted


def dropped(logits: Tensor, floor: Tensor, last: Tensor) -> Tensor:
    """Bool ``[n, V]``, True where ``Truncation.bounds`` leaves a token out."""
    tokens = torch.arange(logits.shape[1], device=logits.device)
    return (logits < floor[:, None]) | ((logits == floor[:, None]) & (tokens > last[:, None]))
