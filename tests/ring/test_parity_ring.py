"""Whole runs at the parity gate: what is wrong with an engine ends a launch before the first step, by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SHARP = ("model.args.initializer_range=0.3", "sampling.temperature=0.7")
"""An untrained policy whose distributions are far from flat."""


def test_raw_logprobs_end_the_launch_with_exit_code_3_and_nothing_is_trained(launch: Any) -> None:
    ring = launch("--steps", "2", "--rollouts", "2", *SHARP, "env=faulty_envs:Broken", "env.args.fault=raw")
    assert ring.wait() == 3, ring.output + ring.logs()
    assert (
        "parity gate semantics failed: rollouter-0: raw instead of processed log-probs: sampled at temperature 0.7"
        in (ring.output)
    )
    assert "worst token, of rollouter-0" in ring.output
    summary = ring.summary()
    assert (summary["status"], summary["steps"], summary["groups"]["issued"]) == ("failed", 0, 0)
    assert summary["parity"]["semantics"]["cause"].startswith("raw instead of processed log-probs")
    assert ring.metrics() == []
    gates = {event["gate"]: event["event"] for event in ring.events() if event["event"].startswith("gate_")}
    assert gates == {"semantics": "gate_failed", "path": "gate_not_judged", "numerics": "gate_not_judged"}


def test_a_tensor_that_is_not_loaded_is_named(launch: Any) -> None:
    ring = launch("--steps", "2", *SHARP, "env=faulty_envs:Broken", "env.args.fault=norm")
    assert ring.wait() == 3, ring.output + ring.logs()
    assert "parity gate path failed: rollouter-0: tensor model.norm.weight not loaded" in ring.output


def test_parity_warn_trains_all_the_same_and_flags_every_line(launch: Any) -> None:
    ring = launch("--steps", "2", *SHARP, "env=faulty_envs:Broken", "env.args.fault=raw", "parity=warn")
    assert ring.wait() == 0, ring.output + ring.logs()
    assert [line["parity/failed_gates"] for line in ring.metrics()] == [1, 1]
    assert "parity gates failed: 1" in ring.output
    assert not ring.summary()["parity"]["semantics"]["passed"]


@pytest.mark.parametrize("rollouts", ["1", "2"])
def test_the_gate_waits_for_the_successor_of_an_engine_that_dies_in_its_rehearsal(
    launch: Any, tmp_path: Path, rollouts: str
) -> None:
    grave = tmp_path / "grave"
    ring = launch("--steps", "2", "--rollouts", rollouts, *SHARP, "env=faulty_envs:DiesOnce", f"env.args.grave={grave}")
    assert ring.wait() == 0, ring.output + ring.logs()
    assert grave.exists()
    order = [event["event"] for event in ring.events()]
    assert order.index("actor_restarted") < order.index("gate_passed")
    assert f"parity of {rollouts} engine" in ring.output
    assert [line["parity/failed_gates"] for line in ring.metrics()] == [0, 0]


def test_an_engine_that_never_answers_ends_the_launch_with_exit_code_3_and_the_setting(launch: Any) -> None:
    ring = launch("--steps", "2", *SHARP, "env=faulty_envs:Broken", "env.args.fault=deaf", "sync.timeout_s=10")
    assert ring.wait() == 3, ring.output + ring.logs()
    assert "the engine took over 8 s to rehearse the first weight update; raise sync.timeout_s" in ring.output
    assert [event for event in ring.events() if event["event"] == "actor_restarted"] == []
    assert ring.metrics() == []


def test_a_healthy_run_says_so_in_one_line(launch: Any) -> None:
    ring = launch("--steps", "2", "--trainers", "2", *SHARP, "sampling.top_p=0.9", "max_lag=0")
    assert ring.wait() == 0, ring.output + ring.logs()
    (line,) = [line for line in ring.output.splitlines() if line.startswith("parity of 1 engine with the trainer: ")]
    assert "semantics passed" in line
    assert [line["parity/failed_gates"] for line in ring.metrics()] == [0, 0]
    assert max(line["mismatch/rms"] for line in ring.metrics()) < 1e-5


def test_the_parity_command_prints_the_table_and_trains_nothing(launch: Any) -> None:
    ring = launch(*SHARP, command="parity")
    assert ring.wait() == 0, ring.output + ring.logs()
    for text in ("shared prefix", "in flight", "all tokens", "worst token, of rollouter-0", "trainer: body float32"):
        assert text in ring.output
    assert ring.metrics() == []
    assert ring.summary()["tokens_trained"] == 0
