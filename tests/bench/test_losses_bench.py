"""What ``streamrl bench losses`` makes of the runs that it measured; nothing is launched."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from streamrl.bench import losses
from streamrl.bench.losses import Measured


def fake_run(accuracies: dict[int, float], ess: list[float]) -> Any:
    """In place of ``subprocess.run``: a run folder as a run leaves it."""

    def launch(command: list[str], **_: Any) -> None:
        folder = Path(command[command.index("--run-dir") + 1])
        folder.mkdir(parents=True)
        lines = [
            {
                "step": step,
                "policy/ess": value,
                "policy/clip_fraction": 0.1 * step,
                "lag/mean": 1.0,
                "throughput/trained_tokens_per_s": float(step != 4),
            }
            | ({"eval/accuracy": accuracies[step]} if step in accuracies else {})
            for step, value in enumerate(ess, start=1)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        summary = {"status": "completed", "lag_max": 0, "steps": len(ess), "eval_first": 0.3, "eval_last": 0.9}
        (folder / "summary.json").write_text(json.dumps(summary))

    return launch


def test_a_run_gives_its_accuracy_its_steps_and_the_means_of_its_second_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", fake_run({2: 0.5, 3: 0.8, 4: 0.9}, [0.1, 0.1, 0.8, 0.2, 0.9, 1.0]))
    measured = losses._train(tmp_path / "run", "gspo", 2, 0, None, ())
    # Step 4 trained nothing: its zeros are no measurement.
    assert measured == Measured(0.3, 0.9, 3, pytest.approx(0.95), pytest.approx(0.55), 1.0)


def test_a_run_that_never_reached_the_target_counts_as_all_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", fake_run({2: 0.5}, [1.0] * 7))
    assert losses._train(tmp_path / "run", "gspo", 2, 0, None, ()).steps == 7


def test_a_run_that_completed_is_not_repeated_and_an_interrupted_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", fake_run({2: 0.9}, [1.0] * 4))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text('{"status": "interrupted"}')
    first = losses._train(tmp_path / "run", "gspo", 2, 0, None, ())
    monkeypatch.setattr(subprocess, "run", None)
    assert losses._train(tmp_path / "run", "gspo", 2, 0, None, ()) == first


def test_the_table_has_a_line_for_each_loss_and_lag_with_medians_and_the_range() -> None:
    runs = [Measured(0.3, accuracy, steps, 0.9, 0.01, 1.5) for accuracy, steps in ((0.8, 500), (0.95, 700), (0.9, 600))]
    text = losses.markdown({("tis", 0): runs, ("gspo", 8): runs[:1]})
    assert "| tis | 0 | 30.0% → 90.0% (80.0% to 95.0%) | 600 | 1.50 | 0.900 | 1.00% |" in text
    assert "| gspo | 8 | 30.0% → 80.0%" in text


def test_accuracies_are_compared_with_the_default_loss_at_the_same_lag() -> None:
    good, bad = Measured(0.3, 0.9, 1, 1.0, 0.0, 0.0), Measured(0.3, 0.45, 1, 1.0, 0.0, 0.0)
    rows = {row.name: row for row in losses._rows({("tis", 2): [good], ("sapo", 2): [bad]})}
    assert rows["losses/sapo/max_lag=2/accuracy"].ratio == pytest.approx(0.5)
    assert rows["losses/tis/max_lag=2/accuracy"].ratio is None
