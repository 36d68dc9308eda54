"""What an actor does that holds an engine of the rollouters: it takes weights, and answers the parity probe.

A rollouter does so for its own engine, an engine host (``engine_host.py``) for one that several rollouters share.
"""

from __future__ import annotations

import asyncio
from typing import Any

from streamrl.parity.probe import probe_of
from streamrl.parity.rehearsal import EngineProbe
from streamrl.policy.model import load_tokenizer
from streamrl.ports import Engine
from streamrl.runtime.actor import Actor, ActorSpec
from streamrl.runtime.messages import Probed
from streamrl.sync.canary import LogprobCanary, canary_row
from streamrl.sync.subscriber import Subscriber


class Holding:
    """``engine`` as a member of the weight plane, by the name of ``actor``."""

    def __init__(self, actor: Actor, engine: Engine) -> None:
        self._actor = actor
        self._engine = engine
        self._probe = make_probe(actor.spec, engine)
        self._tasks: asyncio.TaskGroup
        config = actor.config
        self._subscriber = Subscriber(
            actor.spec.endpoint("sync"),
            actor.spec.name,
            engine,
            actor.emit,
            before_first=self._rehearse,
            canary=LogprobCanary(canary_row(actor.spec.model, config), config.model.dtype, config.parity.rms),
            stage=config.sync.stage,
            timeout_s=config.sync.timeout_s,
        )

    async def begin(self, tasks: asyncio.TaskGroup) -> None:
        """Follow the publisher in ``tasks``; return once the first weights serve and the gate has heard of them."""
        self._tasks = tasks
        tasks.create_task(self._subscriber.run())
        with self._actor.waiting("the first weights"):
            await self._subscriber.wait_version(0)
        if self._subscriber.version > 0:
            return  # a replacement: the run has passed the gate, and the canary has looked at this engine
        with self._actor.waiting("the engine to answer the parity probe"):
            self._actor.send(Probed(report=await self._probe.report()))

    def require_intact(self) -> None:
        """Raise ``WeightSyncError`` where what the engine sampled by now must not be handed on."""
        self._subscriber.require_intact()

    async def _rehearse(self, tensors: dict[str, Any]) -> None:
        with self._actor.waiting("the engine to rehearse the first weight update"):
            await self._probe.rehearse(tensors, self._tasks)

    def gauges(self) -> dict[str, float]:
        """Of the engine, for the heartbeat."""
        counts = self._engine.statistics()
        return {
            "generated_tokens": float(counts.generated_tokens),
            "busy_s": counts.busy_s,
            "engine/running": float(counts.running),
            "engine/waiting": float(counts.waiting),
            "engine/kv_used": counts.kv_used,
            "engine/preemptions": float(counts.preemptions),
        }


def make_probe(spec: ActorSpec, engine: Engine) -> EngineProbe:
    """The parity probe of a run, for ``engine``."""
    tokenizer = load_tokenizer(spec.model)

    def decode(token: int) -> str:
        return str(tokenizer.decode([token]))

    return EngineProbe(engine, spec.config, probe_of(spec.model, spec.config), decode)
