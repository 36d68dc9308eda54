"""Settings, faults and the kill of an engine on vLLM, for the modules that run one."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
from conformance_case import SLOTS
from conformance_model import MAX_LENGTH

from streamrl.engines.calls import Calls
from streamrl.ports import Engine


def settings(*overrides: str) -> list[str]:
    return [f"engine.slots={SLOTS}", f"model.max_length={MAX_LENGTH}", "engine=vllm", *overrides]


def kill_vllm(engine: Engine) -> None:
    for child in psutil.Process().children(recursive=True):
        if child.name().startswith("VLLM::"):
            os.kill(child.pid, signal.SIGKILL)


def salt_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an update not change what its prefix cache is salted with."""
    alike = property(lambda calls: "the same for every version", lambda calls, salt: None)
    monkeypatch.setattr(Calls, "salt", alike, raising=False)
