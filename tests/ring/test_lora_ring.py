"""A real run that trains adapters: they alone travel, PEFT reads what is left, a replay has the same ones."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.actors.recording import first_checkpoint
from streamrl.policy.model import load_model

RANK = 4
PER_LAYER = 4 * (32 + 32) + 3 * (32 + 64)
"""Sizes of both sides of each linear layer: four of the attention, three of the feed-forward part."""
ADAPTER_BYTES = 2 * RANK * PER_LAYER * 4
"""Two layers, float32."""


@pytest.fixture(scope="module")
def peft() -> Any:
    return pytest.importorskip("peft", reason="model.lora needs the peft package: pip install 'streamrl[lora]'")


def test_two_ranks_train_adapters_that_travel_alone_and_can_be_trained_again_and_read(
    launch: Any, tmp_path: Path, peft: Any
):
    ring = launch(
        "--steps", "4", "--trainers", "2", "--rollouts", "2", f"model.lora.rank={RANK}", "trainer.lr=1e-2",
        "sync.transport=disk", "buffer.keep=all", "loss.kl.coefficient=0.01", "loss.kl.reference=initial",
    )  # fmt: skip
    assert ring.wait() == 0, ring.output + ring.logs()
    lines = ring.metrics()
    assert [line["sync/bytes"] for line in lines] == [ADAPTER_BYTES] * 4
    assert max(line["mismatch/canary_rms"] for line in lines) < 1e-5
    assert lines[0]["policy/kl_reference"] == 0 < lines[-1]["policy/kl_reference"]
    assert not [event for event in ring.events() if event["event"] in ("version_failed", "version_refused")]
    (ready,) = [e for e in ring.events() if (e["event"], e["actor"]) == ("actor_ready", "trainer-0")]
    assert ready["trained"] == ADAPTER_BYTES // 4

    again = subprocess.run(
        [sys.executable, "-m", "streamrl.cli", "replay", str(ring.run_dir), "--run-dir", str(tmp_path / "again")],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
    )  # fmt: skip
    assert again.returncode == 0, again.stdout
    assert again.stdout.splitlines()[-1] == "weights of all 5 versions are identical to the recorded ones"

    shutil.copy(ring.run_dir / "adapter_config.json", tmp_path)
    shutil.copy(ring.run_dir / "weights" / "version-4" / "model.safetensors", tmp_path / "adapter_model.safetensors")
    base = load_model(first_checkpoint(ring.run_dir), "float32")
    row = torch.arange(8, 40)[None]
    with torch.no_grad():
        before = base(input_ids=row).logits
        trained = peft.PeftModel.from_pretrained(base, tmp_path)
        assert (trained(input_ids=row).logits - before).abs().max() > 1e-3
    assert all(parameter.abs().sum() > 0 for name, parameter in trained.named_parameters() if ".lora_" in name)


def test_a_target_that_the_model_lacks_ends_the_launch_with_those_that_it_has(launch: Any, peft: Any):
    ring = launch("--steps", "1", "model.lora.rank=4", "model.lora.targets=[query]")
    assert ring.wait() == 2
    assert ring.output.splitlines()[-1] == (
        "streamrl: model.lora.targets: no linear layer in the blocks of Qwen3ForCausalLM ends with 'query'; "
        "there are q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
    )
