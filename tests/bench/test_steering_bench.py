"""What ``streamrl bench steering`` makes of the runs that it measured; nothing is launched."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from streamrl.bench import steering
from streamrl.config import load_config


def fake_run(commands: list[list[str]], ess: list[float]) -> Any:
    """In place of ``subprocess.run``: a run folder as a run leaves it."""

    def launch(command: list[str], **_: Any) -> None:
        commands.append(command)
        folder = Path(command[command.index("--run-dir") + 1])
        folder.mkdir(parents=True)
        steered = "staleness.target_ess=0" not in command
        lines = [
            {
                "policy/ess": value,
                "lag/mean": 1.0 + steered,
                "lag/headroom": 64.0 * steered,
                "throughput/trained_tokens_per_s": float(value > 0),
            }
            for value in ess
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "summary.json").write_text(json.dumps({"eval_last": 0.5, "status": "completed"}))

    return launch


def test_a_run_gives_the_mean_and_the_deviation_of_its_second_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", fake_run([], [0.1, 0.1, 0.1, 0.8, 0.0, 1.0]))
    measured = steering._train(tmp_path / "run", 0.9, 0)
    # The fifth step trained nothing: its zero is no measurement.
    assert measured == steering.Measured(pytest.approx(0.9), pytest.approx(0.1), 2.0, 2.0, 0.5)


def test_targets_are_held_against_the_run_without_and_take_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", fake_run(commands, [0.5, 0.5]))
    rows = {row.name: row for row in steering.run(tmp_path / "rows.json", 2, (0.0, 0.9))}
    assert (rows["steering/target=0.9/lag"].baseline, rows["steering/target=0.9/lag"].ratio) == (1.0, 2.0)
    assert rows["steering/target=0/lag"].baseline is None
    assert rows["steering/target=0.9/headroom"].baseline is None
    assert "steering/target=0/headroom" not in rows
    order = [part for command in commands for part in command if part.startswith("staleness.")]
    assert order == ["staleness.target_ess=0", "staleness.target_ess=0.9"] * 2
    assert len(json.loads((tmp_path / "rows.json").read_text())) == len(rows) == 9


def test_a_run_that_completed_in_the_kept_folder_is_not_repeated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", fake_run(commands, [0.5, 0.5]))
    first = steering.run(None, 1, (0.0, 0.9), keep=tmp_path)
    assert steering.run(None, 1, (0.0, 0.9), keep=tmp_path) == first
    assert len(commands) == 2


def test_its_settings_are_those_of_the_quickstart_that_launch_takes():
    config = load_config("quickstart", [*steering.SETTINGS, "staleness.target_ess=0.9"])
    assert config.group.per_step == steering.GROUPS_PER_STEP
    assert config.max_lag == 8
