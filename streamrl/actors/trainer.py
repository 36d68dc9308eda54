"""A trainer rank: batch → optimizer step → acknowledge → publish, until the last step.

Consumes micro-batches; produces policy version v+1 from v; waits for a full batch (unblocked by the groups of
rollouters) and, on rank 0, for the previous version to be acknowledged by every rollouter. Version v travels while
step v+1 is computed; ``max_lag`` decides how far rollouters may fall behind.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from streamrl.actors.probe import probe_tokens
from streamrl.actors.queue_wiring import make_consumer
from streamrl.policy.learner import Learner
from streamrl.policy.model import load_model
from streamrl.policy.parallel import close_ranks, init_ranks
from streamrl.runtime.actor import Actor
from streamrl.runtime.messages import GatePassed, Members, Message, Scored, Stepped, Unresponsive
from streamrl.sync.arena import describe
from streamrl.sync.manifest import plan_manifest
from streamrl.sync.publisher import Publisher
from streamrl.types import RankBatch


class Trainer(Actor):
    _publisher: Publisher | None = None
    """On rank 0 only."""

    async def setup(self) -> dict[str, Any]:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="torch")
        self._members = asyncio.Event()
        self._gate = asyncio.Event()
        self.cleanup.callback(self._worker.shutdown, wait=False, cancel_futures=True)
        self.cleanup.callback(close_ranks)
        await self.blocking(self._worker, self._build)
        if self._publisher is not None:
            self.cleanup.callback(self._publisher.close)
        self._consumer = make_consumer(self.spec)
        self.cleanup.callback(self._consumer.close)
        return {"parameters": sum(parameter.numel() for parameter in self._learner.model.parameters())}

    def _build(self) -> None:
        torch.set_num_threads(self.config.trainer.threads)
        mesh = init_ranks(
            self.spec.index, self.config.trainers, f"{self.spec.ipc_dir}/ranks", self.config.liveness.no_progress_s
        )
        model = load_model(self.spec.model, self.config.model.dtype)
        if self.spec.index == 0:
            self._publisher = Publisher(
                self.spec.endpoint("sync"),
                plan_manifest(describe(model.named_parameters()), self.config.sync.bucket_bytes),
                timeout_s=self.config.sync.timeout_s,
                on_event=self.emit,
                on_unresponsive=lambda member, what: self.send(Unresponsive(member=member, waited_for=what)),
            )
        self._learner = Learner(self.config, model, mesh)

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
            metrics["time/gather"] = await self._gather(step)
            if self._publisher is not None:
                publishing = tasks.create_task(self._publish(step, metrics))
        if publishing is not None:
            with self.waiting(f"version {self.config.steps} to be acknowledged by every rollouter"):
                await publishing

    async def _begin(self) -> None:
        """Push version 0, and open the queue once engines and trainer agree on it: a broken path fails here."""
        await self._gather(0)
        scores = await self.blocking(self._worker, self._score)
        if self._publisher is None:
            return
        with self.waiting("the list of rollouters"):
            await self._members.wait()
        with self.waiting("version 0 to be acknowledged by every rollouter"):
            await self._publisher.publish(0, observe=True)
        self.send(Scored(version=0, logprobs=scores))
        with self.waiting("the parity gate"):
            await self._gate.wait()
        with self.waiting("the buffer to hear of version 0"):
            await self._consumer.published(0)

    def _step(self, batch: RankBatch) -> dict[str, float]:
        return self._learner.step(batch) | batch.stats

    def _score(self) -> list[float]:
        temperature = self.config.sampling.temperature
        tokens = probe_tokens(self.spec.model, self.config)
        return [float(x) for row in tokens for x in self._learner.score(row, temperature)]

    async def _gather(self, version: int) -> float:
        """Copy the weights of all ranks into the version's slot; seconds. Collective."""
        started = time.monotonic()

        def gather() -> None:
            parameters = self._learner.full_parameters()
            if self._publisher is not None:
                self._publisher.write(version, parameters)
            else:
                for _ in parameters:  # the collective needs every rank
                    pass

        await self.blocking(self._worker, gather)
        return time.monotonic() - started

    async def _publish(self, version: int, metrics: dict[str, float]) -> None:
        assert self._publisher is not None
        report = await self._publisher.publish(version, observe=self._evaluates(version))
        with self.waiting(f"the buffer to hear of version {version}"):
            await self._consumer.published(version)
        metrics |= {
            "time/publish": report.seconds,
            "sync/seconds": metrics["time/gather"] + report.seconds,
            "sync/pause_seconds": report.pause_seconds,
            "sync/bytes": report.bytes,
            "sync/rollouters": report.rollouters,
        }
        self.send(Stepped(step=version, version=version, metrics=metrics))

    def _evaluates(self, version: int) -> bool:
        every = self.config.eval.every
        return version == self.config.steps or (every > 0 and version % every == 0)

    def receive(self, message: Message) -> None:
        match message:
            case Members() if self._publisher is not None:
                self._publisher.set_members(set(message.rollouters), set(message.observers))
                self._members.set()
            case GatePassed():
                self._gate.set()
            case _:
                super().receive(message)
