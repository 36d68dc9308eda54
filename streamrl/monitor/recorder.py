"""The run folder: config.yaml, metrics.jsonl, events.jsonl, summary.json, and the same metrics in wandb.

A line is written and flushed at once, so that a killed run leaves everything up to its last step. A folder that cannot
be written any more (a full disk) is a ``RecorderError``: the run ends and says so.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import socket
import time
from pathlib import Path
from typing import Any

from streamrl.errors import StreamRLError
from streamrl.metrics import complete_line
from streamrl.monitor.wandb_sink import WandbSink
from streamrl.schema import Config

log = logging.getLogger(__name__)


class RecorderError(StreamRLError, OSError):
    """The run folder cannot be written any more."""


class Recorder:
    """The metrics and events of one run, on disk and in wandb."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        self.run_dir = run_dir
        self.started = time.monotonic()
        self._host = socket.gethostname()
        self._metrics = self._open("metrics.jsonl")
        self._events = self._open("events.jsonl")
        self._wandb = WandbSink(run_dir, config, self.event)

    def _open(self, name: str) -> io.TextIOWrapper:
        try:
            return (self.run_dir / name).open("a")
        except OSError as error:
            raise RecorderError(f"{self.run_dir / name}: cannot be opened ({error.strerror})") from error

    def event(
        self, event: str, fields: dict[str, Any], actor: str = "controller", pid: int = 0, host: str = ""
    ) -> None:
        """Append one lifecycle event."""
        line = {
            "time": time.time(),
            "event": event,
            "actor": actor,
            "pid": pid or os.getpid(),
            "host": host or self._host,
        }
        self._write(self._events, line | {key: value for key, value in fields.items() if key not in line})

    def metrics(self, values: dict[str, float]) -> dict[str, float]:
        """Append one step; returns the completed line."""
        line = complete_line(values)
        self._write(self._metrics, line)
        self._wandb.log(line)
        return line

    def summary(self, summary: dict[str, Any]) -> None:
        """Write ``summary.json`` aside and rename it, so that a reader never sees half of it."""
        path = self.run_dir / "summary.json"
        aside = path.with_suffix(".json.tmp")
        try:
            aside.write_text(json.dumps(summary, indent=2) + "\n")
            aside.rename(path)
        except OSError as error:
            raise RecorderError(f"{path}: cannot be written ({error.strerror}); free some space") from error
        self._wandb.summary(summary)

    def close(self) -> None:
        self._wandb.close()
        for file in (self._metrics, self._events):
            with contextlib.suppress(OSError):  # a full disk was reported by the write that met it
                file.close()

    def _write(self, file: io.TextIOWrapper, line: dict[str, Any]) -> None:
        try:
            file.write(json.dumps(line) + "\n")
            file.flush()
        except OSError as error:
            raise RecorderError(
                f"{file.name}: cannot be written ({error.strerror}); free some space or choose another --run-dir"
            ) from error
