"""Run an example as its README says, with nothing shared with other runs, and look for what it leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MARK = "STREAMRL_TEST_EXAMPLE"
DEADLINE_S = 550.0
"""Of one run; an example takes about a minute where nothing else runs."""


class Example:
    """One example with a run folder and a temporary folder of its own; ``start`` runs the command line."""

    def __init__(self, name: str, folder: Path, cache: Path) -> None:
        self.config = f"examples/{name}/config.yaml"
        self.run_dir = folder / "run"
        self._temporary = Path(tempfile.mkdtemp(prefix="ex-"))  # short: the paths of sockets are bounded
        self._mark = uuid.uuid4().hex
        self._environment = os.environ | {
            MARK: self._mark, "TMPDIR": str(self._temporary), "XDG_CACHE_HOME": str(cache)
        }  # fmt: skip
        self._output = folder
        self._started: list[tuple[subprocess.Popen[bytes], Path]] = []

    def launch(self, *settings: str) -> int:
        """The number of the started ``streamrl launch``."""
        return self.start(
            "launch", "--config", self.config, "--run-dir", str(self.run_dir), "wandb=disabled", *settings
        )

    def start(self, *arguments: str) -> int:
        path = self._output / f"output-{len(self._started)}"
        with path.open("wb") as output:
            command = [sys.executable, "-m", "streamrl.cli", *arguments]
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=self._environment
            )
        self._started.append((process, path))
        return len(self._started) - 1

    def wait_for(self, path: Path) -> None:
        """Until the first run wrote ``path``."""
        deadline = time.monotonic() + DEADLINE_S
        while not path.exists():
            assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {path}"
            assert self._started[0][0].poll() is None, self.output(0)
            time.sleep(0.1)  # a file written by another process has no event to wait on

    def wait(self, number: int) -> int:
        """Exit code."""
        return self._started[number][0].wait(timeout=DEADLINE_S)

    def output(self, number: int) -> str:
        """The end of what it printed."""
        return self._started[number][1].read_text(errors="replace")[-4000:]

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return found

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]

    def close(self) -> None:
        for process, _ in self._started:
            if process.poll() is None:
                process.kill()
                process.wait()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def leftovers(self) -> list[str]:
        """Processes that still run and temporary files that are still there."""
        deadline = time.monotonic() + 20
        while _alive(self._mark) and time.monotonic() < deadline:
            time.sleep(0.05)  # an actor's last moments; there is no parent to wait on
        files = [str(path.relative_to(self._temporary)) for path in self._temporary.rglob("*")]
        return [*_alive(self._mark), *files]


@contextmanager
def example(name: str, folder: Path, cache: Path) -> Iterator[Example]:
    one = Example(name, folder, cache)
    try:
        yield one
        assert one.leftovers() == []
    finally:
        one.close()


def _alive(mark: str) -> list[str]:
    token = mark.encode()
    folders = (path for path in Path("/proc").iterdir() if path.name.isdigit())
    ours = (path for path in folders if token in _read(path / "environ") and b") Z " not in _read(path / "stat"))
    return [f"{path.name}: {_read(path / 'cmdline').decode(errors='replace')}".replace("\0", " ") for path in ours]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
