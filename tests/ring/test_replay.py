"""A run with ``buffer.keep=all`` is trained again from its journal, with the same weights bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.actors.recording import PLAN_FILE, first_checkpoint, journal_folder
from streamrl.buffers import records
from streamrl.buffers.journal.writer import Fsync, Journal
from streamrl.buffers.wire.groups import pack_group
from streamrl.cli import main
from streamrl.config import load_config, to_yaml
from streamrl.types import Group, Trajectory

DEADLINE_S = 120.0
RECORDED = ("buffer.keep=all", "max_lag=2", "trainer.lr=1e-3")


class Replayed:
    """One ended ``streamrl replay``."""

    def __init__(self, run: Path, folder: Path, *arguments: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "streamrl.cli", "replay", str(run), "--run-dir", str(folder), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=DEADLINE_S,
        )  # fmt: skip
        self.code, self.output = done.returncode, done.stdout
        self.folder = folder

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]


def test_a_replay_has_the_weights_and_the_losses_of_the_run_and_another_rate_has_others(launch: Any, tmp_path: Path):
    ring = launch("--steps", "8", *RECORDED)
    assert ring.wait() == 0, ring.output
    recorded = ring.summary()["weights"]
    assert recorded["version"] == 8

    same = Replayed(ring.run_dir, tmp_path / "same")
    assert same.code == 0, same.output
    assert same.output.splitlines()[-1] == "weights of all 9 versions are identical to the recorded ones"
    assert same.summary["weights"] == recorded
    assert same.summary["tokens_trained"] == ring.summary()["tokens_trained"] > 0
    for key in ("policy/loss", "policy/grad_norm", "reward/mean", "lag/mean", "lag/max", "length/max"):
        assert [line[key] for line in same.metrics()] == [line[key] for line in ring.metrics()], key

    other = Replayed(ring.run_dir, tmp_path / "other", "--steps", "3", "trainer.lr=1e-2")
    assert other.code == 0, other.output
    assert other.output.splitlines()[-1] == (
        "weights are not compared with the recorded ones: this replay has trainer.lr=0.01"
    )
    assert other.summary["weights"]["version"] == 3
    known = [event["weights"] for event in ring.events() if "weights" in event]
    assert other.summary["weights"]["digest"] not in known

    falsify(ring.run_dir, version=2)
    wrong = Replayed(ring.run_dir, tmp_path / "wrong")
    assert wrong.code == 1
    last = wrong.output.strip().splitlines()[-1]
    assert last.startswith("streamrl: version 2 is the first whose weights differ from the recorded ones: expected")


def falsify(run: Path, version: int) -> None:
    """Make a run claim that a version had other weights."""
    path = run / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    for event in events:
        if event["event"] == "version_committed" and event["version"] == version and "weights" in event:
            event["weights"] = "0" * 32
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


def test_two_ranks_have_the_weights_of_the_run(launch: Any, tmp_path: Path):
    ring = launch("--steps", "6", "--trainers", "2", *RECORDED)
    assert ring.wait() == 0, ring.output + ring.logs()
    replayed = Replayed(ring.run_dir, tmp_path / "again")
    assert replayed.output.splitlines()[-1] == "weights of all 7 versions are identical to the recorded ones"
    assert replayed.summary["weights"] == ring.summary()["weights"]


def test_a_run_whose_buffer_was_killed_has_one_history(launch: Any, tmp_path: Path):
    ring = launch("--steps", "40", *RECORDED)
    ring.wait_for_step(3)
    os.kill(ring.wait_for("actor_ready", "buffer")["pid"], signal.SIGKILL)
    assert ring.wait() == 0, ring.output + ring.logs()
    assert any(event["event"] == "buffer_restored" for event in ring.events())
    replayed = Replayed(ring.run_dir, tmp_path / "again")
    assert replayed.output.splitlines()[-1] == "weights of all 41 versions are identical to the recorded ones"


def test_a_run_that_goes_on_is_replayed_as_far_as_it_is(launch: Any, tmp_path: Path):
    ring = launch("--steps", "100000", *RECORDED)
    ring.wait_for_step(4)
    replayed = Replayed(ring.run_dir, tmp_path / "again", "--steps", "3")
    assert replayed.code == 0, replayed.output
    assert "has no end yet" in replayed.output.splitlines()[0]
    assert replayed.output.splitlines()[-1] == "weights of all 4 versions are identical to the recorded ones"


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run of three steps with one group each, as far as a refusal looks into it."""
    folder = tmp_path / "run"
    first_checkpoint(folder).mkdir(parents=True)
    (first_checkpoint(folder) / "config.json").write_text("{}")
    write_settings(folder, "buffer.keep=all")
    journal, _ = Journal.open(
        journal_folder(folder), segment_bytes=4096, fsync=Fsync.NEVER, interval_s=1.0, keep_all=True,
        snapshot=lambda: b"state",
    )  # fmt: skip
    for step in (1, 2, 3):
        tokens = np.arange(1000, dtype=np.int32)
        one = Trajectory(tokens, tokens > 3, np.zeros(1000, np.float32), [(0, 996)], reward=0.0)
        meta, payload = pack_group(Group(step, step, "sums", [one]))
        journal.append(records.encode(records.Arrived(meta, None, 0.0)), payload.frames)
        journal.append(records.encode(records.HandedOut(step, step - 1, 1, [step])))
        journal.append(records.encode(records.Acknowledged(step, step)))
    journal.close()
    return folder


def write_settings(folder: Path, *overrides: str) -> None:
    (folder / "config.yaml").write_text(to_yaml(load_config("base", ["wandb=disabled", *overrides])))


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[object, str]:
    """Exit code and the one line of a replay that does not begin."""
    with pytest.raises(SystemExit) as ended:
        main(["replay", *map(str, arguments)])
    (line,) = capsys.readouterr().err.splitlines()
    return ended.value.code, line.removeprefix("streamrl: ")


def segments(run: Path) -> list[Path]:
    return sorted(journal_folder(run).glob("*.journal"))


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, line = refusal(capsys, tmp_path)
    assert code == 2
    assert line == f"{tmp_path}: no config.yaml in it, so it is no run folder; give one, such as runs/<name>-<time>"


def test_a_run_that_kept_live_groups_only_is_refused_with_the_way_out(run: Path, capsys: pytest.CaptureFixture[str]):
    write_settings(run, "buffer.keep=live")
    code, line = refusal(capsys, run)
    assert code == 2
    assert "launch the next run with buffer.keep=all" in line


def test_a_run_without_its_first_weights_is_refused(run: Path, capsys: pytest.CaptureFixture[str]):
    shutil.rmtree(first_checkpoint(run))
    assert refusal(capsys, run) == (
        2, f"{first_checkpoint(run)}: the run's first weights are missing; a replay starts from them"
    )  # fmt: skip


def test_a_journal_without_its_first_segment_is_refused(run: Path, capsys: pytest.CaptureFixture[str]):
    segments(run)[0].unlink()
    code, line = refusal(capsys, run)
    assert code == 1
    assert "0000000001.journal is missing" in line


def test_damage_in_the_middle_is_refused_with_the_steps_before_it(run: Path, capsys: pytest.CaptureFixture[str]):
    third = segments(run)[4]  # a group is larger than a segment, so that each has one of its own
    content = bytearray(third.read_bytes())
    content[len(content) // 2] ^= 1
    third.write_bytes(content)
    code, line = refusal(capsys, run)
    assert code == 1
    assert third.name in line
    assert line.endswith("the steps before the damage can be replayed: --steps 2")


def test_more_steps_than_were_acknowledged_are_refused(run: Path, capsys: pytest.CaptureFixture[str]):
    assert refusal(capsys, run, "--steps", 4) == (
        2, f"--steps 4: {run} holds 3 acknowledged steps; give at most that"
    )  # fmt: skip
    assert refusal(capsys, run, "--steps", 0) == (2, "--steps 0: must be at least 1")


def test_a_replay_itself_is_not_replayed(run: Path, capsys: pytest.CaptureFixture[str]):
    (run / PLAN_FILE).write_text('{"recording": "/runs/first", "steps": 3, "changed": []}')
    code, line = refusal(capsys, run)
    assert code == 2
    assert line.endswith("replay the run that it replayed, /runs/first")


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("trainers=2", "a replay keeps the run's trainers=1: the recorded batches are planned for that many ranks"),
        ("max_lag=0", "which groups there are, and the batch of each, is in the journal"),
        ("group.per_step=4", "which groups there are, and the batch of each, is in the journal"),
        ("buffer.epochs_per_group=2", "which groups there are, and the batch of each, is in the journal"),
        ("model.max_length=1024", "the recorded tokens and log-probs are this model's"),
        ("sampling.temperature=0.5", "the recorded tokens were sampled with it"),
        ("env=ring_envs:Digits", "nothing is generated or evaluated in a replay"),
        ("steps=50", "--steps N replays the first N steps"),
        ("loss.names=ppo", "unknown key 'loss.names'; did you mean 'loss.name'?"),
    ],
)
def test_a_setting_that_the_recorded_batches_depend_on_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str], override: str, reason: str
):
    code, line = refusal(capsys, run, override)
    assert code == 2
    assert reason in line
