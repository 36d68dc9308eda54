"""A reward model in whole runs: served in a process of its own, and replaced when that dies."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "envs"))

from reward_models import make_reward_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_reward_model(tmp_path / "reward-model")


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_a_run_is_rewarded_by_its_reward_model(launch: Any, model: Path, transport: str) -> None:
    ring = launch("--steps", "6", f"reward_model={model}", "env=scored_envs:Scored", f"queue.transport={transport}")
    assert ring.wait() == 0, ring.output + ring.logs()
    assert ring.wait_for("actor_ready", "scorer")["model"] == str(model)
    rewards = [line["reward/mean"] for line in ring.metrics()]
    assert len(rewards) == 6
    assert all(0 < reward < 1 for reward in rewards)
    assert max(line["reward/std"] for line in ring.metrics()) > 0


def test_a_killed_scorer_is_replaced_and_the_run_completes_without_a_failure(launch: Any, model: Path) -> None:
    ring = launch("--steps", "40", f"reward_model={model}", "env=scored_envs:Scored")
    ring.wait_for_step(3)
    os.kill(ring.wait_for("actor_ready", "scorer")["pid"], signal.SIGKILL)
    assert ring.wait() == 0, ring.output + ring.logs()
    summary = ring.summary()
    assert (summary["status"], summary["restarts"], summary["groups"]["lost"]) == ("completed", 1, 0)
    names = [event["event"] for event in ring.events()]
    assert "trajectory_failed" not in names
    assert "scorer" in [event["actor"] for event in ring.events() if event["event"] == "actor_restarted"]


def test_a_reward_model_that_is_none_ends_the_launch_in_one_line(launch: Any, tmp_path: Path) -> None:
    ring = launch("--steps", "6", f"reward_model={tmp_path / 'nothing'}", "env=scored_envs:Scored")
    assert ring.wait() == 2
    assert "no config.json in it, so it is not a transformers checkpoint" in ring.output.strip().splitlines()[-1]


def test_a_reward_that_needs_a_model_is_refused_without_one(launch: Any) -> None:
    ring = launch("--steps", "6", "env=scored_envs:Scored")
    assert ring.wait() == 2
    assert ring.output.strip().splitlines()[-1].endswith("set reward_model.name=FOLDER")
