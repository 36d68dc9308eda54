"""Group-relative advantages: what each trajectory's reward was worth against its group's baseline."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

EPSILON = 1e-6
"""Added to a standard deviation before it divides, in reward units (as in GRPO's public implementations)."""


def advantages(rewards: list[np.ndarray], name: str) -> list[np.ndarray]:
    """Advantages float64 ``[G_i]`` per group from rewards ``[G_i]``; ``name`` is ``loss.advantage`` of the settings.

    - ``mean``: ``r − mean(r)`` (Dr.GRPO, arXiv 2503.20783).
    - ``mean_std``: the same over the group's standard deviation (GRPO, arXiv 2402.03300).
    - ``leave_one_out``: ``r_i − mean of the others`` (RLOO, arXiv 2402.14740).
    - ``batch_std``: ``mean`` over the standard deviation of all centred rewards (ScaleRL, arXiv 2510.13786).

    Standard deviations are Bessel-corrected. A group whose rewards are all equal, a single trajectory included, gets
    exact zeros. Raises ``ValueError`` for a reward that is not finite: a failed trajectory must not enter a baseline.
    """
    if name not in RULES:
        raise ValueError(f"advantage must be one of {', '.join(RULES)}, got {name!r}")
    groups = [np.asarray(group, dtype=np.float64) for group in rewards]
    for index, group in enumerate(groups):
        if not np.isfinite(group).all():
            raise ValueError(
                f"group {index} has a reward that is not finite: {group.tolist()}; drop that trajectory first"
            )
    return RULES[name](groups)


def _centred(group: np.ndarray) -> np.ndarray:
    # The mean of equal numbers may differ from them in the last bit; equal rewards mean exactly no signal.
    return group - group.mean() if np.ptp(group) > 0 else np.zeros_like(group)


def _mean(groups: list[np.ndarray]) -> list[np.ndarray]:
    return [_centred(group) if group.size else group for group in groups]


def _mean_std(groups: list[np.ndarray]) -> list[np.ndarray]:
    return [centred / (_deviation(centred) + EPSILON) for centred in _mean(groups)]


def _leave_one_out(groups: list[np.ndarray]) -> list[np.ndarray]:
    # r_i − (G·mean − r_i)/(G − 1) = (r_i − mean)·G/(G − 1)
    return [centred * (centred.size / max(centred.size - 1, 1)) for centred in _mean(groups)]


def _batch_std(groups: list[np.ndarray]) -> list[np.ndarray]:
    centred = _mean(groups)
    scale = _deviation(np.concatenate(centred)) + EPSILON if centred else 1.0
    return [group / scale for group in centred]


def _deviation(centred: np.ndarray) -> float:
    return float(np.sqrt(np.square(centred).sum() / max(centred.size - 1, 1)))


RULES: dict[str, Callable[[list[np.ndarray]], list[np.ndarray]]] = {
    "mean": _mean,
    "mean_std": _mean_std,
    "leave_one_out": _leave_one_out,
    "batch_std": _batch_std,
}
