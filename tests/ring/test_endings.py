"""However a run ends, it says why, and leaves no process, socket or shared memory."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

LONG = ("--steps", "100000")


def test_a_killed_rollouter_is_replaced_and_the_run_completes_with_nothing_lost(launch: Any):
    ring = launch("--rollouts", "2", "--steps", "60")
    ring.wait_for_step(3)
    os.kill(ring.wait_for("actor_ready", "rollouter-1")["pid"], signal.SIGKILL)
    assert ring.wait() == 0, ring.output
    summary = ring.summary()
    assert (summary["status"], summary["steps"], summary["restarts"]) == ("completed", 60, 1)
    assert (summary["groups"]["lost"], summary["groups"]["duplicates_trained"]) == (0, 0)
    assert summary["lag_max"] <= summary["lag_bound"]
    names = [event["event"] for event in ring.events() if event["actor"] == "rollouter-1"]
    assert names[:2] == ["actor_started", "actor_ready"]
    assert "actor_lost" in names
    assert "actor_restarted" in names


@pytest.mark.parametrize("actor", ["trainer-0", "evaluator"])
def test_a_killed_actor_that_cannot_be_replaced_ends_the_run_and_is_named(launch: Any, actor: str):
    ring = launch(*LONG)
    ring.wait_for_step(2)
    os.kill(ring.wait_for("actor_ready", actor)["pid"], signal.SIGKILL)
    assert ring.wait() == 1
    assert ring.output.strip().splitlines()[-1].startswith(f"streamrl: {actor} was killed by SIGKILL")
    assert ring.summary()["status"] == "failed"


def test_a_killed_controller_takes_every_actor_along(launch: Any):
    ring = launch(*LONG)
    ring.wait_for_step(2)
    ring.process.kill()
    ring.wait()
    ring.assert_nothing_is_left()


def test_a_killed_spawner_ends_the_run(launch: Any):
    ring = launch(*LONG)
    ring.wait_for_step(2)
    spawner = next(pid for pid, command in ring.processes().items() if _is_spawner(pid, ring.process.pid))
    os.kill(spawner, signal.SIGKILL)
    assert ring.wait() == 1
    assert "the spawner process ended" in ring.output


def _is_spawner(pid: int, controller: int) -> bool:
    with open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[1]) == controller


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_so_and_exits_with_130(launch: Any, number: signal.Signals):
    ring = launch(*LONG)
    ring.wait_for_step(2)
    ring.process.send_signal(number)
    assert ring.wait() == 130
    summary = ring.summary()
    assert (summary["status"], summary["reason"]) == ("interrupted", f"interrupted by {number.name}")
    assert summary["steps"] >= 2


def test_an_interrupt_during_the_start_leaves_nothing(launch: Any):
    ring = launch(*LONG)
    ring.wait_for("actor_started")
    ring.process.send_signal(signal.SIGINT)
    assert ring.wait() == 130


def test_an_interrupt_during_the_warm_up_leaves_no_half_built_model(
    launch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ring = launch("env=streamrl.envs.strings:Addition", "model.warmup.steps=1000000", "model.cache=true")
    ring.wait_for("actor_ready", "preparer")
    ring.wait_for_path(tmp_path / "cache" / "streamrl" / "models", ".building-*")
    ring.process.send_signal(signal.SIGINT)
    assert ring.wait() == 130
    assert list((tmp_path / "cache" / "streamrl" / "models").iterdir()) == []


def test_a_rollouter_that_hangs_is_killed_and_replaced(launch: Any):
    ring = launch(*LONG, "liveness.actor_timeout_s=6")
    ring.wait_for_step(2)
    os.kill(ring.wait_for("actor_ready", "rollouter-0")["pid"], signal.SIGSTOP)
    ring.wait_for("actor_silent", "rollouter-0")
    ring.wait_for("actor_restarted", "rollouter-0")
    ring.wait_for_step(len(ring.metrics()) + 2)
    ring.process.send_signal(signal.SIGINT)
    assert ring.wait() == 130
    assert ring.summary()["groups"]["lost"] == 0
