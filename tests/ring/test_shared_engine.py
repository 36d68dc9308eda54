"""Whole runs whose rollouters share engines in processes of their own."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

SHARED = ("--rollouts", "4", "rollouters_per_engine=2")


@pytest.mark.parametrize("queue", [(), ("queue.transport=tcp",)], ids=["ipc", "tcp"])
def test_four_rollouters_share_two_engines_that_pass_the_gate_and_take_every_version(
    launch: Any, queue: tuple[str, ...]
):
    ring = launch("--steps", "6", *SHARED, *queue)
    assert ring.wait() == 0, ring.output + ring.logs()
    summary = ring.summary()
    groups = summary["groups"]
    assert (summary["status"], summary["version"], groups["consumed"]) == ("completed", 6, 24)
    assert (groups["lost"], groups["duplicates_trained"], summary["restarts"]) == (0, 0, 0)
    assert all(gate["passed"] for gate in summary["parity"].values())
    events = ring.events()
    ready = {event["actor"] for event in events if event["event"] == "actor_ready"}
    assert ready >= {f"rollouter-{i}" for i in range(4)} | {"engine-0", "engine-1"}
    committed = {(event["actor"], event["version"]) for event in events if event["event"] == "version_committed"}
    takers = {actor for actor, _ in committed} - {"trainer-0"}
    assert takers == {"engine-0", "engine-1"}
    assert {version for actor, version in committed if actor == "engine-1"} == set(range(7))
    lines = ring.metrics()
    assert all(line["mismatch/rms"] < 1e-5 for line in lines)
    assert {line["sync/rollouters"] for line in lines} == {2}
    assert summary["tokens_generated"] > 0
    assert lines[-1]["engine/groups"] == 4 * 3  # ⌈1.25 × 2 engines × 16 slots / (4 rollouters × groups of 4)⌉


def test_a_killed_engine_is_replaced_and_the_run_completes_with_nothing_lost(launch: Any):
    ring = launch("--steps", "40", *SHARED)
    ring.wait_for_step(3)
    os.kill(ring.wait_for("actor_ready", "engine-0")["pid"], signal.SIGKILL)
    assert ring.wait() == 0, ring.output + ring.logs()
    summary = ring.summary()
    assert (summary["status"], summary["steps"], summary["restarts"]) == ("completed", 40, 1)
    assert (summary["groups"]["lost"], summary["groups"]["duplicates_trained"]) == (0, 0)
    events = ring.events()
    assert [event["actor"] for event in events if event["event"] == "actor_restarted"] == ["engine-0"]
    back = next(index for index, event in enumerate(events) if event["event"] == "actor_restarted")
    later = [e["version"] for e in events[back:] if (e["event"], e["actor"]) == ("version_committed", "engine-0")]
    assert later[-1] == 40


def test_a_killed_only_engine_holds_requests_back_until_its_successor_has_weights(launch: Any):
    ring = launch("--steps", "30", "--rollouts", "2", "rollouters_per_engine=2")
    ring.wait_for_step(3)
    os.kill(ring.wait_for("actor_ready", "engine-0")["pid"], signal.SIGKILL)
    assert ring.wait() == 0, ring.output + ring.logs()
    summary = ring.summary()
    assert (summary["status"], summary["restarts"]) == ("completed", 1)
    assert (summary["groups"]["lost"], summary["groups"]["duplicates_trained"]) == (0, 0)


def test_a_killed_rollouter_leaves_the_engine_to_the_others(launch: Any):
    ring = launch("--steps", "30", "--rollouts", "2", "rollouters_per_engine=2")
    ring.wait_for_step(3)
    os.kill(ring.wait_for("actor_ready", "rollouter-1")["pid"], signal.SIGKILL)
    assert ring.wait() == 0, ring.output + ring.logs()
    summary = ring.summary()
    assert (summary["status"], summary["restarts"]) == ("completed", 1)
    assert (summary["groups"]["lost"], summary["groups"]["duplicates_trained"]) == (0, 0)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["rollouters_per_engine=2"], "rollouters_per_engine=2 is more than rollouts=1"),
        (
            ["engine.urls=[http://127.0.0.1:1]"],
            "engine.urls is for running servers of sglang, got engine.name=embedded",
        ),
        (["engine=sglang", "engine.urls=[127.0.0.1:1]"], "expected http://HOST:PORT, got '127.0.0.1:1'"),
    ],
)
def test_shares_and_servers_that_cannot_be_are_refused(launch: Any, arguments: list[str], expected: str):
    ring = launch(*arguments)
    assert ring.wait() == 2
    assert expected in ring.output


def test_an_engine_that_says_nothing_any_more_is_killed_and_replaced(launch: Any):
    ring = launch("--steps", "30", *SHARED, "liveness.actor_timeout_s=6")
    ring.wait_for_step(3)
    os.kill(ring.wait_for("actor_ready", "engine-1")["pid"], signal.SIGSTOP)
    assert ring.wait() == 0, ring.output + ring.logs()
    summary = ring.summary()
    assert (summary["status"], summary["restarts"]) == ("completed", 1)
    assert (summary["groups"]["lost"], summary["groups"]["duplicates_trained"]) == (0, 0)
    assert "actor_silent" in {event["event"] for event in ring.events() if event["actor"] == "engine-1"}
