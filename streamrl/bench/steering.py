"""The quickstart with a lag bound that is too wide for its learning rate, without and with ``staleness.target_ess``.

::

    ess         mean of policy/ess over the second half of the steps; ess-deviation: its standard deviation there
    lag         mean of lag/mean over the same: how old the tokens are that the run settled on
    headroom    mean of lag/headroom over the same, in batches of ``group.per_step`` groups
    accuracy    held-out accuracy of the last version, greedy

The learning rate is constant, so that the data age as fast at the end as in the middle. Target 0 is steering switched
off: rollouters go as far ahead as ``max_lag`` allows. Targets take turns, so that a slow hour hits all.
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

from streamrl.bench.losses import completed
from streamrl.bench.report import Row, publish, summarise

TARGETS = (0.0, 0.9)
SETTINGS = ("max_lag=8", "trainer.lr=1e-4", "trainer.schedule=constant", "wandb=disabled")
STEPS = 800
GROUPS_PER_STEP = 32
"""``group.per_step`` of the quickstart."""


@dataclass(frozen=True)
class Measured:
    """What one run settled on."""

    ess: float
    ess_deviation: float
    lag: float
    headroom: float
    accuracy: float


def run(
    json_path: Path | None,
    seeds: int,
    targets: Sequence[float] = TARGETS,
    keep: Path | None = None,
) -> list[Row]:
    """Train ``seeds`` times with each target; print rows, write them to ``json_path``, if any.

    The run folders go to ``keep``, if given; a run that completed there is not repeated.
    """
    measured: dict[float, list[Measured]] = {target: [] for target in targets}
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as folder:
        for seed in range(seeds):
            for target, results in measured.items():
                results.append(_train((keep or Path(folder)) / f"target{target:g}-seed{seed}", target, seed))
                print(f"target_ess={target:g} seed={seed} {results[-1]}", file=sys.stderr)
    rows = list(_rows(measured))
    publish(rows, json_path)
    return rows


def _train(run_dir: Path, target: float, seed: int) -> Measured:
    command = [sys.executable, "-m", "streamrl.cli", "launch", "--config", "quickstart", "--run-dir", str(run_dir)]
    settings = [*SETTINGS, f"staleness.target_ess={target:g}", f"seed={seed}", f"steps={STEPS}"]
    if not completed(run_dir):
        shutil.rmtree(run_dir, ignore_errors=True)  # what an interrupted sweep left
        subprocess.run([*command, *settings], check=True, stdout=subprocess.DEVNULL)
    summary = json.loads((run_dir / "summary.json").read_text())
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    late = [line for line in lines[len(lines) // 2 :] if line["throughput/trained_tokens_per_s"]]
    ess = [line["policy/ess"] for line in late]
    return Measured(
        ess=statistics.fmean(ess),
        ess_deviation=statistics.pstdev(ess),
        lag=statistics.fmean(line["lag/mean"] for line in late),
        headroom=statistics.fmean(line["lag/headroom"] for line in late) / GROUPS_PER_STEP,
        accuracy=summary["eval_last"],
    )


def _rows(measured: dict[float, list[Measured]]) -> Iterable[Row]:
    units = {"ess": "share", "ess_deviation": "share", "lag": "versions", "headroom": "batches", "accuracy": "share"}
    for target, results in measured.items():
        for name, unit in units.items():
            if name == "headroom" and not target:
                continue  # there is none without steering
            without = measured.get(0.0, results)
            against = None if without is results or name == "headroom" else [getattr(each, name) for each in without]
            values = [getattr(each, name) for each in results]
            yield summarise(f"steering/target={target:g}/{name.replace('_', '-')}", unit, values, against)
