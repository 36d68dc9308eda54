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


def commits(ring: Any, actor: str, after: str) -> list[int]:
    """Versions that ``actor`` committed since its first event ``after``."""
    own = [event for event in ring.events() if event["actor"] == actor]
    names = [event["event"] for event in own]
    since = names.index(after) if after in names else len(own)
    return [event["version"] for event in own[since:] if event["event"] == "version_committed"]


def test_a_killed_engine_is_replaced_takes_versions_again_and_nothing_is_lost(launch: Any):
    """The run goes on with the other one for as long as the replacement takes, so it has no last step."""
    ring = launch("--steps", "100000", *SHARED)
    ring.wait_for_step(3)
    os.kill(ring.wait_for("actor_ready", "engine-0")["pid"], signal.SIGKILL)
    ring.wait_until(lambda: len(commits(ring, "engine-0", "actor_restarted")) >= 3 or None, "three further versions")
    ring.process.send_signal(signal.SIGINT)
    assert ring.wait() == 130, ring.output + ring.logs()
    summary = ring.summary()
    assert (summary["groups"]["lost"], summary["groups"]["duplicates_trained"], summary["restarts"]) == (0, 0, 1)
    versions = commits(ring, "engine-0", "actor_restarted")
    assert versions == sorted(set(versions))
    assert versions[0] > 0, "it begins with the newest weights"


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
            "engine.urls is for running servers of vllm and sglang, got engine.name=embedded",
        ),
        (["engine=sglang", "engine.urls=[127.0.0.1:1]"], "expected http://HOST:PORT, got '127.0.0.1:1'"),
    ],
)
def test_shares_and_servers_that_cannot_be_are_refused(launch: Any, arguments: list[str], expected: str):
    ring = launch(*arguments)
    assert ring.wait() == 2
    assert expected in ring.output


def test_an_engine_that_says_nothing_any_more_is_killed_and_replaced(launch: Any):
    ring = launch("--steps", "30", *SHARED, "liveness.actor_timeout_s=10")
    ring.wait_for_step(3)
    os.kill(ring.wait_for("actor_ready", "engine-1")["pid"], signal.SIGSTOP)
    assert ring.wait() == 0, ring.output + ring.logs()
    summary = ring.summary()
    assert summary["status"] == "completed"
    assert (summary["groups"]["lost"], summary["groups"]["duplicates_trained"]) == (0, 0)
    told = {event["event"] for event in ring.events() if event["actor"] == "engine-1"}
    assert {"actor_silent", "actor_restarted"} <= told
