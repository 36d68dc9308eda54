"""Shards of several ranks become the bytes of one slot on rank 0."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gather_process
import pytest
import torch

from streamrl.errors import WeightSyncError
from streamrl.sync.arena import Filling, describe
from streamrl.sync.gather import gather
from streamrl.sync.manifest import plan_manifest
from streamrl.sync.staging import slot_memory, tensors_in


def expected() -> bytes:
    """The slot as one process writes it that holds every tensor."""
    plan = gather_process.manifest()
    memory = slot_memory(plan)
    for name, view in tensors_in(plan, memory).items():
        view.copy_(gather_process.named(torch.bfloat16)[name])
    return bytes(memory)


def test_one_rank_casts_to_the_dtypes_of_the_manifest() -> None:
    plan, complete = gather_process.manifest(), []
    memory = slot_memory(plan)
    filling = Filling(plan, memory, complete.append)
    gather(gather_process.named().items(), plan, filling)
    filling.finish(0)
    assert bytes(memory) == expected()
    assert complete == list(range(len(plan.buckets)))


@pytest.mark.parametrize("ranks", [2, 3])
def test_rank_0_gathers_the_shards_of_all_in_the_order_of_the_buckets(ranks: int, tmp_path: Path) -> None:
    script, out = Path(gather_process.__file__), tmp_path / "out.json"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen([sys.executable, script, str(rank), str(ranks), tmp_path / "store", out], env=environment)
        for rank in range(ranks)
    ]
    try:
        assert [process.wait(120) for process in processes] == [0] * ranks
    finally:
        for process in processes:
            process.kill()
            process.wait()
    got = json.loads(out.read_text())
    assert bytes.fromhex(got["bytes"]) == expected()
    assert got["buckets"] == list(range(len(gather_process.manifest().buckets)))


def test_a_parameter_that_the_manifest_does_not_have_is_named() -> None:
    plan = plan_manifest(describe({"a": torch.zeros(2, 3)}), 1024)
    filling = Filling(plan, slot_memory(plan), lambda index: None)
    for named in ({"b": torch.zeros(2, 3)}, {"a": torch.zeros(3, 2)}):
        with pytest.raises(WeightSyncError, match=r"parameter '[ab]' .* is not in the manifest in this shape"):
            gather(named.items(), plan, filling)
