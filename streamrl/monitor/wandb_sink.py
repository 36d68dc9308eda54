"""wandb, on a thread of its own: slow imports, a missing account or a dead network never touch the run."""

from __future__ import annotations

import dataclasses
import logging
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from streamrl.schema import Config

log = logging.getLogger(__name__)

PENDING_LINES = 1000
"""Lines that may wait for wandb; further ones are left out (``metrics.jsonl`` has them all)."""
CLOSE_TIMEOUT_S = 15.0


class WandbSink:
    """Hands metrics lines to wandb; a failure is one event and then silence."""

    def __init__(self, run_dir: Path, config: Config, on_event: Callable[[str, dict[str, Any]], None]) -> None:
        self._lines: queue.Queue[tuple[str, dict[str, Any]] | None] = queue.Queue(PENDING_LINES)
        self._news: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        """Events of the thread, reported with the next line: ``on_event`` belongs to the caller's thread."""
        self._failed = False
        self._on_event = on_event
        self._thread: threading.Thread | None = None
        if config.wandb.name != "disabled":
            self._thread = threading.Thread(target=self._work, args=(run_dir, config), name="wandb", daemon=True)
            self._thread.start()

    def log(self, line: dict[str, float]) -> None:
        self._put(("log", line))

    def summary(self, summary: dict[str, Any]) -> None:
        self._put(("summary", summary))

    def _put(self, item: tuple[str, dict[str, Any]]) -> None:
        while not self._news.empty():
            event, reason = self._news.get()
            self._on_event(event, {"reason": reason})
        if self._thread is not None and not self._failed and not self._lines.full():
            self._lines.put_nowait(item)

    def close(self) -> None:
        """Flush; gives up after ``CLOSE_TIMEOUT_S``."""
        if self._thread is None:
            return
        if not self._lines.full():
            self._lines.put_nowait(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _work(self, run_dir: Path, config: Config) -> None:
        try:
            os.environ.setdefault("WANDB_SILENT", "true")
            import wandb

            mode: Any = config.wandb.name
            if mode == "online" and not wandb.login(prompt=False):
                mode = "offline"
                self._news.put(("wandb_offline", "no account: log in with `wandb login`, or set WANDB_API_KEY"))
            settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
            run = wandb.init(
                project=config.wandb.project, name=run_dir.name, dir=run_dir, mode=mode, settings=settings,
                config=dataclasses.asdict(config),
            )  # fmt: skip
            while (item := self._lines.get()) is not None:
                kind, values = item
                if kind == "log":
                    run.log(values, step=int(values["step"]))
                else:
                    run.summary.update(values)
            run.finish()
        except BaseException as error:  # noqa: BLE001 - whatever wandb raises, the run goes on without it
            self._failed = True
            self._news.put(("wandb_failed", f"{type(error).__name__}: {error}"))
            log.warning("wandb failed, the run goes on without it: %s", error)
