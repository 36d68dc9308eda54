"""Random packed batches with everything that goes wrong in practice, for the tests of losses and corrections."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from streamrl.loss import LossBatch

torch.set_num_threads(1)


@dataclass
class Case:
    """Arrays ``[T]``; a plain container, so that derivations need no torch."""

    current: np.ndarray
    proximal: np.ndarray
    behaviour: np.ndarray
    advantages: np.ndarray
    mask: np.ndarray
    segments: np.ndarray
    weights: np.ndarray
    sequences: int

    def rows(self):
        """Indices of the trained tokens of each sequence."""
        return [np.flatnonzero((self.segments == i) & self.mask) for i in range(self.sequences)]

    def batch(self, dtype=torch.float64, **changes) -> LossBatch:
        fields = {
            k: torch.tensor(getattr(self, k)).to(dtype) for k in ("proximal", "behaviour", "advantages", "weights")
        }
        current = torch.tensor(self.current).to(dtype).requires_grad_()
        fields |= {"mask": torch.tensor(self.mask), "segments": torch.tensor(self.segments)}
        return LossBatch(current, **(fields | {"sequences": self.sequences} | changes))

    def take(self, chosen: np.ndarray) -> Case:
        """These tokens only, in this order."""
        picked = {k: v[chosen] for k, v in vars(self).items() if isinstance(v, np.ndarray)}
        return Case(**picked, sequences=self.sequences)


def random_case(seed: int, *, extreme: bool = True, per_token: bool = False, spread: float = 0.3) -> Case:
    """Sequences of length 0, 1 and more, holes in the mask, one wholly masked, garbage where nothing is trained."""
    rng = np.random.default_rng(seed)
    lengths = np.array([0, 1, *rng.integers(1, 9, size=7), 5])
    segments = np.repeat(np.arange(len(lengths)), lengths)
    total = len(segments)
    behaviour = -rng.gamma(1.5, 1.0, total)
    proximal = np.minimum(behaviour + rng.normal(0, spread, total), -1e-4)
    current = np.minimum(proximal + rng.normal(0, spread, total), -1e-4)
    advantages = rng.choice([-1.5, -1.0, -0.3, 0.0, 0.7, 1.0, 2.0], size=total if per_token else len(lengths))
    if not per_token:
        advantages = advantages[segments]
    mask = rng.random(total) < 0.8
    mask[segments == len(lengths) - 1] = False
    if extreme:
        for array in (current, proximal, behaviour):
            array[rng.random(total) < 0.06] -= rng.uniform(2, 30)
            array[rng.random(total) < 0.03] = -np.inf
        current[~mask] = rng.choice([np.nan, -np.inf, 0.0, -3.0], size=(~mask).sum())
        behaviour[~mask], proximal[~mask], advantages[~mask] = np.nan, np.inf, np.nan
    return Case(current, proximal, behaviour, advantages, mask, segments, rng.uniform(0.01, 0.2, total), len(lengths))


SEEDS = range(40)
