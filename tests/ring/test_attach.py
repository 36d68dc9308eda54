"""Processes attach to a real run, come and go, and die; the run loses nothing by it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ATTACHED = ("env.play=attached", "env=ring_envs:Hangs")
LONG = ("--steps", "100000")


class Attached:
    """One ``streamrl attach``; its lines are in a file."""

    def __init__(self, ring: Any, output: Path, *arguments: str, hang: Path | None = None) -> None:
        self._ring = ring
        self._output = output
        name, _, value = ring.mark.partition("=")
        environment = os.environ | {name: value} | ({"STREAMRL_TEST_HANG": str(hang)} if hang else {})
        with output.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "streamrl.cli", "attach", *arguments],
                stdout=file, stderr=subprocess.STDOUT, cwd=Path(__file__).parent, env=environment,
            )  # fmt: skip

    @property
    def output(self) -> str:
        return self._output.read_text()

    def wait_for(self, text: str, times: int = 1) -> None:
        self._ring.wait_until(
            lambda: self.output.count(text) >= times or None, f"{text!r}, {times} times, in {self.output}"
        )

    def wait(self) -> int:
        return self.process.wait(timeout=60)


@pytest.fixture
def attach(tmp_path: Path) -> Iterator[Callable[..., Attached]]:
    """Attach processes; those that still run at the end of the test are killed."""
    attached: list[Attached] = []

    def start(ring: Any, *arguments: str, hang: Path | None = None) -> Attached:
        attached.append(Attached(ring, tmp_path / f"attached-{len(attached)}", *arguments, hang=hang))
        return attached[-1]

    yield start
    for each in attached:
        each.process.kill()
        each.process.wait()


def test_a_process_killed_in_mid_episode_costs_the_run_nothing(launch: Any, attach: Any, tmp_path: Path):
    ring = launch(*ATTACHED, "--steps", "8", "--rollouts", "2")
    ring.wait_for("actor_ready", "rollouter-1")
    folder, mark = str(ring.run_dir), tmp_path / "hangs"
    doomed = attach(ring, folder, "--workers", "4", hang=mark)
    ring.wait_for_path(tmp_path, "hangs")
    other = attach(ring, folder, "--workers", "4")
    other.wait_for("attached to", times=2)
    doomed.process.kill()
    assert ring.wait() == 0, ring.output
    assert other.wait() == 0, other.output

    summary, events = ring.summary(), ring.events()
    assert (summary["status"], summary["steps"]) == ("completed", 8)
    assert (summary["groups"]["lost"], summary["groups"]["duplicates_trained"]) == (0, 0)
    names = [event["event"] for event in events]
    assert "agent_lost" in names
    assert 0 < names.count("lease_lost") <= sum(e["leases"] for e in events if e["event"] == "agent_lost")
    assert {e["prompt"] for e in events if e["event"] == "lease_lost"} <= {
        e["prompt"] for e in events if e["event"] == "lease_reissued"
    }
    assert "lease_expired" not in names  # they were issued again at once, not when their time was over

    late = attach(ring, folder)
    assert late.wait() == 1
    assert f"{folder}: this run has ended (completed)" in late.output


def test_a_process_finds_a_replaced_rollouter_again_and_detaches_when_told(launch: Any, attach: Any):
    ring = launch(*ATTACHED, *LONG)
    ring.wait_for("actor_ready", "rollouter-0")
    attached = attach(ring, str(ring.run_dir), "--workers", "4")
    ring.wait_for_step(2)
    os.kill(ring.wait_for("actor_ready", "rollouter-0")["pid"], signal.SIGKILL)
    attached.wait_for("attached to rollouter-0", times=2)
    ring.wait_for_step(len(ring.metrics()) + 2)
    attached.process.send_signal(signal.SIGINT)
    assert attached.wait() == 0
    assert "detaching: the leases under way are played to their end" in attached.output
    assert "detached after" in attached.output
    ring.wait_for("agent_detached")
    ring.process.send_signal(signal.SIGINT)
    assert ring.wait() == 130
    assert (ring.summary()["groups"]["lost"], ring.summary()["restarts"]) == (0, 1)


def test_an_agent_with_its_own_tasks_joins_by_url_and_token_under_its_own_name(launch: Any, attach: Any):
    ring = launch("env.play=attached", "--steps", "4")
    ring.wait_for("actor_ready", "rollouter-0")
    address = json.loads((ring.run_dir / "gateways" / "rollouter-0.json").read_text())
    stranger = attach(ring, "--url", address["url"], "--token", "wrong", "--agent", "ring_envs:Letters")
    assert stranger.wait() == 2
    assert "does not know this token" in stranger.output
    agent = attach(ring, "--url", address["url"], "--token", address["token"], "--agent", "ring_envs:Letters")
    assert ring.wait() == 0, ring.output
    assert agent.wait() == 0, agent.output
    assert f"{address['url']}: the run has ended" in agent.output
    line = ring.metrics()[-1]
    assert line["reward/letters/mean"] == pytest.approx(line["reward/mean"])
    assert "reward/digits/mean" not in line


def test_a_process_whose_run_was_killed_says_so_and_fails(launch: Any, attach: Any):
    ring = launch(*ATTACHED, *LONG)
    ring.wait_for("actor_ready", "rollouter-0")
    attached = attach(ring, str(ring.run_dir))
    ring.wait_for_step(1)
    ring.process.kill()
    ring.wait()
    assert attached.wait() == 1
    assert "streamrl: the run is gone: its process does not live any more" in attached.output
