"""The whole ring on real processes, in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamrl.metrics import EVAL_KEYS, KEYS


@pytest.fixture(scope="module")
def completed(launch_for_all: Any) -> Any:
    """A run of six steps that has ended well."""
    ring = launch_for_all("--steps", "6", "eval.every=3", "wandb=offline")
    assert ring.wait() == 0, ring.output + ring.logs()
    return ring


def test_a_run_completes_and_its_folder_holds_what_the_design_says(completed: Any):
    ring = completed
    assert "status: completed" in ring.output.splitlines()
    summary = ring.summary()
    assert (summary["status"], summary["steps"], summary["version"]) == ("completed", 6, 6)
    groups = summary["groups"]
    assert (groups["consumed"], groups["duplicates_trained"], groups["lost"]) == (24, 0, 0)
    assert groups["issued"] >= groups["consumed"] + groups["refunded"]
    assert summary["lag_max"] <= summary["lag_bound"] == 1
    assert summary["tokens_trained"] > 0
    assert summary["tokens_generated"] > 0
    assert summary["parity"]["numerics"]["passed"]
    lines = ring.metrics()
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(set(KEYS) <= set(line) for line in lines)
    assert {"eval/accuracy", "eval/version"} == set(EVAL_KEYS) <= set(lines[-1])
    assert lines[-1]["eval/version"] == 6
    assert all("reward/digits/mean" in line for line in lines)
    assert (ring.run_dir / "config.yaml").exists()
    assert list((ring.run_dir / "wandb").glob("offline-run-*"))


def test_every_event_says_when_what_who_and_where(completed: Any):
    events = completed.events()
    assert all({"time", "event", "actor", "pid", "host"} <= set(event) for event in events)
    names = {event["event"] for event in events}
    assert {"actor_started", "actor_ready", "gate_passed", "version_committed", "evaluated", "run_ended"} <= names
    assert {event["actor"] for event in events} >= {"buffer", "trainer-0", "rollouter-0", "evaluator", "controller"}


def test_on_policy_every_ratio_is_one_and_nothing_is_clipped(launch: Any):
    ring = launch("--steps", "5", "max_lag=0", "loss=ppo", "trainer.lr=1e-3")
    assert ring.wait() == 0, ring.output
    for line in ring.metrics():
        assert line["lag/max"] == 0
        assert line["policy/ratio_mean"] == pytest.approx(1, abs=1e-5)
        assert line["mismatch/max"] <= 1e-5
        assert line["policy/clip_fraction"] == 0


@pytest.mark.parametrize("on_stale", ["mask", "evict", "wait"])
def test_every_way_to_handle_stale_groups_keeps_the_bound(launch: Any, on_stale: str):
    ring = launch("--steps", "12", "--rollouts", "2", "max_lag=2", f"on_stale={on_stale}")
    assert ring.wait() == 0, ring.output
    summary = ring.summary()
    assert summary["lag_max"] <= 2
    assert (summary["groups"]["lost"], summary["groups"]["duplicates_trained"]) == (0, 0)
    if on_stale == "wait":
        assert all(line["lag/masked_tokens"] == line["lag/evicted_groups"] == 0 for line in ring.metrics())


def test_two_trainer_ranks_with_dynamic_sampling_complete(launch: Any):
    ring = launch("--steps", "4", "--trainers", "2", "group.drop_zero_variance=true")
    assert ring.wait() == 0, ring.output + ring.logs()
    assert ring.summary()["groups"]["lost"] == 0
    assert ring.summary()["tokens_trained"] > 0


def test_a_trajectory_whose_environment_raises_is_left_out_and_its_traceback_is_kept(launch: Any):
    ring = launch("--steps", "4", "env=ring_envs:SometimesOneMember")
    assert ring.wait() == 0, ring.output + ring.logs()
    failed = [event for event in ring.events() if event["event"] == "trajectory_failed"]
    assert failed
    assert "unlucky sum" in failed[0]["traceback"]
    assert "ring_envs.py" in failed[0]["traceback"]
    assert ring.summary()["groups"]["lost"] == 0


def test_an_environment_that_always_raises_ends_the_run_and_says_why(launch: Any):
    ring = launch("env=ring_envs:always_raises", "eval.tasks=0")
    assert ring.wait() == 1
    last = ring.output.strip().splitlines()[-1]
    assert "RuntimeError: the judge is out of order" in last
    assert "ring_envs.py" in last


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--trainers", "0"], "trainers=0: must be at least 1"),
        (["max_lags=1"], "unknown key 'max_lags'; did you mean 'max_lag'?"),
        (["env=nowhere:Nothing"], "nowhere"),
        (["env=ring_envs:Digit"], "did you mean 'Digits'?"),
        (["env=ring_envs:Digits", "env.args.speed=2"], "env.args.speed"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(launch: Any, arguments: list[str], expected: str):
    ring = launch(*arguments)
    assert ring.wait() == 2
    errors = [line for line in ring.output.splitlines() if line.startswith("streamrl: ")]
    assert len(errors) == 1
    assert expected in errors[0]
    assert "Traceback" not in ring.output


def test_a_used_run_folder_is_refused_and_stays_as_it_was(launch: Any, tmp_path: Path):
    (tmp_path / "config.yaml").write_text("run: mine\n")
    ring = launch(run_dir=tmp_path)
    assert ring.wait() == 2
    assert "already holds a run" in ring.output
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
