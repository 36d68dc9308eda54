"""vLLM's worker with a second set that waits, and fails where it is told to: what a test needs to look in between."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from streamrl.engines.vllm.staged import SecondSet
from streamrl.engines.vllm.worker import WorkerExtension

PIPE = "STREAMRL_TEST_STAGE"
"""Environment variable: a named pipe. Where it exists, each fill begins when a word can be read from it."""
WORKER = f"{__name__}.HeldWorker"


class HeldWorker(WorkerExtension):
    def streamrl_keep_second_set(self) -> str:
        refused = super().streamrl_keep_second_set()
        if self._streamrl_stager is not None:
            _hold(self._streamrl_stager.second)
        return refused


def _hold(second: SecondSet) -> None:
    fill = second.fill

    def held(tensors: Mapping[str, torch.Tensor]) -> None:
        pipe = Path(os.environ[PIPE])
        if pipe.exists() and pipe.read_text(encoding="utf-8") == "fail":
            fill(dict(list(tensors.items())[: len(tensors) // 2]))
        fill(tensors)

    second.fill = held  # type: ignore[method-assign]
