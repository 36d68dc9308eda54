"""What every loss takes and gives: flat packed tensors ``[T]`` over the tokens of many sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossBatch:
    """Tokens of whole sequences, in any order. Behaviour, proximal and current log-probs are three arrays (C8)."""

    current: Tensor
    """Float ``[T]``, log π of the sampled token; the only tensor with a gradient."""
    behaviour: Tensor
    """Float ``[T]``, log μ of the sampler, processed (temperature and truncation applied)."""
    advantages: Tensor
    """Float ``[T]``."""
    mask: Tensor
    """Bool ``[T]`` (or numbers), True where the token is trained; what other tensors hold elsewhere is ignored."""
    segments: Tensor
    """Integer ``[T]``, sequence of the token, 0 … sequences − 1."""
    proximal: Tensor | None = None
    """Float ``[T]``, log π_old; None: μ takes its place in r, and w is 1."""
    weights: Tensor | None = None
    """Float ``[T]``, weight of a token in the loss, with global denominators (``loss/reduce.py``); None: those of this
    batch, by the aggregation that the loss's paper uses."""
    sequences: int | None = None
    """Number of sequences, empty ones included; None: the largest segment + 1."""
    statistics: Mapping[str, Tensor] | None = None
    """What a batch-wide loss took over all micro-batches and ranks; None: this batch is all there is."""

    @property
    def count(self) -> int:
        """Number of sequences."""
        if self.sequences is not None:
            return self.sequences
        return int(self.segments.max()) + 1 if len(self.segments) else 0

    @property
    def anchor(self) -> Tensor:
        """Log-probs that r is taken against, ``[T]``."""
        return self.behaviour if self.proximal is None else self.proximal

    def cleaned(self) -> LossBatch:
        """The same with log-probs and advantages 0 outside the mask: there they may be anything, NaN included."""
        size = self.current.shape
        for name in ("behaviour", "advantages", "mask", "segments", "proximal", "weights"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape != size:
                raise ValueError(f"{name} has shape {list(tensor.shape)}, expected {list(size)} like current")
        mask = self.mask.bool()

        def masked(tensor: Tensor) -> Tensor:
            return torch.where(mask, tensor, 0.0)

        return replace(
            self,
            mask=mask,
            segments=self.segments.long(),
            current=masked(self.current),
            behaviour=masked(self.behaviour.detach()),
            advantages=masked(self.advantages.detach()),
            proximal=None if self.proximal is None else masked(self.proximal.detach()),
            sequences=self.count,
        )

    def sequence_sum(self, values: Tensor) -> Tensor:
        """Sum over the trained tokens of each sequence, ``[sequences]``, taken in float64: any order gives the same."""
        kept = torch.where(self.mask, values, 0.0)
        sums = kept.new_zeros(self.count, dtype=torch.float64).index_add(0, self.segments, kept.double())
        return sums.to(kept.dtype)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Mean over the trained tokens of each sequence, ``[sequences]``; 0 for one without any."""
        lengths = self.sequence_sum(torch.ones_like(values))
        return self.sequence_sum(values) / lengths.clamp(min=1.0)


@dataclass(frozen=True)
class TokenLoss:
    """What a loss says of each token, ``[T]``; only ``loss`` has a gradient."""

    loss: Tensor
    slope: Tensor
    """Float, c in ∂loss/∂log π = −c·A for the token's own surrogate term: 1 on policy, 0 where it lost its gradient."""
    low: Tensor
    """Bool, the lower side of a clip, band or trust region decided. Never True where A = 0."""
    high: Tensor
    """Bool, the upper side or the cap decided. Never True where A = 0."""
    dual: Tensor
    """Bool, the dual clip or δ decided. Never True where A = 0."""
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    """Further numbers per token, averaged over the trained tokens under their names."""


def token_loss(loss: Tensor, slope: Tensor, advantages: Tensor, **flags: Tensor) -> TokenLoss:
    """A ``TokenLoss`` whose missing flags are all False and whose flags are off where A = 0."""
    signal = advantages != 0
    sides = {name: flags.pop(name, torch.zeros_like(signal)) & signal for name in ("low", "high", "dual")}
    return TokenLoss(loss, slope.detach(), **sides, extra=flags)
