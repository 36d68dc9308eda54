"""Whole runs in which the engines load version 2 wrongly."""

from __future__ import annotations

from typing import Any

SHARP = ("model.args.initializer_range=0.3",)
"""An untrained policy whose distributions are far from flat."""
SPOILED = ("env=canary_envs:Spoiled", "env.args.version=2")


def test_a_rejected_version_is_taken_back_and_the_run_goes_on_with_the_next(launch: Any) -> None:
    ring = launch("--steps", "4", "--rollouts", "2", *SHARP, *SPOILED, "sync.on_mismatch=rollback", "eval.tasks=0")
    assert ring.wait() == 0, ring.output + ring.logs()
    rms = {line["version"]: line["mismatch/canary_rms"] for line in ring.metrics()}
    assert list(rms) == [1, 2, 3, 4]
    assert rms[2] > 1e-3 > 1e-5 > max(rms[1], rms[3], rms[4]) > 0
    rejected = [e for e in ring.events() if e["event"] == "version_rejected" and e["actor"] == "trainer-0"]
    assert [event["version"] for event in rejected] == [2]
    assert "model.norm.weight" in rejected[0]["reason"]
    back = [e for e in ring.events() if e["event"] == "version_committed" and e.get("late")]
    assert sorted(member for event in back for member in event["members"]) == ["rollouter-0", "rollouter-1"]
    assert {event["version"] for event in back} == {1}
    summary = ring.summary()
    assert (summary["groups"]["duplicates_trained"], summary["groups"]["lost"], summary["restarts"]) == (0, 0, 0)


def test_a_rejected_version_stops_the_run_with_exit_code_3(launch: Any) -> None:
    ring = launch("--steps", "4", *SHARP, *SPOILED, "sync.on_mismatch=stop", "eval.tasks=0")
    assert ring.wait() == 3, ring.output + ring.logs()
    assert "version 2 was rejected: rollouter-0: canary: engine and trainer log-probs differ by rms" in ring.output
    assert ring.summary()["status"] == "failed"
