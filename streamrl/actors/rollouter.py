"""A rollouter: lease → the episodes of one group → put, with weights changing under way.

Consumes leases and weights; produces groups; waits for a lease (unblocked by a published version), for an attached
agent (where only those play) and for the buffer to take responsibility for each group. It holds one engine, which goes
on decoding while weights are staged, or shares some with others (``engine_host.py``); and a gateway, through which
agents outside of this process play.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

from streamrl.actors.dispatch import Dispatch
from streamrl.actors.engine_host import make_pool
from streamrl.actors.engine_loading import load_engine
from streamrl.actors.holding import Holding
from streamrl.actors.queue_wiring import make_producer
from streamrl.actors.reference import make_reference
from streamrl.actors.scorer import connect_scorer
from streamrl.engines.concurrency import Concurrency
from streamrl.engines.pool import EnginePool
from streamrl.envs.attach.desk import AttachDesk
from streamrl.envs.attach.protocol import Welcome
from streamrl.envs.environment import load_environment
from streamrl.envs.gateway import Gateway, run_token
from streamrl.envs.group import GroupResult, GroupRunner
from streamrl.envs.split import Split
from streamrl.errors import WireError
from streamrl.policy.model import load_tokenizer
from streamrl.ports import Engine
from streamrl.runtime.actor import Actor
from streamrl.sharing import engine_hosts
from streamrl.types import Lease

PREFETCH = 1.25
"""Groups under way per group that the slots can hold: the trajectories of a group end at different times, and a waiting
request fills the slot at once."""


class Rollouter(Actor):
    async def setup(self) -> dict[str, Any]:
        connect_scorer(self.spec)
        split = Split.of(load_environment(self.config), self.config)
        self.cleanup.push_async_callback(split.environment.close)
        self._engine = await self._open_engine()
        self.cleanup.push_async_callback(self._engine.close)
        self._tokenizer = load_tokenizer(self.spec.model)
        self._gateway = Gateway(self.config.gateway, self.spec.index)
        self._producer = make_producer(self.spec)
        self.cleanup.callback(self._producer.close)
        self._reference = make_reference(self.spec)
        if self._reference is not None:
            self.cleanup.callback(self._reference.close)
        self._desk = AttachDesk(split, self._make_runner, self._welcome(split), self.emit)
        self._dispatch = self._make_dispatch(split)
        self._desk.changed = self._dispatch.changed
        await self._open_gateway()
        return {"engine": self.config.engine.name, "slots": self.config.engine.slots, "gateway": self._gateway.url}

    async def _open_engine(self) -> Engine | EnginePool:
        """An engine of its own, or those that it shares."""
        self._shared = make_pool(self.spec, self.waiting)
        if self._shared is not None:
            return self._shared
        engine = await load_engine(self.config, self.spec.model, scratch=self.spec.ipc_dir)
        self._holding = Holding(self, engine)
        return engine

    def _make_runner(self, split: Split) -> GroupRunner:
        return GroupRunner(split, self._engine, self._tokenizer, self.config, self._gateway)

    def _make_dispatch(self, split: Split) -> Dispatch:
        config = self.config
        slots = config.engine.slots * (engine_hosts(config) or config.rollouts) / config.rollouts
        most = 0 if config.env.play == "attached" else math.ceil(PREFETCH * slots / config.group.size)
        recomputes = config.engine.kv == "recompute"
        self._concurrency = Concurrency(most, self._engine.statistics, recomputes=recomputes)
        runner = self._make_runner(split)
        return Dispatch(self._producer, runner, self._desk, self._concurrency, self._deliver, self.waiting)

    def _welcome(self, split: Split) -> Welcome:
        """What the run tells a process that attaches."""
        config = self.config
        return Welcome(
            run=config.run,
            rollouter=self.spec.name,
            environment=split.environment.name,
            group_size=config.group.size,
            timeout_s=config.env.timeout_s,
            restart_s=config.liveness.actor_timeout_s + config.liveness.start_timeout_s,
            seed=config.seed,
            held_out=split.share,
        )

    async def _open_gateway(self) -> None:
        run_dir = Path(self.spec.run_dir)
        token = run_token(run_dir)
        self._gateway.add_attach(token, self._desk.serve)
        await self._gateway.start()
        self.cleanup.push_async_callback(self._gateway.stop)
        self.cleanup.push_async_callback(self._close_desk)
        self._gateway.announce(run_dir, self.spec.name, token)

    async def _close_desk(self) -> None:
        await self._desk.close(ended=self._stop.is_set())

    async def run(self) -> dict[str, Any]:
        async with asyncio.TaskGroup() as tasks:
            if self._shared is not None:
                tasks.create_task(self._shared.follow())
            else:
                await self._holding.begin(tasks)
            await self._dispatch.run()
        return {}

    async def _deliver(self, lease: Lease, result: GroupResult, *, attached: bool) -> None:
        for failure in result.failures:
            fields = {"lease": lease.id, "prompt": lease.prompt, "reason": failure.reason}
            self.emit("trajectory_failed", fields | {"traceback": failure.traceback})
        if result.stragglers:
            fields = {"lease": lease.id, "prompt": lease.prompt, "reason": result.stragglers[0].reason}
            self.emit("trajectory_straggled", fields | {"count": len(result.stragglers)})
        if result.group is None and attached:  # the prompt is not to blame: somebody else plays it
            await self._producer.give_back(lease.id, lost=False)
            return
        if result.group is None:
            await self._producer.fail(lease.id, result.failures[-1].reason, result.failures[-1].traceback)
            return
        if self._shared is None:  # engines that are shared look after what they sample themselves
            self._holding.require_intact()
        try:
            if self._reference is not None:
                with self.waiting(f"the reference policy to score the group of lease {lease.id}"):
                    await self._reference.add(result.group)
            with self.waiting(f"room for the group of lease {lease.id}, or the buffer's answer"):
                await self._producer.put(result.group)
        except WireError as error:  # what user code made of the group does not fit its lease
            await self._producer.fail(lease.id, str(error), "")

    def gauges(self) -> dict[str, float]:
        engine = self._holding.gauges() if self._shared is None else {}
        return engine | {"engine/groups": float(self._concurrency.limit)} | self._producer.statistics()
