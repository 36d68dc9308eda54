"""The preparer: finds or builds the initial checkpoint before any other actor starts.

Consumes the settings; produces a folder with a transformers checkpoint and its tokenizer; waits for nothing.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from streamrl.actors.recording import first_checkpoint
from streamrl.actors.scorer import connect_scorer
from streamrl.envs.chat.template import ChatTemplate
from streamrl.envs.demonstration import lesson
from streamrl.envs.environment import load_environment
from streamrl.envs.split import Split
from streamrl.errors import ConfigError
from streamrl.lora import adapter_shapes, peft_config_json
from streamrl.policy.model import BUILT_IN, CHECKPOINT_FILES, prepare_model
from streamrl.policy.tokenizer import character_tokenizer
from streamrl.policy.warmup import Lesson
from streamrl.runtime.actor import Actor
from streamrl.runtime.messages import Progress

ADAPTER_FILE = "adapter_config.json"
"""In the run folder, where adapters are trained: what PEFT has to know of them."""


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
            connect_scorer(self.spec)
            split = Split.of(load_environment(self.config), self.config)

            template = ChatTemplate(character_tokenizer())

            def demonstrated(index: int) -> Lesson:
                return lesson(split.train(index), template)

            folder = self._keep(prepare_model(self.config, demonstrated, progress))
            if self.config.model.lora.rank:  # before anything starts: a wrong target is refused here
                adapter_shapes(str(folder), self.config.model.lora, self.config.model.dtype)
                described = peft_config_json(self.config.model.lora, str(folder))
                Path(self.spec.run_dir, ADAPTER_FILE).write_text(json.dumps(described, indent=2))
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

    def _keep(self, folder: Path) -> Path:
        """Bring the checkpoint to the run folder where it has no other home, or where the run is to be replayed."""
        run_dir = Path(self.spec.run_dir)
        replayable = self.config.buffer.keep == "all"
        target = first_checkpoint(run_dir) if replayable else run_dir / "model"
        if self.config.model.name == BUILT_IN and not self.config.model.cache:
            target.parent.mkdir(exist_ok=True)
            return Path(shutil.move(folder, target))
        if not replayable:
            return folder
        try:
            target.mkdir(parents=True)
            for pattern in CHECKPOINT_FILES:
                for file in folder.glob(pattern):
                    shutil.copyfile(file, target / file.name)
        except OSError as error:
            raise ConfigError(
                f"{target}: the initial checkpoint cannot be kept there for a replay ({error.strerror}); free some "
                "space, choose another --run-dir or set buffer.keep=live"
            ) from error
        return target
