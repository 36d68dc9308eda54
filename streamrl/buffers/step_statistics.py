"""Batch-wide numbers for the metrics line of a step: what was delivered since the last batch, and the batch's lag."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from streamrl.buffers.wire.messages import GroupMeta


class StepStatistics:
    """Sums over every delivered group, filtered and evicted ones included, since the previous batch. O(1) memory.

    ``length/*`` counts sampled tokens of a trajectory; prompt and environment tokens are not in it.
    """

    def __init__(self) -> None:
        self._envs: set[str] = set()
        self._reset()

    def _reset(self) -> None:
        self._groups = self._zero_variance = self._trajectories = 0
        self._reward = self._reward_squares = 0.0
        self._env_reward = dict.fromkeys(self._envs, 0.0)
        self._env_count = dict.fromkeys(self._envs, 0)
        self._tokens = self._longest = self._truncated = self._turns = 0

    def add(self, group: GroupMeta) -> None:
        """Count one delivered group."""
        rewards = [trajectory.reward for trajectory in group.trajectories]
        total = sum(rewards)
        self._groups += 1
        self._zero_variance += has_zero_variance(group)
        self._trajectories += len(rewards)
        self._reward += total
        self._reward_squares += sum(reward * reward for reward in rewards)
        self._envs.add(group.env)
        self._env_reward[group.env] = self._env_reward.get(group.env, 0.0) + total
        self._env_count[group.env] = self._env_count.get(group.env, 0) + len(rewards)
        for trajectory in group.trajectories:
            tokens = trajectory.sampled
            self._tokens += tokens
            self._longest = max(self._longest, tokens)
            self._truncated += trajectory.truncated
            self._turns += trajectory.turns

    def take(self, batch: Iterable[GroupMeta]) -> dict[str, float]:
        """The numbers since the last call. When nothing was delivered since then, those of ``batch`` itself.

        Every key is there every time; ``reward/<env>/mean`` for each environment seen so far, 0 when it had no group.
        """
        if not self._groups:
            for group in batch:
                self.add(group)
        count = max(1, self._trajectories)
        mean = self._reward / count
        numbers = {
            "reward/mean": mean,
            "reward/std": max(0.0, self._reward_squares / count - mean * mean) ** 0.5,
            "reward/zero_variance_fraction": self._zero_variance / max(1, self._groups),
            "length/mean": self._tokens / count,
            "length/max": float(self._longest),
            "length/truncated_fraction": self._truncated / count,
            "length/turns_mean": self._turns / count,
        }
        for env in sorted(self._envs):
            numbers[f"reward/{env}/mean"] = self._env_reward[env] / max(1, self._env_count[env])
        self._reset()
        return numbers


def has_zero_variance(group: GroupMeta) -> bool:
    """Whether all rewards of the group are equal, so that no trajectory is better than another."""
    first = group.trajectories[0].reward
    return all(trajectory.reward == first for trajectory in group.trajectories)


def lag_statistics(batch: Sequence[GroupMeta], version: int, max_lag: int) -> dict[str, float]:
    """Lag of the batch's sampled tokens at the trainer's ``version``, in versions; masked tokens only counted.

    ``p95`` is the smallest lag that at least 95 % of the trained tokens do not exceed.
    """
    tokens: Counter[int] = Counter()
    masked = 0
    for group in batch:
        for trajectory in group.trajectories:
            for sampled_by, count in trajectory.spans:
                lag = version - sampled_by
                if lag > max_lag:
                    masked += count
                else:
                    tokens[lag] += count
    lags = np.array(sorted(tokens), dtype=np.int64)
    counts = np.array([tokens[lag] for lag in lags.tolist()], dtype=np.int64)
    trained = int(counts.sum())
    return {
        "lag/mean": float(counts @ lags) / max(1, trained),
        "lag/p95": float(lags[np.searchsorted(np.cumsum(counts), 0.95 * trained)]) if trained else 0.0,
        "lag/max": float(lags[-1]) if trained else 0.0,
        "lag/masked_tokens": float(masked),
        "lag/bound": float(max_lag),
    }
