"""Whole runs whose reference policy is in an engine of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

KL = ("loss.kl.coefficient=0.1", "loss.kl.reference=initial", "trainer.lr=1e-3")
ENGINE = (*KL, "loss.kl.serve=engine")


@pytest.mark.parametrize("queue", [(), ("queue.transport=tcp", "buffer.shards=2")], ids=["ipc", "tcp-shards"])
def test_a_run_reads_the_kl_from_an_engine_that_the_parity_gate_has_checked(launch: Any, queue: tuple[str, ...]):
    ring = launch("--steps", "5", "max_lag=0", *ENGINE, *queue)
    assert ring.wait() == 0, ring.output + ring.logs()
    lines = ring.metrics()
    assert abs(lines[0]["policy/kl_reference"]) < 1e-9
    assert lines[-1]["policy/kl_reference"] > 1e-7
    assert ring.summary()["parity"]["numerics"]["passed"]
    assert "reference" in {event["actor"] for event in ring.events() if event["event"] == "actor_stopped"}
    ring.assert_nothing_is_left()


def test_a_killed_reference_is_replaced_and_the_run_completes_with_nothing_lost(launch: Any):
    ring = launch("--steps", "60", *ENGINE)
    ring.wait_for_step(3)
    os.kill(ring.wait_for("actor_ready", "reference")["pid"], signal.SIGKILL)
    assert ring.wait() == 0, ring.output
    summary = ring.summary()
    assert (summary["status"], summary["steps"], summary["restarts"]) == ("completed", 60, 1)
    assert (summary["groups"]["lost"], summary["groups"]["duplicates_trained"]) == (0, 0)
    assert "actor_restarted" in [event["event"] for event in ring.events() if event["actor"] == "reference"]


def test_a_replay_takes_the_recorded_log_probs_and_makes_the_same_weights(launch: Any, tmp_path: Path):
    ring = launch("--steps", "3", *ENGINE, "buffer.keep=all")
    assert ring.wait() == 0, ring.output
    command = [sys.executable, "-m", "streamrl.cli", "replay", str(ring.run_dir), "--run-dir", str(tmp_path / "again")]
    replayed = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert replayed.stdout.splitlines()[-1] == "weights of all 4 versions are identical to the recorded ones"
