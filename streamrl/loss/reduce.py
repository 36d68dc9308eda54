"""How per-token losses add up to the loss of a batch: one weight per trajectory with global denominators (C8)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def token_weights(counts: list[np.ndarray], name: str, length: int | None = None) -> list[np.ndarray]:
    """Weight float64 ``[G_i]`` of every token of a trajectory, so that *loss = Σ weight × per-token loss*.

    ``counts`` ``[G_i]`` are the *sampled* tokens of each trajectory of the whole batch, over all ranks. Tokens that get
    no loss (zero advantage, masked as stale) and trajectories that are dropped later stay in the denominators, so that
    rejecting data never raises the learning rate of the rest. ``name`` is ``loss.aggregation`` of the settings, with N
    sampled tokens and S trajectories in P groups, n_i tokens in trajectory i and N_g in its group:

    - ``token_mean``: 1/N (DAPO, arXiv 2503.14476).
    - ``sequence_mean_token_mean``: 1/(S·n_i) (GRPO, arXiv 2402.03300).
    - ``sequence_mean_token_sum``: 1/S (REINFORCE on whole trajectories; Dr.GRPO up to its constant, arXiv 2503.20783).
    - ``constant_length``: 1/(S·L) with L = ``length``, a constant such as the most tokens that may be sampled (Dr.GRPO,
      arXiv 2503.20783). It never depends on how wide a batch happens to be padded.
    - ``prompt_mean``: 1/(P·N_g) (ScaleRL, arXiv 2510.13786).

    A trajectory without sampled tokens weighs 0 where its own length would divide, and counts in S. A group without any
    counts in P. Raises ``ValueError`` for a negative count, an unknown name, or ``constant_length`` without a length.
    """
    if name not in RULES:
        raise ValueError(f"aggregation must be one of {', '.join(RULES)}, got {name!r}")
    groups = [np.asarray(group, dtype=np.float64) for group in counts]
    if any((group < 0).any() for group in groups):
        raise ValueError("token counts must not be negative")
    if name == "constant_length":
        if not length or length < 0:
            raise ValueError(f"constant_length needs a positive length, got {length}")
        return [weights / length for weights in _sequence_mean_token_sum(groups)]
    return RULES[name](groups)


def _token_mean(groups: list[np.ndarray]) -> list[np.ndarray]:
    weight = _inverse(sum(group.sum() for group in groups))
    return [np.full(group.shape, weight) for group in groups]


def _sequence_mean_token_mean(groups: list[np.ndarray]) -> list[np.ndarray]:
    sequences = sum(group.size for group in groups)
    return [_inverse(sequences * group) for group in groups]


def _sequence_mean_token_sum(groups: list[np.ndarray]) -> list[np.ndarray]:
    weight = _inverse(sum(group.size for group in groups))
    return [np.full(group.shape, weight) for group in groups]


def _prompt_mean(groups: list[np.ndarray]) -> list[np.ndarray]:
    return [np.full(group.shape, _inverse(len(groups) * group.sum())) for group in groups]


def _inverse(denominator: np.ndarray | float) -> np.ndarray:
    """``1/x`` where x is positive, else 0."""
    denominator = np.asarray(denominator, dtype=np.float64)
    return np.divide(1.0, denominator, out=np.zeros_like(denominator), where=denominator > 0)


RULES: dict[str, Callable[[list[np.ndarray]], list[np.ndarray]]] = {
    "token_mean": _token_mean,
    "sequence_mean_token_mean": _sequence_mean_token_mean,
    "sequence_mean_token_sum": _sequence_mean_token_sum,
    "constant_length": _sequence_mean_token_sum,
    "prompt_mean": _prompt_mean,
}
