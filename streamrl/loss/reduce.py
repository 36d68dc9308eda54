"""How per-token losses add up to the loss of a batch: one weight per trajectory with global denominators (C8)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def token_weights(counts: list[np.ndarray], name: str) -> list[np.ndarray]:
    """Weight float64 ``[G_i]`` of every token of a trajectory, so that *loss = Σ weight × per-token loss*.

    ``counts`` ``[G_i]`` are the *sampled* tokens of each trajectory of the whole batch, over all ranks. Tokens that get
    no loss (zero advantage, masked as stale) and trajectories that are dropped later stay in the denominators, so that
    rejecting data never raises the learning rate of the rest. ``name`` is ``loss.aggregation`` of the settings, with N
    sampled tokens and S trajectories in P groups, n_i tokens in trajectory i and N_g in its group:

    - ``token_mean``: 1/N (DAPO, arXiv 2503.14476).
    - ``sequence_mean_token_mean``: 1/(S·n_i) (GRPO, arXiv 2402.03300).
    - ``sequence_mean_token_sum``: 1/S (REINFORCE on whole trajectories; Dr.GRPO up to its constant, arXiv 2503.20783).
    - ``prompt_mean``: 1/(P·N_g) (ScaleRL, arXiv 2510.13786).

    A trajectory without sampled tokens weighs 0 where its own length would divide. Raises ``ValueError`` for a negative
    count or an unknown name.
    """
    if name not in RULES:
        raise ValueError(f"aggregation must be one of {', '.join(RULES)}, got {name!r}")
    groups = [np.asarray(group, dtype=np.float64) for group in counts]
    if any((group < 0).any() for group in groups):
        raise ValueError("token counts must not be negative")
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
    "prompt_mean": _prompt_mean,
}
