"""A rollouter: lease → the episodes of one group → put, with weights changing under way.

Consumes leases and weights; produces groups; waits for a lease (unblocked by a published version) and for the buffer
to take responsibility for each group. It holds one engine, which goes on decoding while weights are staged.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

from streamrl.actors.engine_loading import load_engine
from streamrl.actors.probe import probe_tokens
from streamrl.actors.queue_wiring import make_producer
from streamrl.envs.environment import load_environment
from streamrl.envs.group import GroupResult, GroupRunner
from streamrl.envs.split import Split
from streamrl.errors import WireError
from streamrl.policy.model import load_tokenizer
from streamrl.runtime.actor import Actor, State
from streamrl.runtime.messages import Scored
from streamrl.sync.subscriber import Subscriber
from streamrl.types import Lease

PREFETCH = 1.25
"""Groups under way per group that the slots can hold: the trajectories of a group end at different times, and a waiting
request fills the slot at once."""


class Rollouter(Actor):
    async def setup(self) -> dict[str, Any]:
        split = Split.of(load_environment(self.config), self.config)
        self._engine = await load_engine(self.config, self.spec.model)
        self.cleanup.push_async_callback(self._engine.close)
        self._runner = GroupRunner(split, self._engine, load_tokenizer(self.spec.model), self.config)
        self._producer = make_producer(self.spec)
        self.cleanup.callback(self._producer.close)
        self._subscriber = Subscriber(self.spec.endpoint("sync"), self.spec.name, self._engine, self.emit)
        self._groups = 0
        self._room = asyncio.Event()
        self._room.set()
        return {"engine": self.config.engine.name, "slots": self.config.engine.slots}

    async def run(self) -> dict[str, Any]:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._subscriber.run())
            with self.waiting("the first weights"):
                await self._subscriber.wait_version(0)
            await self._report_probe()
            await self._generate(tasks)
        return {}

    async def _generate(self, tasks: asyncio.TaskGroup) -> None:
        """The loop: as many groups under way as the engine has room for, one lease each."""
        most = math.ceil(PREFETCH * self.config.engine.slots / self.config.group.size)
        while True:
            await self._room.wait()
            with self.waiting("a lease: the lag bound is reached" if not self._groups else ""):
                leases = await self._producer.lease(most - self._groups)
            self._groups += len(leases)
            for lease in leases:
                tasks.create_task(self._group(lease))
            if self._groups >= most:
                self._room.clear()

    async def _group(self, lease: Lease) -> None:
        try:
            async with asyncio.timeout(lease.deadline_s):
                result = await self._runner.run_group(lease)
        except TimeoutError:
            pass  # the buffer counts the expired lease and issues its prompt again
        else:
            await self._deliver(lease, result)
        self._groups -= 1
        self._room.set()

    async def _deliver(self, lease: Lease, result: GroupResult) -> None:
        for failure in result.failures:
            fields = {"lease": lease.id, "prompt": lease.prompt, "reason": failure.reason}
            self.emit("trajectory_failed", fields | {"traceback": failure.traceback})
        if result.stragglers:
            fields = {"lease": lease.id, "prompt": lease.prompt, "reason": result.stragglers[0].reason}
            self.emit("trajectory_straggled", fields | {"count": len(result.stragglers)})
        if result.group is None:
            await self._producer.fail(lease.id, result.failures[-1].reason, result.failures[-1].traceback)
            return
        try:
            with self.waiting(f"room for the group of lease {lease.id}, or the buffer's answer"):
                await self._producer.put(result.group)
        except WireError as error:  # what user code made of the group does not fit its lease
            await self._producer.fail(lease.id, str(error), "")

    async def _report_probe(self) -> None:
        temperature = self.config.sampling.temperature
        rows = [await self._engine.score(row, temperature) for row in probe_tokens(self.spec.model, self.config)]
        self.send(Scored(version=self._engine.version, logprobs=[float(x) for row in rows for x in row]))

    def gauges(self) -> dict[str, float]:
        if self.state is State.STARTING:
            return {}
        statistics = self._engine.statistics()
        own = {"generated_tokens": float(statistics.generated_tokens), "busy_s": statistics.busy_s}
        return own | self._producer.statistics()
