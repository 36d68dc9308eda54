"""Advantages of whole trajectories from rewards: what each was worth against the others of its group or batch.

One rule for episodes of several trajectories: those with the same reward are one *sample* (``samples``), which is what
the rules below compare. Without such episodes every trajectory is a sample.

One rule for small groups: a sample is compared with those of its group that are there, however many were asked for.
One that is alone has no baseline, so that every group-relative advantage of it is exactly 0, as for equal rewards.
Rejected and failed trajectories must not be among the rewards (C8).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

EPSILON = 1e-6
"""Added to a standard deviation before it divides, in reward units (verl, AReaL; TRL and PipelineRL add 1e-4)."""
WHITEN_EPSILON = 1e-8
"""Added to the variance where values are whitened over tokens (verl)."""


def advantages(
    rewards: Sequence[np.ndarray], name: str, lengths: Sequence[np.ndarray] | None = None, epsilon: float = EPSILON
) -> list[np.ndarray]:
    """Advantages float64 ``[G_i]`` per group from rewards ``[G_i]``; ``name`` is ``loss.advantage`` of the settings.

    ``lengths`` ``[G_i]`` are the sampled tokens of each trajectory, for the rules that weigh by them. r is a reward;
    mean and std are those of its group.

    - ``mean``: ``r − mean`` (Dr.GRPO, arXiv 2503.20783).
    - ``mean_std``: the same over the group's std (GRPO, arXiv 2402.03300).
    - ``leave_one_out``: ``r_i − mean of the others`` (RLOO, arXiv 2402.14740).
    - ``batch_std``: ``mean`` over the std of all centred rewards of the batch (ScaleRL, arXiv 2510.13786; Lite PPO,
      arXiv 2508.08221; AReaL); ``batch_std_raw``: over the std of all rewards (TRL). Groups without signal count.
    - ``reinforce_pp``: r whitened over the *tokens* of the batch, so that long answers weigh more (REINFORCE++, arXiv
      2501.03262, with γ = 1); ``reinforce_pp_baseline``: the same of ``r − mean``. Neither is 0 for equal rewards.
    - ``opo``: ``r −`` the mean weighted by length (OPO, arXiv 2505.23585).
    - ``maxrl``: ``(r − mean)/mean``, 0 where the mean is 0 (MaxRL, arXiv 2602.02710).
    - ``gpg``: ``(r − mean)·N/(trajectories with r ≠ 0)`` over the N of the batch (GPG, arXiv 2504.02546, as in verl);
      ``gpg_informative`` divides by the trajectories of groups with unequal rewards instead (the paper's text).

    Standard deviations are Bessel-corrected. Raises ``ValueError`` for a reward that is not finite (a failed trajectory
    must not enter a baseline), an unknown name, or missing lengths.
    """
    if name not in RULES:
        raise ValueError(f"advantage must be one of {', '.join(RULES)}, got {name!r}")
    groups = [np.asarray(group, dtype=np.float64) for group in rewards]
    for index, group in enumerate(groups):
        if not np.isfinite(group).all():
            raise ValueError(
                f"group {index} has a reward that is not finite: {group.tolist()}; drop that trajectory first"
            )
    if lengths is None:
        if name in BY_LENGTH:
            raise ValueError(f"advantage {name} needs the lengths of the trajectories")
        lengths = [np.zeros(group.shape) for group in groups]
    return RULES[name](groups, [np.asarray(each, dtype=np.float64) for each in lengths], epsilon)


def samples(episodes: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """Which sample each trajectory belongs to, int64 ``[G]``: one per distinct pair of episode and reward.

    Samples are numbered in the order in which they come first.
    """
    numbers: dict[tuple[int, float], int] = {}
    pairs = zip(episodes.tolist(), rewards.tolist(), strict=True)
    return np.asarray([numbers.setdefault(pair, len(numbers)) for pair in pairs], dtype=np.int64)


def whiten(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """``values`` less their mean over their deviation, each counted ``weights`` times (tokens, or a mask), float64.

    The variance is Bessel-corrected for the number counted, plus ``WHITEN_EPSILON``; with fewer than two, zeros.
    """
    values, weights = np.asarray(values, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    count = weights.sum()
    if count < 2:
        return np.zeros_like(values)
    mean = (values * weights).sum() / count
    variance = (np.square(values - mean) * weights).sum() / (count - 1)
    return (values - mean) / np.sqrt(variance + WHITEN_EPSILON)


Groups = list[np.ndarray]


def _centred(group: np.ndarray) -> np.ndarray:
    # The mean of equal numbers may differ from them in the last bit; equal rewards mean exactly no signal.
    return group - group.mean() if group.size and np.ptp(group) > 0 else np.zeros_like(group)


def _mean(groups: Groups, _lengths: Groups, _epsilon: float) -> Groups:
    return [_centred(group) for group in groups]


def _mean_std(groups: Groups, _lengths: Groups, epsilon: float) -> Groups:
    return [centred / (_deviation(centred) + epsilon) for centred in map(_centred, groups)]


def _leave_one_out(groups: Groups, _lengths: Groups, _epsilon: float) -> Groups:
    # r_i − (G·mean − r_i)/(G − 1) = (r_i − mean)·G/(G − 1)
    return [centred * (centred.size / max(centred.size - 1, 1)) for centred in map(_centred, groups)]


def _batch_std(groups: Groups, _lengths: Groups, epsilon: float) -> Groups:
    centred = [_centred(group) for group in groups]
    scale = _deviation(_joined(centred)) + epsilon
    return [group / scale for group in centred]


def _batch_std_raw(groups: Groups, _lengths: Groups, epsilon: float) -> Groups:
    every = _joined(groups)
    scale = _deviation(_centred(every)) + epsilon
    return [_centred(group) / scale for group in groups]


def _reinforce_pp(groups: Groups, lengths: Groups, _epsilon: float) -> Groups:
    return _split(whiten(_joined(groups), _joined(lengths)), groups)


def _reinforce_pp_baseline(groups: Groups, lengths: Groups, _epsilon: float) -> Groups:
    return _split(whiten(_joined([_centred(group) for group in groups]), _joined(lengths)), groups)


def _opo(groups: Groups, lengths: Groups, _epsilon: float) -> Groups:
    def one(group: np.ndarray, weights: np.ndarray) -> np.ndarray:
        if not group.size or np.ptp(group) == 0 or not weights.any():
            return np.zeros_like(group)
        return group - (group * weights).sum() / weights.sum()

    return [one(group, weights) for group, weights in zip(groups, lengths, strict=True)]


def _maxrl(groups: Groups, _lengths: Groups, _epsilon: float) -> Groups:
    return [_centred(group) / group.mean() if group.size and group.mean() else np.zeros_like(group) for group in groups]


def _gpg(groups: Groups, _lengths: Groups, _epsilon: float) -> Groups:
    every = _joined(groups)
    scale = every.size / max(int(np.count_nonzero(every)), 1)
    return [_centred(group) * scale for group in groups]


def _gpg_informative(groups: Groups, _lengths: Groups, _epsilon: float) -> Groups:
    informative = sum(int(group.size) for group in groups if group.size and np.ptp(group) > 0)
    scale = _joined(groups).size / max(informative, 1)
    return [_centred(group) * scale for group in groups]


def _deviation(centred: np.ndarray) -> float:
    return float(np.sqrt(np.square(centred).sum() / max(centred.size - 1, 1)))


def _joined(groups: Groups) -> np.ndarray:
    return np.concatenate([np.zeros(0), *groups])


def _split(values: np.ndarray, groups: Groups) -> Groups:
    return np.split(values, np.cumsum([group.size for group in groups])[:-1]) if groups else []


RULES: dict[str, Callable[[Groups, Groups, float], Groups]] = {
    "mean": _mean,
    "mean_std": _mean_std,
    "leave_one_out": _leave_one_out,
    "batch_std": _batch_std,
    "batch_std_raw": _batch_std_raw,
    "reinforce_pp": _reinforce_pp,
    "reinforce_pp_baseline": _reinforce_pp_baseline,
    "opo": _opo,
    "maxrl": _maxrl,
    "gpg": _gpg,
    "gpg_informative": _gpg_informative,
}
BY_LENGTH = ("reinforce_pp", "reinforce_pp_baseline", "opo")
"""Rules that need the lengths of the trajectories."""
