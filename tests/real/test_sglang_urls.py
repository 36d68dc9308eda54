"""A whole run whose rollouters share an SGLang server that runs already (``engine.urls``)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conformance_model import ConformanceModel, build_model
from sglang_interpreter import PYTHON, needs_sglang

from streamrl.config import load_config
from streamrl.engines.sglang.engine import KEY_VARIABLE
from streamrl.engines.sglang.server import SglangServer

pytestmark = [needs_sglang, pytest.mark.timeout(400)]

LENGTH = 64
DEADLINE_S = 240.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ConformanceModel:
    return build_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: ConformanceModel) -> Iterator[SglangServer]:
    runner = asyncio.Runner()
    settings = [
        "engine=sglang",
        f"engine.python={PYTHON}",
        "engine.slots=16",
        f"model.max_length={LENGTH}",
        "sampling.max_tokens=8",
        "liveness.start_timeout_s=300",  # a busy machine needs minutes for what takes 25 s on an idle one
    ]
    server = runner.run(SglangServer.start(load_config(overrides=settings), str(model.folder)))
    yield server
    runner.run(server.close())
    runner.close()


def lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def launch(model: ConformanceModel, server: SglangServer, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "streamrl.cli", "launch", "--run-dir", str(folder), f"model.name={model.folder}",
         f"model.max_length={LENGTH}", "sampling.max_tokens=8", "env=ring_envs:Digits", "group.size=4",
         "group.per_step=4", "engine.slots=16", "engine=sglang", f"engine.urls=[{server.url}]", "eval.tasks=16",
         "wandb=disabled", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=Path(__file__).parents[1] / "ring",
        env=os.environ | {KEY_VARIABLE: server.key},
    )  # fmt: skip


def test_rollouters_share_a_running_server_which_outlives_its_host_and_the_run(
    model: ConformanceModel, server: SglangServer, tmp_path: Path
):
    folder = tmp_path / "run"
    run = launch(model, server, folder, "--rollouts", "2", "--steps", "12")
    try:
        deadline = time.monotonic() + DEADLINE_S
        while len(lines(folder / "metrics.jsonl")) < 3 and run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)  # a file written by another process has no event to wait on
        ready = {each["actor"]: each for each in lines(folder / "events.jsonl") if each["event"] == "actor_ready"}
        if run.poll() is None:
            assert ready["engine-0"]["url"] == server.url
            os.kill(ready["engine-0"]["pid"], signal.SIGKILL)
        output, _ = run.communicate(timeout=DEADLINE_S)
    finally:
        run.kill()
    assert run.returncode == 0, output
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["restarts"]) == ("completed", 12, 1)
    assert (summary["groups"]["lost"], summary["groups"]["duplicates_trained"]) == (0, 0)
    assert all(gate["passed"] for gate in summary["parity"].values())
    assert max(line["mismatch/rms"] for line in lines(folder / "metrics.jsonl")) < 1e-4
    os.kill(server.pid, 0)  # it is there still
