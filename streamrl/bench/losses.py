"""The quickstart with each loss at several lags and seeds: does it learn, on how stale data, how often did it clip.

::

    accuracy    held-out accuracy of the last version, greedy
    steps       until an evaluation first reached ``TARGET_ACCURACY``; a run that never did counts as all its steps
    ess         mean of policy/ess over the second half of the steps
    clip        mean of policy/clip_fraction over the same

Every run starts from the same warmed-up checkpoint of its seed; the losses take turns, so that a slow hour hits all.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.bench.report import Row, publish, summarise

LOSSES = ("tis", "grpo", "gspo", "cispo", "sapo", "decoupled_ppo", "dppo")
LAGS = (0, 2, 8)
TARGET_ACCURACY = 0.8


@dataclass(frozen=True)
class Measured:
    """What one run reached."""

    first_accuracy: float
    accuracy: float
    steps: int
    ess: float
    clip_fraction: float
    lag_mean: float


def run(
    json_path: Path | None,
    seeds: int,
    losses: Sequence[str] = LOSSES,
    lags: Sequence[int] = LAGS,
    steps: int | None = None,
    keep: Path | None = None,
    overrides: Sequence[str] = (),
) -> list[Row]:
    """Train ``seeds`` times with each loss and lag; print rows and a table, write the rows to ``json_path``, if any.

    The run folders go to ``keep``, if given; a run that completed there, with the same settings, is not repeated.
    """
    measured: dict[tuple[str, int], list[Measured]] = {(loss, lag): [] for loss in losses for lag in lags}
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as folder:
        for seed in range(seeds):
            for (loss, lag), results in measured.items():
                name = f"{loss}-lag{lag}-seed{seed}" + (f"-steps{steps}" if steps else "")
                results.append(_train((keep or Path(folder)) / name, loss, lag, seed, steps, overrides))
                print(f"{loss} max_lag={lag} seed={seed} {results[-1]}", file=sys.stderr)
    rows = list(_rows(measured))
    publish(rows, json_path)
    print()
    print(markdown(measured))
    return rows


def markdown(measured: dict[tuple[str, int], list[Measured]]) -> str:
    """A table for docs: medians over the seeds, with the smallest and largest accuracy."""
    lines = [
        "| loss | max_lag | accuracy, from → to (range over seeds) | steps to 80 % | mean lag | ESS | clipped |",
        "|---|---|---|---|---|---|---|",
    ]
    for (loss, lag), results in measured.items():
        accuracies = [result.accuracy for result in results]
        lines.append(
            f"| {loss} | {lag} | {_median(results, 'first_accuracy'):.1%} → {statistics.median(accuracies):.1%} "
            f"({min(accuracies):.1%} to {max(accuracies):.1%}) | {_median(results, 'steps'):.0f} | "
            f"{_median(results, 'lag_mean'):.2f} | {_median(results, 'ess'):.3f} | "
            f"{_median(results, 'clip_fraction'):.2%} |"
        )
    return "\n".join(lines)


def _train(run_dir: Path, loss: str, lag: int, seed: int, steps: int | None, overrides: Sequence[str]) -> Measured:
    command = [sys.executable, "-m", "streamrl.cli", "launch", "--config", "quickstart", "--run-dir", str(run_dir)]
    settings = [f"loss={loss}", f"max_lag={lag}", f"seed={seed}", "wandb=disabled", *overrides]
    if steps is not None:
        settings.append(f"steps={steps}")
    if not completed(run_dir):
        shutil.rmtree(run_dir, ignore_errors=True)  # what an interrupted sweep left
        subprocess.run([*command, *settings], check=True, stdout=subprocess.DEVNULL)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["lag_max"] <= lag
    lines = _lines(run_dir / "metrics.jsonl")
    late = [line for line in lines[len(lines) // 2 :] if line["throughput/trained_tokens_per_s"]]
    reached = [line["step"] for line in lines if line.get("eval/accuracy", 0.0) >= TARGET_ACCURACY]
    return Measured(
        first_accuracy=summary["eval_first"],
        accuracy=summary["eval_last"],
        steps=reached[0] if reached else summary["steps"],
        ess=_mean(late, "policy/ess"),
        clip_fraction=_mean(late, "policy/clip_fraction"),
        lag_mean=_mean(late, "lag/mean"),
    )


def completed(run_dir: Path) -> bool:
    """Whether a run ended there as it should."""
    path = run_dir / "summary.json"
    return path.exists() and json.loads(path.read_text())["status"] == "completed"


def _rows(measured: dict[tuple[str, int], list[Measured]]) -> Iterable[Row]:
    for (loss, lag), results in measured.items():
        baseline = measured.get(("tis", lag), results)
        against = None if baseline is results else [result.accuracy for result in baseline]
        name = f"losses/{loss}/max_lag={lag}"
        yield summarise(f"{name}/accuracy", "share", [result.accuracy for result in results], against)
        yield summarise(f"{name}/steps-to-80%", "steps", [float(result.steps) for result in results])
        yield summarise(f"{name}/ess", "share", [result.ess for result in results])
        yield summarise(f"{name}/clipped", "share", [result.clip_fraction for result in results])


def _median(results: Sequence[Measured], name: str) -> float:
    return statistics.median(float(getattr(result, name)) for result in results)


def _mean(lines: Sequence[dict[str, Any]], key: str) -> float:
    return sum(line[key] for line in lines) / len(lines) if lines else 0.0


def _lines(path: Path) -> list[dict[str, Any]]:
    with path.open() as file:
        return [json.loads(line) for line in file]
