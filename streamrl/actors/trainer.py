"""A trainer rank: batch → optimizer step → acknowledge → publish, until the last step.

Consumes micro-batches; produces policy version v+1 from v; waits for a full batch (unblocked by the groups of
rollouters) and, on rank 0, for the previous version to be acknowledged by every rollouter. Version v+1 is gathered
while the next batch is waited for, bucket after bucket, and travels while the next step is computed: the gather and the
step's collectives keep their order, as one thread runs both. ``max_lag`` decides how far rollouters may fall behind.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from streamrl.actors.queue_wiring import make_consumer
from streamrl.errors import ParityError
from streamrl.parity.records import Asked
from streamrl.policy.learner import Learner
from streamrl.policy.parallel import close_ranks, init_ranks, rank_device
from streamrl.policy.parity import answer
from streamrl.policy.trained import as_sent, counts, load_trained, sent_parameters
from streamrl.runtime.actor import Actor
from streamrl.runtime.messages import GatePassed, Members, Message, Scored, ScoreProbe, Stepped, Unresponsive
from streamrl.sync.arena import Filling, describe
from streamrl.sync.canary import canary_row
from streamrl.sync.content import Content
from streamrl.sync.gather import gather
from streamrl.sync.manifest import plan_manifest
from streamrl.sync.publisher import Publisher
from streamrl.sync.slab import Slab
from streamrl.sync_checks import choose_transport, most_rejections
from streamrl.types import RankBatch


class Trainer(Actor):
    _publisher: Publisher | None = None
    """On rank 0 only."""
    _rejections = 0
    """Versions in a row that a canary rejected."""

    async def setup(self) -> dict[str, Any]:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="torch")
        self._members = asyncio.Event()
        self._asked: asyncio.Queue[list[Asked] | None] = asyncio.Queue()
        """Rows to score for the parity gate; None once it is passed."""
        self.cleanup.callback(self._worker.shutdown, wait=False, cancel_futures=True)
        self.cleanup.callback(close_ranks)
        await self.blocking(self._worker, self._build)
        if self._publisher is not None:
            self.cleanup.callback(self._publisher.close)
            transport, why = choose_transport(self.config)
            self.emit("transport_chosen", {"transport": transport, "why": why})
        self._consumer = make_consumer(self.spec)
        self.cleanup.callback(self._consumer.close)
        return counts(self._learner.model)

    def _build(self) -> None:
        torch.set_num_threads(self.config.trainer.threads)
        mesh = init_ranks(
            self.spec.index, self.config.trainers, f"{self.spec.ipc_dir}/ranks", self.config.liveness.no_progress_s
        )
        model = load_trained(self.config, self.spec.model, rank_device(self.spec.index))
        self._manifest = plan_manifest(describe(as_sent(model, self.config.model.dtype)), self.config.sync.bucket_bytes)
        if self.spec.index == 0:
            self._publisher = Publisher(
                self.spec.endpoint("sync"),
                self._make_slab(),
                timeout_s=self.config.sync.timeout_s,
                on_event=self.emit,
                on_unresponsive=lambda member, what: self.send(Unresponsive(member=member, waited_for=what)),
                rolling=self.config.sync.commit == "rolling",
            )
        self._learner = Learner(self.config, model, mesh)
        self._canary_row = canary_row(self.spec.model, self.config)

    def _make_slab(self) -> Slab:
        sync = self.config.sync
        return Slab(
            self._manifest,
            endpoint=self.spec.endpoint("sync"),
            folder=Path(self.spec.run_dir, "weights"),
            timeout_s=sync.timeout_s,
            transport=choose_transport(self.config)[0],
            delta=sync.encoding == "delta",
            anchor_every=sync.anchor_every,
        )

    async def run(self) -> dict[str, Any]:
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(self._publisher.run())] if self._publisher is not None else []
            await self._train(tasks)
            for task in background:
                task.cancel()
        return {}

    async def _train(self, tasks: asyncio.TaskGroup) -> None:
        """The loop."""
        await self._begin()
        publishing: asyncio.Task[None] | None = None
        for version in range(self.config.steps):
            step = version + 1
            waited = time.monotonic()
            with self.waiting(f"the batch of step {step}"):
                batch = await self._consumer.next_batch(step, version, self._learner.columns)
            metrics = {"time/wait_for_batch": time.monotonic() - waited}
            metrics |= await self.blocking(self._worker, lambda batch=batch: self._step(batch))  # type: ignore[misc]
            if self._publisher is not None:
                ess, tokens = metrics["policy/ess"], int(metrics["trained_tokens"])
                with self.waiting(f"the buffer to take the acknowledgement of step {step}"):
                    await self._consumer.acknowledge(step, version, ess=ess, tokens=tokens)
                if publishing is not None:
                    with self.waiting(f"version {version} to be acknowledged by every rollouter"):
                        await publishing
            publishing = self._send_off(step, metrics, tasks)
        if publishing is not None:
            with self.waiting(f"version {self.config.steps} to be acknowledged by every rollouter"):
                await publishing

    async def _begin(self) -> None:
        """Push version 0, and open the queue once engines and trainer agree on it: a broken path fails here."""
        await self._gather(0, self._publisher.open(0) if self._publisher is not None else None, {})
        if self._publisher is not None:
            with self.waiting("the list of rollouters"):
                await self._members.wait()
            with self.waiting("version 0 to be acknowledged by every rollouter"):
                await self._publisher.publish(0, observe=True)
        await self._pass_gate()
        if self._publisher is not None:
            with self.waiting("the buffer to hear of version 0"):
                await self._consumer.published(0)

    async def _pass_gate(self) -> None:
        """Score what the parity gate asks for, every rank the same rows, until it is passed (C7)."""
        while True:
            with self.waiting("the parity gate: the engines' answers to its probe, and its verdict"):
                asked = await self._asked.get()
            if asked is None:
                return
            report = await self.blocking(self._worker, partial(answer, self._learner, asked))
            if self._publisher is not None:
                self.send(Scored(report=report))

    def _step(self, batch: RankBatch) -> dict[str, float]:
        return self._learner.step(batch) | batch.stats

    def _send_off(self, version: int, metrics: dict[str, float], tasks: asyncio.TaskGroup) -> asyncio.Task[None] | None:
        """Begin to gather and, on rank 0, to publish a version: the task that ends when everybody serves it."""
        if self._publisher is None:
            tasks.create_task(self._gather(version, None, metrics))
            return None
        content = self._publisher.open(version)
        publishing = tasks.create_task(self._publish(version, metrics))
        tasks.create_task(self._gather(version, content, metrics))
        return publishing

    async def _gather(self, version: int, content: Content | None, metrics: dict[str, float]) -> None:
        """Copy the weights of all ranks into the version's slot, and score the canary under them. Collective."""

        def gather_into(filling: Filling | None) -> list[float]:
            started = time.monotonic()
            gather(sent_parameters(self._learner.model).items(), self._manifest, filling)
            metrics["time/gather"] = time.monotonic() - started
            return self._learner.score(self._canary_row).tolist() if self._scores(version) else []

        def write() -> None:
            if content is None:
                gather_into(None)
                return
            with content:
                content.scores = gather_into(content.filling)
                content.judged = self._judges(version)

        await self.blocking(self._worker, write)

    async def _publish(self, version: int, metrics: dict[str, float]) -> None:
        assert self._publisher is not None
        report = await self._publisher.publish(version, observe=self._evaluates(version))
        metrics |= {
            "time/publish": report.seconds,
            "sync/seconds": report.seconds,
            "sync/pause_seconds": report.pause_seconds,
            "sync/bytes": report.bytes,
            "sync/delta_fraction": report.delta_fraction,
            "sync/rollouters": report.rollouters,
            "mismatch/canary_rms": report.canary_rms,
        }
        if not report.rejected:
            with self.waiting(f"the buffer to hear of version {version}"):
                await self._consumer.published(version)
        self.send(Stepped(step=version, version=version, metrics=metrics))
        self._account(version, report.rejected)

    def _account(self, version: int, rejected: str) -> None:
        """Go on after a version that was rejected, or raise ``ParityError``."""
        self._rejections = self._rejections + 1 if rejected else 0
        if not rejected:
            return
        found = f"version {version} was rejected: {rejected}"
        if self.config.sync.on_mismatch == "stop":
            raise ParityError(f"{found}; sync.on_mismatch=stop")
        if version == self.config.steps:
            raise ParityError(f"{found}; it was the last one of the run")
        if self._rejections > most_rejections(self.config):
            raise ParityError(
                f"{found}; {self._rejections} in a row leave no tokens within max_lag={self.config.max_lag} to train on"
            )

    def _scores(self, version: int) -> bool:
        """Whether an engine that joins under this version is judged. The first one is the parity gate's."""
        return version > 0 and self.config.sync.canary_every > 0

    def _judges(self, version: int) -> bool:
        """Whether all engines score the canary under this version."""
        return self._scores(version) and version % self.config.sync.canary_every == 0

    def _evaluates(self, version: int) -> bool:
        every = self.config.eval.every
        return version == self.config.steps or (every > 0 and version % every == 0)

    def receive(self, message: Message) -> None:
        match message:
            case Members() if self._publisher is not None:
                self._publisher.set_members(set(message.rollouters), set(message.observers))
                self._members.set()
            case ScoreProbe():
                self._asked.put_nowait(message.rows)
            case GatePassed():
                self._asked.put_nowait(None)
            case _:
                super().receive(message)
