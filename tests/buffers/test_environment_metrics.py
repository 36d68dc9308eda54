"""What an environment's code measures is averaged over its episodes and reported under its name."""

from __future__ import annotations

import pytest

from streamrl.buffers import step_statistics
from streamrl.buffers.step_statistics import StepStatistics
from streamrl.buffers.wire.messages import GroupMeta, TrajectoryMeta
from streamrl.metrics import complete_line


def group(env: str, *episodes: tuple[int, dict[str, float]]) -> GroupMeta:
    trajectories = [
        TrajectoryMeta(3, [(0, 1)], 0.0, 1, False, metrics, episode=episode) for episode, metrics in episodes
    ]
    return GroupMeta(0, 0, env, 0, trajectories, [], 0)


def test_a_metric_is_the_mean_over_the_episodes_that_gave_it() -> None:
    statistics = StepStatistics()
    statistics.add(group("a", (0, {"calls": 1.0}), (1, {"calls": 4.0, "errors": 2.0}), (2, {})))
    statistics.add(group("b", (0, {"calls": 7.0})))
    line = complete_line(statistics.take([]))
    own = {key: value for key, value in line.items() if key.startswith("env/")}
    assert own == {"env/a/calls": 2.5, "env/a/errors": 2.0, "env/b/calls": 7.0}


def test_the_trajectories_of_one_episode_count_once() -> None:
    statistics = StepStatistics()
    statistics.add(group("a", (0, {"calls": 1.0}), (0, {"calls": 1.0}), (1, {"calls": 4.0})))
    assert statistics.take([])["env/a/calls"] == 2.5


def test_a_metric_that_was_seen_once_is_in_every_line() -> None:
    statistics = StepStatistics()
    statistics.add(group("a", (0, {"calls": 1.0})))
    statistics.take([])
    statistics.add(group("a", (0, {})))
    assert statistics.take([])["env/a/calls"] == 0.0


def test_names_that_never_end_take_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_statistics, "MAX_METRICS", 2)
    statistics = StepStatistics()
    statistics.add(group("a", (0, {"x": 1.0, "y": 2.0, "z": 3.0})))
    assert [key for key in statistics.take([]) if key.startswith("env/")] == ["env/a/x", "env/a/y"]
