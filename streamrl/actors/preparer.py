"""The preparer: finds or builds the initial checkpoint before any other actor starts.

Consumes the settings; produces a folder with a transformers checkpoint and its tokenizer; waits for nothing.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from streamrl.envs.environment import load_environment
from streamrl.envs.split import Split
from streamrl.policy.model import BUILT_IN, prepare_model
from streamrl.runtime.actor import Actor
from streamrl.runtime.messages import Progress


class Preparer(Actor):
    async def run(self) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        interrupted = threading.Event()

        def progress(done: int, total: int, text: str) -> None:
            if interrupted.is_set():
                raise InterruptedError("the run was stopped during the warm-up")
            loop.call_soon_threadsafe(self.send, Progress(done=done, total=total, text=text))

        def work() -> str:
            torch.set_num_threads(self.config.trainer.threads + self.config.engine.threads)  # both halves are idle now
            split = Split.of(load_environment(self.config), self.config)

            def pair(index: int) -> tuple[str, str]:
                task = split.train(index)
                return task.prompt, task.answer or ""

            folder = prepare_model(self.config, pair, progress)
            if self.config.model.name == BUILT_IN and not self.config.model.cache:
                folder = Path(shutil.move(folder, Path(self.spec.run_dir) / "model"))
            return str(folder)

        worker = ThreadPoolExecutor(1, thread_name_prefix="torch")
        working = worker.submit(work)
        try:
            return {"model": await asyncio.wrap_future(working)}
        except asyncio.CancelledError:
            interrupted.set()  # the next progress report ends the work, so that it cleans up after itself
            await asyncio.to_thread(working.exception)
            raise
        finally:
            worker.shutdown(wait=False)
