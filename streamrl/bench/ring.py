"""The whole ring, end to end, at ``max_lag`` 0, 1 and 4; TRL's ``GRPOTrainer`` as an optional peer.

::

    addition   two-digit addition: 32 prompts × 8 answers a step    answers/s, seconds to 90 % held-out accuracy
    reverse    reverse a string of log-uniform length 1…64          useful tokens/s (sampled tokens of trained groups)

Every contender starts from the same warmed-up checkpoint, with the same task, group sizes, sampling and cores, in turn.
Rates count from the end of step ``DISCARDED`` on. ``max_lag`` 0 is the baseline of the asynchronous rows, TRL (where it
is asked for: ``--peer trl``, needs ``pip install 'streamrl[bench]'``) of all.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.bench.report import Row, publish, summarise

LAGS = (0, 1, 4)
DISCARDED = 5
"""Steps that are warm-up."""
TARGET_ACCURACY = 0.9


@dataclass(frozen=True)
class Measured:
    """What one run of one contender reached."""

    rate: float
    """Answers or useful tokens per second."""
    seconds_to_target: float | None
    """From the start of training to the first evaluation at ``TARGET_ACCURACY``; None where it was not reached."""


@dataclass(frozen=True)
class Workload:
    config: str
    unit: str
    measures_learning: bool


WORKLOADS = (Workload("addition", "answers/s", True), Workload("reverse", "useful tokens/s", False))


def run(json_path: Path | None, peers: list[str], runs: int) -> list[Row]:
    """Measure ``runs`` times in turn, print the table, write the rows to ``json_path`` if given."""
    if "trl" in peers:
        from streamrl.bench.trl_peer import check_installed

        check_installed()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as folder:
        for workload in WORKLOADS:
            measured: dict[str, list[Measured]] = defaultdict(list)
            for repetition in range(runs):
                for lag in LAGS:
                    run_dir = Path(folder) / f"{workload.config}-lag{lag}-{repetition}"
                    measured[f"max_lag={lag}"].append(_ring(workload, lag, repetition, run_dir))
                for peer in peers:
                    measured[peer].append(_peer(peer, workload, repetition))
                    print(f"{workload.config} {peer} {measured[peer][-1]}", file=sys.stderr)
            rows += _rows(workload, measured)
    publish(rows, json_path)
    return rows


def _ring(workload: Workload, lag: int, seed: int, run_dir: Path) -> Measured:
    command = [sys.executable, "-m", "streamrl.cli", "launch", "--config", workload.config, "--run-dir", str(run_dir)]
    subprocess.run(
        [*command, f"max_lag={lag}", f"seed={seed}", "wandb=disabled"], check=True, stdout=subprocess.DEVNULL
    )
    summary = json.loads((run_dir / "summary.json").read_text())
    groups = summary["groups"]
    assert summary["status"] == "completed"
    assert groups["duplicates_trained"] == groups["lost"] == 0
    assert summary["lag_max"] <= lag
    measured = Measured(_rate(workload, list(_lines(run_dir / "metrics.jsonl"))), _seconds_to_target(run_dir))
    print(f"{workload.config} max_lag={lag} {measured}", file=sys.stderr)
    return measured


def _rate(workload: Workload, lines: list[dict[str, Any]]) -> float:
    seconds = lines[-1]["time_s"] - lines[DISCARDED - 1]["time_s"]
    counted = lines[DISCARDED:]
    groups = sum(line["throughput/groups_per_s"] * line["wall_s"] for line in counted)
    answers = groups * _group_size(workload)
    if workload.unit == "answers/s":
        return answers / seconds
    return answers * sum(line["length/mean"] for line in counted) / len(counted) / seconds


def _group_size(workload: Workload) -> int:
    from streamrl.config import load_config

    return load_config(workload.config).group.size


def _seconds_to_target(run_dir: Path) -> float | None:
    started = None
    for event in _lines(run_dir / "events.jsonl"):
        if event["event"] == "gate_passed":
            started = event["time"]
        if event["event"] == "evaluated" and event["accuracy"] >= TARGET_ACCURACY:
            assert started is not None
            return event["time"] - started
    return None


def _peer(peer: str, workload: Workload, seed: int) -> Measured:
    assert peer == "trl"
    command = [sys.executable, "-m", "streamrl.bench.trl_peer", workload.config, str(seed)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return Measured(**json.loads(output.splitlines()[-1]))


def _rows(workload: Workload, measured: dict[str, list[Measured]]) -> Iterable[Row]:
    baseline = measured.get("trl", measured["max_lag=0"])
    for contender, results in measured.items():
        against = None if results is baseline else [result.rate for result in baseline]
        name = f"ring/{workload.config}/{contender}"
        yield summarise(f"{name}/rate", workload.unit, [result.rate for result in results], against)
        if not workload.measures_learning:
            continue
        reached = [result.seconds_to_target for result in results]
        if all(seconds is not None for seconds in reached):
            yield summarise(f"{name}/to-90%", "s", [seconds for seconds in reached if seconds is not None])
        else:
            missed = sum(seconds is None for seconds in reached)
            print(f"{name}: {missed} of {len(reached)} runs never reached {TARGET_ACCURACY:.0%}", file=sys.stderr)


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    with path.open() as file:
        for line in file:
            yield json.loads(line)
