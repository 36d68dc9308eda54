"""A run whose two rollouters share a server that runs already (``engine.urls``), and lose its host on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LENGTH = 64
"""``model.max_length`` of the run."""
KILLED_AFTER = 2
"""Steps."""


def lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines only."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def check_a_run_that_outlives_its_host(
    engine: str, url: str, model: Path, folder: Path, *arguments: str, deadline_s: float, env: Mapping[str, str]
) -> None:
    """The process between run and server is killed after a few steps; the run completes, and loses nothing."""
    run = subprocess.Popen(
        [sys.executable, "-m", "streamrl.cli", "launch", "--run-dir", str(folder), "--rollouts", "2", "--steps", "10",
         f"engine={engine}", f"engine.urls=[{url}]", f"model.name={model}", f"model.max_length={LENGTH}",
         "sampling.max_tokens=8", "env=ring_envs:Digits", "group.size=4", "group.per_step=4", "engine.slots=16",
         "wandb=disabled", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=Path(__file__).parents[1] / "ring",
        env=os.environ | env,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + deadline_s
        while len(lines(folder / "metrics.jsonl")) < KILLED_AFTER and run.poll() is None:
            assert time.monotonic() < deadline, f"the run took over {deadline_s} s for {KILLED_AFTER} steps"
            time.sleep(0.1)  # a file written by another process has no event to wait on
        ready = {each["actor"]: each for each in lines(folder / "events.jsonl") if each["event"] == "actor_ready"}
        if run.poll() is None:
            assert ready["engine-0"]["url"] == url
            os.kill(ready["engine-0"]["pid"], signal.SIGKILL)
        output, _ = run.communicate(timeout=deadline_s)
    finally:
        run.kill()
    assert run.returncode == 0, output
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["restarts"]) == ("completed", 10, 1)
    assert (summary["groups"]["lost"], summary["groups"]["duplicates_trained"]) == (0, 0)
    assert all(gate["passed"] for gate in summary["parity"].values())
    assert max(line["mismatch/rms"] for line in lines(folder / "metrics.jsonl")) < 1e-4
