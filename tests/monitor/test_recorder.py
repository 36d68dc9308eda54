"""The run folder says everything, and a folder that cannot be written ends the run with one line."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import load_config
from streamrl.errors import ConfigError
from streamrl.metrics import KEYS, complete_line
from streamrl.monitor.recorder import Recorder, RecorderError
from streamrl.monitor.wandb_sink import WandbSink
from streamrl.runtime.folders import create_run_folder, create_socket_folder

CONFIG = load_config("quickstart", ["wandb=disabled"])


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return create_run_folder(tmp_path / "run", CONFIG)


def test_a_line_holds_every_key_and_zero_where_nothing_was_measured():
    line = complete_line({"step": 3, "reward/mean": 0.5, "reward/chain_sum/mean": 0.5, "eval/accuracy": 0.9})
    assert list(line)[: len(KEYS)] == list(KEYS)
    assert (line["step"], line["reward/mean"], line["policy/ess"]) == (3, 0.5, 0)
    assert line["eval/accuracy"] == 0.9


def test_a_metric_that_nobody_documented_is_refused():
    with pytest.raises(KeyError, match="policy/loess"):
        complete_line({"policy/loess": 1})


def test_metrics_and_events_are_on_disk_as_soon_as_they_are_reported(run_dir: Path):
    recorder = Recorder(run_dir, CONFIG)
    recorder.metrics({"step": 1})
    recorder.event("actor_ready", {"slots": 4}, "rollouter-0", 17, "here")
    event = json.loads((run_dir / "events.jsonl").read_text())
    assert event | {"time": 0} == {
        "time": 0, "event": "actor_ready", "actor": "rollouter-0", "pid": 17, "host": "here", "slots": 4,
    }  # fmt: skip
    assert json.loads((run_dir / "metrics.jsonl").read_text())["step"] == 1
    recorder.close()


def test_a_field_cannot_overwrite_who_reported_it(run_dir: Path):
    recorder = Recorder(run_dir, CONFIG)
    recorder.event("put", {"actor": "somebody"}, "rollouter-0")
    assert json.loads((run_dir / "events.jsonl").read_text())["actor"] == "rollouter-0"
    recorder.close()


def test_a_disk_that_fills_up_during_the_run_is_named(run_dir: Path):
    os.symlink("/dev/full", run_dir / "metrics.jsonl")
    recorder = Recorder(run_dir, CONFIG)
    with pytest.raises(RecorderError, match=r"metrics.jsonl: cannot be written \(No space left on device\)"):
        recorder.metrics({"step": 1})
    recorder.close()


def test_a_disk_that_is_full_at_the_start_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 30, 1 << 30, 4096))
    with pytest.raises(ConfigError, match="4 KiB free on this disk, a run needs 16 MiB"):
        create_run_folder(tmp_path / "run", CONFIG)


def test_a_run_folder_in_use_or_of_somebody_else_is_refused(tmp_path: Path, run_dir: Path):
    with pytest.raises(ConfigError, match="already holds a run"):
        create_run_folder(run_dir, CONFIG)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").touch()
    with pytest.raises(ConfigError, match="not an empty folder"):
        create_run_folder(tmp_path / "notes", CONFIG)
    with pytest.raises(ConfigError, match="cannot be written"):
        create_run_folder(Path("/proc/nowhere"), CONFIG)


def test_socket_folders_are_private_short_and_swept_when_their_owner_is_gone(monkeypatch: pytest.MonkeyPatch):
    folder = Path(create_socket_folder())
    try:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert len(f"{folder}/control") < 100
        (folder / "owner").write_text("4194999")  # above the kernel's largest pid
        again = Path(create_socket_folder())
        assert not folder.exists()
        assert again.exists()
        shutil.rmtree(again)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def events_after(sink: WandbSink, events: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """What the sink reports with the line after its thread has ended."""
    assert sink._thread is not None
    sink._thread.join()
    sink.log({"step": 1})
    return events


def test_a_wandb_that_cannot_start_is_one_event_and_no_error(run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(**_: object) -> None:
        raise RuntimeError("no service")

    monkeypatch.setattr("wandb.init", broken)
    events: list[tuple[str, dict[str, Any]]] = []
    sink = WandbSink(run_dir, load_config("quickstart", ["wandb=offline"]), lambda *event: events.append(event))
    assert events_after(sink, events) == [("wandb_failed", {"reason": "RuntimeError: no service"})]
    sink.close()


def test_wandb_online_without_an_account_becomes_offline(run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    modes: list[object] = []

    def init(mode: object, **_: object) -> None:
        modes.append(mode)
        raise RuntimeError("enough seen")

    monkeypatch.setattr("wandb.login", lambda prompt: False)
    monkeypatch.setattr("wandb.init", init)
    events: list[tuple[str, dict[str, Any]]] = []
    sink = WandbSink(run_dir, load_config("quickstart", ["wandb=online"]), lambda *event: events.append(event))
    assert events_after(sink, events)[0][0] == "wandb_offline"
    assert modes == ["offline"]
    sink.close()
