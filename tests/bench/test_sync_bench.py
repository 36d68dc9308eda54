"""What ``streamrl bench sync`` sends, how it verifies it, and that nothing stays behind; no time is judged."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.bench.sync import command, steps, weights
from streamrl.bench.sync.stage import Stage
from streamrl.errors import StreamRLError


def test_models_have_the_sizes_that_they_are_named_after() -> None:
    sizes = {size: command.model_gb(size) for size in weights.SIZES}
    assert sizes == pytest.approx({"0.02": 0.02, "0.5": 0.53, "2": 2.03}, rel=0.02)


def test_about_the_given_share_of_values_changes_and_the_digest_with_it() -> None:
    model = {"a": torch.zeros(1000, 1000, dtype=torch.bfloat16), "b": torch.ones(7, dtype=torch.bfloat16)}
    before, old = weights.digest(model), {name: tensor.clone() for name, tensor in model.items()}
    weights.change(model, 0.1, seed=1)
    share = (model["a"].view(torch.int16) != old["a"].view(torch.int16)).float().mean()
    assert float(share) == pytest.approx(0.1, abs=0.003)
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


@pytest.mark.parametrize("contender", [command.ours("shm"), command.GLOO], ids=lambda each: each.name)
def test_every_update_is_verified_and_nothing_stays_behind(contender: Any) -> None:
    with Stage("0.02", 2) as stage:
        folders = [Path(folder) for folder in stage.folders]
        assert all(folder.is_dir() for folder in folders)
        measured = command.in_turn(stage, [contender], 1, share=1.0)
        assert all(each["seconds"] > 0 for each in measured[contender.name])
        assert len(measured[contender.name]) == command.COUNTED_UPDATES
    assert not any(folder.exists() for folder in folders)


def test_weights_that_did_not_arrive_are_noticed() -> None:
    idle = command.Contender("nobody loads", "streamrl.bench.sync.copies", loads=False)
    with Stage("0.02", 1) as stage, pytest.raises(StreamRLError, match="nobody loads: version 0 did not arrive"):
        command.in_turn(stage, [idle], 1, share=1.0)


KILLED = """
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
