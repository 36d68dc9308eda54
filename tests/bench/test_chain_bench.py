"""The ``chain`` section of ``streamrl bench sync``: however many hosts there are, the trainer is read once."""

from __future__ import annotations

import importlib.util

import pytest

from streamrl.bench.sync import command
from streamrl.bench.sync.stage import Stage


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")
def test_of_three_engines_on_two_hosts_one_reads_from_the_trainer() -> None:
    with Stage("0.02", 3) as stage:
        contender = command.passed_on(2)
        measured = command.in_turn(stage, [contender], 1, share=1.0)[contender.name]
    read = [each["from_trainer"] / (command.model_gb("0.02") * command.GB) for each in measured]
    assert read == pytest.approx([1.0, 1.0], abs=0.01)
