"""Launch real runs as a user does, and look for whatever they leave behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

TINY = (
    "model.args.hidden_size=32", "model.args.intermediate_size=64", "model.args.num_hidden_layers=2",
    "model.args.num_attention_heads=2", "model.args.num_key_value_heads=2", "model.args.head_dim=16",
    "model.cache=false", "model.max_length=64", "sampling.max_tokens=8", "env=ring_envs:Digits",
    "group.size=4", "group.per_step=4", "engine.slots=16",
    "eval.tasks=16", "wandb=disabled", "liveness.heartbeat_s=0.2",
)  # fmt: skip
"""A ring that starts and steps in seconds."""
DEADLINE_S = 120.0
MARK = "STREAMRL_TEST_RUN"


@dataclass
class Ring:
    """One launched run."""

    run_dir: Path
    process: subprocess.Popen[str]
    mark: str
    temporary: Path
    """Of this run alone, with a short path: addresses of sockets end at 107 characters."""
    shared_before: set[str] = field(default_factory=lambda: shared_memory())
    output: str = ""

    def events(self) -> list[dict[str, Any]]:
        return read_lines(self.run_dir / "events.jsonl")

    def metrics(self) -> list[dict[str, Any]]:
        return read_lines(self.run_dir / "metrics.jsonl")

    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())

    def wait(self) -> int:
        """Exit code; the output is in ``output``."""
        self.output, _ = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode

    def wait_for(self, event: str, actor: str | None = None) -> dict[str, Any]:
        """The first such event; fails when the run ends without it."""

        def find() -> dict[str, Any] | None:
            matching = (e for e in self.events() if e["event"] == event and actor in (None, e["actor"]))
            return next(matching, None)

        return self.wait_until(find, f"event {event} of {actor}")

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: len(self.metrics()) >= step or None, f"step {step}")

    def wait_for_path(self, folder: Path, pattern: str) -> None:
        self.wait_until(lambda: next(folder.glob(pattern), None), f"{pattern} in {folder}")

    def wait_until(self, find: Any, what: str) -> Any:
        """What ``find`` gives once that is not None; fails when the run ends without it."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            if (found := find()) is not None:
                return found
            if self.process.poll() is not None:
                self.wait()
                pytest.fail(f"the run ended without {what}: {self.output}\n{self.logs()}")
            time.sleep(0.02)  # a file written by another process has no event to wait on
        pytest.fail(f"waited {DEADLINE_S} s for {what}\n{self.logs()}")

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-2000:]}" for path in (self.run_dir / "logs").glob("*"))

    def processes(self) -> dict[int, str]:
        """Processes of this run that are alive, by pid."""
        found = {}
        for path in Path("/proc").iterdir():
            if path.name.isdigit() and self.mark in _read(path / "environ") and not _is_zombie(path):
                found[int(path.name)] = _read(path / "cmdline").replace("\0", " ")
        return found

    def assert_nothing_is_left(self) -> None:
        deadline = time.monotonic() + 20
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.05)  # a killed controller's actors end on their own; there is no parent to wait on
        assert self.processes() == {}
        assert list(self.temporary.glob("streamrl-*")) == []
        assert not [name for name in shared_memory() - self.shared_before if not _is_mapped(name)]


def read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def shared_memory() -> set[str]:
    """Named shared memory of runs, and of torch and the engines in them."""
    return {name for name in os.listdir("/dev/shm") if re.match(r"streamrl|torch_|psm_|sglang_|vllm_", name)}


def _is_mapped(name: str) -> bool:
    """Whether it is another run's: some process has it open."""
    return any(f"/dev/shm/{name}" in _read(path) for path in Path("/proc").glob("[0-9]*/maps"))


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _is_zombie(path: Path) -> bool:
    return ") Z " in _read(path / "stat")


class Launcher:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.rings: list[Ring] = []

    def __call__(
        self, *arguments: str, run_dir: Path | None = None, config: str = "base", command: str = "launch"
    ) -> Ring:
        mark = f"{MARK}={uuid.uuid4().hex}"
        run_dir = run_dir or self._folder / f"run-{len(self.rings)}"
        temporary = Path(tempfile.mkdtemp(prefix="ring-"))
        process = subprocess.Popen(
            [sys.executable, "-m", "streamrl.cli", command, "--config", config, "--run-dir", str(run_dir),
             *TINY, *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=Path(__file__).parent,
            env=os.environ | dict([mark.split("=")]) | {"TMPDIR": str(temporary)},
        )  # fmt: skip
        ring = Ring(run_dir, process, mark, temporary)
        self.rings.append(ring)
        return ring


@contextmanager
def launching(folder: Path) -> Iterator[Launcher]:
    """Launch tiny runs; each is ended and checked for leftovers at the end."""
    launcher = Launcher(folder)
    try:
        yield launcher
        for ring in launcher.rings:
            if ring.process.poll() is None:
                ring.process.terminate()
                ring.wait()
            ring.assert_nothing_is_left()
    finally:
        for ring in launcher.rings:
            shutil.rmtree(ring.temporary, ignore_errors=True)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launcher]:
    with launching(tmp_path) as launcher:
        yield launcher


@pytest.fixture(scope="module")
def launch_for_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """For a run that several tests of a module look at."""
    with launching(tmp_path_factory.mktemp("runs")) as launcher:
        yield launcher
