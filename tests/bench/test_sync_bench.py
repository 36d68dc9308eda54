"""What ``streamrl bench sync`` sends, how it verifies it, and that nothing stays behind; no time is judged."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.bench.sync import command, steps, weights
from streamrl.bench.sync import stage as stage_module
from streamrl.bench.sync.stage import Stage
from streamrl.errors import StreamRLError


def test_models_have_the_sizes_that_they_are_named_after() -> None:
    sizes = {size: command.model_gb(size) for size in weights.SIZES}
    assert sizes == pytest.approx({"0.02": 0.02, "0.5": 0.53, "2": 2.03}, rel=0.02)


@pytest.mark.parametrize("anyhow", [False, True])
def test_about_the_given_share_of_values_changes_and_the_digest_with_it(anyhow: bool) -> None:
    model = {"a": torch.zeros(1000, 1000, dtype=torch.bfloat16), "b": torch.ones(7, dtype=torch.bfloat16)}
    before, old = weights.digest(model), {name: tensor.clone() for name, tensor in model.items()}
    weights.change(model, 0.1, seed=1, anyhow=anyhow)
    steps = model["a"].view(torch.int16).int() - old["a"].view(torch.int16).int()
    assert float((steps != 0).float().mean()) == pytest.approx(0.1, abs=0.003)
    assert bool((steps.abs() > 1).any()) == anyhow
    assert weights.digest(model) != before


def test_hardly_any_bf16_value_moves_in_a_small_step_and_all_do_in_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "VALUES", 1 << 16)
    (changed, fraction), *_ = steps.adamw_deltas(1e-6, 1)
    assert 0 < changed < 0.05
    # A value takes its two bytes and one for its place (five where it lies far from the last), of two for each in full.
    assert 1.5 * changed < fraction < 3.5 * changed + 0.001
    (changed, fraction), *_ = steps.adamw_deltas(1e-1, 1)
    assert changed > 0.9
    assert fraction == 1


CONTENDERS = [command.ours("shm"), command.ours("shm", copies=True, ahead=True), command.GLOO]


@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda each: each.name)
def test_every_update_is_verified_and_nothing_stays_behind(contender: Any) -> None:
    with Stage("0.02", 2) as stage:
        folders = [Path(folder) for folder in stage.folders]
        assert all(folder.is_dir() for folder in folders)
        measured = command.in_turn(stage, [contender], 1, share=1.0)
        assert all(each["seconds"] > 0 for each in measured[contender.name])
        assert len(measured[contender.name]) == command.COUNTED_UPDATES
    assert not any(folder.exists() for folder in folders)


def test_a_process_that_fails_at_its_start_takes_the_others_and_the_folders_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folders: list[str] = []
    make = tempfile.mkdtemp

    def noting(**settings: Any) -> str:
        folders.append(make(**settings))
        return folders[-1]

    monkeypatch.setattr(stage_module.tempfile, "mkdtemp", noting)
    with pytest.raises(StreamRLError, match="bench sync: source ended"):
        Stage("of no such size", 2)
    assert len(folders) == 2
    assert not any(Path(folder).exists() for folder in folders)
    assert multiprocessing.active_children() == []


def test_coded_updates_are_measured_by_change_with_the_bytes_that_travelled() -> None:
    changes = [(0.01, False), (0.2, False)]
    with Stage("0.02", 1) as stage:
        full, coded = command._full_and_delta(stage, "zmq", changes, 1)
    assert len(full) == command.COUNTED_UPDATES
    assert list(coded) == changes
    # Three bytes for each value in a hundred, and a few far gaps; two bits for every value.
    for change, fraction in zip(changes, (0.0165, 0.125), strict=True):
        assert [each["fraction"] for each in coded[change]] == pytest.approx([fraction] * 2, rel=0.05)


def test_weights_that_did_not_arrive_are_noticed() -> None:
    idle = command.Contender("nobody loads", "streamrl.bench.sync.copies", loads=False)
    with Stage("0.02", 1) as stage, pytest.raises(StreamRLError, match="nobody loads: version 0 did not arrive"):
        command.in_turn(stage, [idle], 1, share=1.0)


KILLED = """
from streamrl.bench.sync import stage as stage_module
from streamrl.bench.sync.stage import Stage
if __name__ == "__main__":
    with Stage("0.02", 1) as stage:
        print(*(process.pid for process in stage._processes))
        for folder in stage.folders:
            print(folder, flush=True)
        input()
"""


def test_a_bench_that_is_killed_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    script = tmp_path / "bench.py"
    script.write_text(KILLED)
    bench = subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert bench.stdout is not None
    pids = [int(pid) for pid in bench.stdout.readline().split()]
    folders = [Path(bench.stdout.readline().strip()) for _ in range(2)]
    assert len(pids) == 2
    assert all(folder.is_dir() for folder in folders)
    ends = [os.pidfd_open(pid) for pid in pids]
    bench.send_signal(signal.SIGKILL)
    bench.communicate()
    for end in ends:
        assert wait_for_end(end), "a process of the bench lives on"
        os.close(end)
    assert not any(folder.exists() for folder in folders)


def wait_for_end(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 30)[0])
