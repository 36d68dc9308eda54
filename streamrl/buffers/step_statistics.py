"""Batch-wide numbers for the metrics line of a step: what was delivered since the last batch, and the batch's lag."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from streamrl.buffers.wire.messages import GroupMeta

MAX_METRICS = 256
"""Different metrics of environments that a run reports, the first that come: user code may make up names for ever."""


class StepStatistics:
    """Sums over every delivered group, filtered and evicted ones included, since the previous batch. O(1) memory.

    ``reward/*`` is over episodes, ``length/*`` over trajectories. It counts sampled tokens of a trajectory; prompt and
    environment tokens are not in it.
    """

    def __init__(self) -> None:
        self._envs: set[str] = set()
        self._metrics: set[str] = set()
        """Keys ``env/<env>/<name>`` that were seen so far."""
        self._reset()

    def _reset(self) -> None:
        self._groups = self._zero_variance = self._trajectories = self._episodes = 0
        self._reward = self._reward_squares = 0.0
        self._env_reward = dict.fromkeys(self._envs, 0.0)
        self._env_count = dict.fromkeys(self._envs, 0)
        self._metric_sum = dict.fromkeys(self._metrics, 0.0)
        self._metric_count = dict.fromkeys(self._metrics, 0)
        self._tokens = self._longest = self._truncated = self._turns = 0

    def add(self, group: GroupMeta) -> None:
        """Count one delivered group."""
        rewards = episode_rewards(group)
        total = sum(rewards)
        self._groups += 1
        self._zero_variance += has_zero_variance(group)
        self._trajectories += len(group.trajectories)
        self._episodes += len(rewards)
        self._reward += total
        self._reward_squares += sum(reward * reward for reward in rewards)
        self._envs.add(group.env)
        self._env_reward[group.env] = self._env_reward.get(group.env, 0.0) + total
        self._env_count[group.env] = self._env_count.get(group.env, 0) + len(rewards)
        for episode in {trajectory.episode: trajectory for trajectory in group.trajectories}.values():
            self._add_metrics(group.env, episode.metrics)
        for trajectory in group.trajectories:
            tokens = trajectory.sampled
            self._tokens += tokens
            self._longest = max(self._longest, tokens)
            self._truncated += trajectory.truncated
            self._turns += trajectory.turns

    def _add_metrics(self, env: str, metrics: Mapping[str, float]) -> None:
        """What user code measured in one episode; its trajectories all say the same."""
        for name, value in metrics.items():
            key = f"env/{env}/{name}"
            if key in self._metrics or len(self._metrics) < MAX_METRICS:
                self._metrics.add(key)
                self._metric_sum[key] = self._metric_sum.get(key, 0.0) + value
                self._metric_count[key] = self._metric_count.get(key, 0) + 1

    def take(self, batch: Iterable[GroupMeta]) -> dict[str, float]:
        """The numbers since the last call. When nothing was delivered since then, those of ``batch`` itself.

        Every key is there every time; ``reward/<env>/mean`` for each environment seen so far, 0 when it had no group,
        and ``env/<env>/<name>`` for each metric, over the episodes that gave it.
        """
        if not self._groups:
            for group in batch:
                self.add(group)
        count, episodes = max(1, self._trajectories), max(1, self._episodes)
        mean = self._reward / episodes
        numbers = {
            "reward/mean": mean,
            "reward/std": max(0.0, self._reward_squares / episodes - mean * mean) ** 0.5,
            "reward/zero_variance_fraction": self._zero_variance / max(1, self._groups),
            "length/mean": self._tokens / count,
            "length/max": float(self._longest),
            "length/truncated_fraction": self._truncated / count,
            "length/turns_mean": self._turns / count,
        }
        for env in sorted(self._envs):
            numbers[f"reward/{env}/mean"] = self._env_reward[env] / max(1, self._env_count[env])
        for key in sorted(self._metrics):
            numbers[key] = self._metric_sum[key] / max(1, self._metric_count[key])
        self._reset()
        return numbers


def episode_rewards(group: GroupMeta) -> list[float]:
    """The reward of each episode: the mean of the different ones of its trajectories."""
    found: dict[int, set[float]] = {}
    for trajectory in group.trajectories:
        found.setdefault(trajectory.episode, set()).add(trajectory.reward)
    return [math.fsum(rewards) / len(rewards) for rewards in found.values()]


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
