"""A mixture of experts is trained and gathered like any other model: its experts are one tensor of three axes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mixture_process
import pytest
import torch
from learner_cases import batch, distance, reference_step, settings, varied_groups

from streamrl.policy.learner import Learner

RANKS = 3


def test_a_step_is_the_unpacked_loss_of_transformers_given_to_adamw() -> None:
    config, expected, model = settings(eps=0.1), mixture_process.mixture(), mixture_process.mixture()
    loss, norm = reference_step(expected, config, varied_groups())
    metrics = Learner(config, model).step(batch(varied_groups()))
    assert metrics["policy/loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["policy/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert distance(dict(model.named_parameters()), dict(expected.named_parameters())) < 1e-6


def test_ranks_that_share_the_experts_take_the_same_step_and_gather_it(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    script, arguments = mixture_process.__file__, [str(RANKS), str(tmp_path / "store"), str(tmp_path / "out.pt")]
    processes = [
        subprocess.Popen([sys.executable, script, str(rank), *arguments], env=environment) for rank in range(RANKS)
    ]
    try:
        assert [process.wait(200) for process in processes] == [0] * RANKS
    finally:
        for process in processes:
            process.kill()
            process.wait()
    seen, alone = torch.load(tmp_path / "out.pt", weights_only=True), mixture_process.step(0, 1, "")
    for name in ("policy/loss", "policy/grad_norm"):
        assert seen["metrics"][name] == pytest.approx(alone["metrics"][name], rel=1e-5), name
    assert distance(seen["weights"], alone["weights"]) < 1e-6
