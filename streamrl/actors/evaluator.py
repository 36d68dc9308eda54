"""The evaluator: greedy accuracy on held-out tasks, each time at one version of the weights.

Consumes the versions that trainer rank 0 offers for evaluation; produces accuracies; waits for the next version. It is
an observer of the weight plane: it copies a version and lets go, so a slow evaluation delays no update until several
versions wait for it; then it slows the trainer, and past ``sync.timeout_s`` the run ends.
"""

from __future__ import annotations

import asyncio
from typing import Any

from streamrl.actors.engine_loading import load_engine, without_stage
from streamrl.actors.scorer import connect_scorer
from streamrl.envs.environment import load_environment
from streamrl.envs.gateway import Gateway
from streamrl.envs.group import GroupRunner
from streamrl.envs.split import Split
from streamrl.policy.model import load_tokenizer
from streamrl.runtime.actor import Actor
from streamrl.runtime.messages import Evaluated
from streamrl.sync.observer import Observer

SHOWN_ANSWERS = 8
"""Answers that travel with a result, for people to look at."""


class Evaluator(Actor):
    async def setup(self) -> dict[str, Any]:
        connect_scorer(self.spec)
        split = Split.of(load_environment(self.config), self.config)
        self.cleanup.push_async_callback(split.environment.close)
        self._tasks = split.held_out(self.config.eval.tasks)
        config = without_stage(self.config)
        self._engine = await load_engine(config, self.spec.model, scratch=self.spec.ipc_dir)
        self.cleanup.push_async_callback(self._engine.close)
        gateway = Gateway(self.config.gateway, self.config.rollouts)
        await gateway.start()
        self.cleanup.push_async_callback(gateway.stop)
        self._runner = GroupRunner(split, self._engine, load_tokenizer(self.spec.model), self.config, gateway)
        self._observer = Observer(
            self.spec.endpoint("sync"), self.spec.name, self.emit, timeout_s=self.config.sync.timeout_s
        )
        return {"held_out": len(self._tasks)}

    async def run(self) -> dict[str, Any]:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._observer.run())
            await self._evaluate_versions()
        return {}

    async def _evaluate_versions(self) -> None:
        updates = self._observer.updates()
        while True:
            with self.waiting("a version to evaluate"):
                version, tensors = await anext(updates)
            await self._engine.pause()
            await self._engine.load(version, tensors)
            await self._engine.resume()
            result = await self._runner.evaluate(self._tasks)
            for failure in result.failures:
                fields = {"version": version, "reason": failure.reason, "traceback": failure.traceback}
                self.emit("trajectory_failed", fields)
            shown = [(answer.prompt, answer.text, answer.reward) for answer in result.answers[:SHOWN_ANSWERS]]
            self.send(Evaluated(version=version, accuracy=result.accuracy, answers=shown))
