"""A rank of a replay: recorded batch → optimizer step, until the last step; the digest of every version on the way.

Consumes the journal of a recorded run, which it reads itself; produces the weights that the run had; waits for nothing
but the other ranks. The learner, and all that enters its arithmetic, is the trainer's.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from streamrl.actors.planning import estimators
from streamrl.actors.recording import ReplayPlan, journal_folder
from streamrl.buffers.offer import Planner
from streamrl.buffers.replay import rank_batch, recorded_steps
from streamrl.policy.learner import Learner
from streamrl.policy.parallel import close_ranks, init_ranks, rank_device
from streamrl.policy.trained import as_sent, counts, load_trained, sent_parameters
from streamrl.runtime.actor import Actor
from streamrl.runtime.messages import Stepped
from streamrl.sync.arena import Filling, describe
from streamrl.sync.digest import weights_digest
from streamrl.sync.gather import gather
from streamrl.sync.manifest import plan_manifest
from streamrl.sync.staging import bucket_of, digest_of, slot_memory


class Replayer(Actor):
    _memory: memoryview | None = None
    """On rank 0 only: the digest of a version is over the bytes that a publisher would have sent."""

    async def setup(self) -> dict[str, Any]:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="torch")
        self.cleanup.callback(self._worker.shutdown, wait=False, cancel_futures=True)
        self.cleanup.callback(close_ranks)
        await self.blocking(self._worker, self._build)
        return counts(self._learner.model)

    def _build(self) -> None:
        config = self.config
        torch.set_num_threads(config.trainer.threads)
        mesh = init_ranks(self.spec.index, config.trainers, f"{self.spec.ipc_dir}/ranks", config.liveness.no_progress_s)
        model = load_trained(config, self.spec.model, rank_device(self.spec.index))
        self._manifest = plan_manifest(describe(as_sent(model, config.model.dtype)), config.sync.bucket_bytes)
        if self.spec.index == 0:
            self._memory = slot_memory(self._manifest)
        self._learner = Learner(config, model, mesh)
        self._planner = Planner(config, *estimators(config))
        self._plan = ReplayPlan.load(Path(self.spec.run_dir))
        self._recorded = recorded_steps(journal_folder(Path(self._plan.recording)), config.buffer.epochs_per_group)

    async def run(self) -> dict[str, Any]:
        self._tell(0, await self.blocking(self._worker, partial(self._digest, 0)))
        for step in range(1, self._plan.steps + 1):
            metrics, digest = await self.blocking(self._worker, partial(self._step, step))
            self._tell(step, digest)
            if self._memory is not None:
                self.send(Stepped(step=step, version=step, metrics=metrics))
        return {}

    def _step(self, step: int) -> tuple[dict[str, float], str]:
        """Metrics of the step and digest of the version that it made."""
        started = time.monotonic()
        batch = rank_batch(
            next(self._recorded), self._planner, self.spec.index, self.config.max_lag, self._learner.columns
        )
        read = time.monotonic() - started
        metrics = self._learner.step(batch) | batch.stats | {"time/wait_for_batch": read}
        started = time.monotonic()
        digest = self._digest(step)
        return metrics | {"time/gather": time.monotonic() - started}, digest

    def _digest(self, version: int) -> str:
        """Of the whole weights; empty on ranks that only give their shards. Collective."""
        memory, manifest, model = self._memory, self._manifest, self._learner.model
        if memory is None:
            gather(sent_parameters(model).items(), manifest, None)
            return ""
        digests: dict[int, int] = {}

        def digest(index: int) -> None:
            digests[index] = digest_of(bucket_of(manifest, memory, index))

        filling = Filling(manifest, memory, digest)
        gather(sent_parameters(model).items(), manifest, filling)
        filling.finish(version)
        return weights_digest(manifest, [digests[index] for index in sorted(digests)])

    def _tell(self, version: int, digest: str) -> None:
        if digest:
            self.emit("version_replayed", {"version": version, "weights": digest})
