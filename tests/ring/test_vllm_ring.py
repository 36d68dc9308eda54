"""Whole runs on vLLM, its actors executed by an interpreter that is named in the settings."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: `make test-vllm` makes an environment that has it")

VLLM = (
    "engine=vllm", f"engine.python={sys.executable}", "model.args.head_dim=32", "eval.tasks=0",
    "engine.kv=recompute", "engine.prefix_caching=true", "liveness.start_timeout_s=400",
)  # fmt: skip


@pytest.fixture(autouse=True)
def patience(launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM starts in half a minute, and on a machine with other work in several."""
    monkeypatch.setitem(type(launch).__call__.__globals__, "DEADLINE_S", 500.0)


def group_of(leader: int) -> set[int]:
    """Processes in the group of ``leader`` that are alive. vLLM's write their title over their environment."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, _, group = path.joinpath("stat").read_text().rpartition(") ")[2].split()[:3]
        except OSError:
            continue
        if int(group) == leader and state != "Z":
            found.add(int(path.name))
    return found


def assert_group_ends(leader: int) -> None:
    deadline = time.monotonic() + 20
    while (left := group_of(leader)) and time.monotonic() < deadline:
        time.sleep(0.05)  # they are nobody's children any more
    assert left == set()


@pytest.mark.timeout(900)
def test_trainer_and_vllm_agree_on_every_step_and_a_killed_rollouter_is_replaced_with_its_processes(
    launch: Any,
):
    ring = launch("--steps", "12", *VLLM)
    pid = ring.wait_for("actor_ready", "rollouter-0")["pid"]
    assert Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1:3] == [b"-m", b"streamrl.runtime.living"]
    ring.wait_for_step(3)
    assert len(group_of(pid)) > 1, "vLLM has processes of its own"
    os.kill(pid, signal.SIGKILL)
    ring.wait_for("actor_lost", "rollouter-0")
    assert ring.wait() == 0, ring.output
    summary, metrics = ring.summary(), ring.metrics()
    assert (summary["status"], summary["steps"], summary["restarts"]) == ("completed", 12, 1)
    assert (summary["groups"]["duplicates_trained"], summary["groups"]["lost"]) == (0, 0)
    assert max(line["mismatch/rms"] for line in metrics) <= 1e-4
    assert summary["lag_max"] <= summary["lag_bound"]
    assert_group_ends(pid)


ADAPTER_BYTES = 2 * 4 * (7 * (32 + 64)) * 4
"""Two layers, rank 4, both sides of each of 7 linear layers, float32."""


@pytest.mark.timeout(900)
def test_adapters_travel_alone_to_a_vllm_that_two_rollouters_share_and_agree_with_the_trainer(launch: Any):
    ring = launch(
        "--steps", "6", "--rollouts", "2", *VLLM, "rollouters_per_engine=2", "model.lora.rank=4", "trainer.lr=1e-2"
    )
    assert ring.wait() == 0, ring.output + ring.logs()
    summary, metrics = ring.summary(), ring.metrics()
    assert (summary["status"], summary["steps"], summary["restarts"]) == ("completed", 6, 0)
    assert all(gate["passed"] for gate in summary["parity"].values())
    assert [line["sync/bytes"] for line in metrics] == [ADAPTER_BYTES] * 6
    assert max(line["mismatch/rms"] for line in metrics) <= 1e-4
    assert max(line["mismatch/canary_rms"] for line in metrics) <= 1e-4
    assert not [each for each in ring.events() if each["event"] in ("version_failed", "version_refused")]


@pytest.mark.timeout(600)
def test_nothing_of_vllm_outlives_a_launch_process_that_was_killed(launch: Any):
    ring = launch("--steps", "100000", *VLLM)
    ring.wait_for_step(1)
    pid = ring.wait_for("actor_ready", "rollouter-0")["pid"]
    assert len(group_of(pid)) > 1
    ring.process.kill()
    ring.wait()
    assert_group_ends(pid)
