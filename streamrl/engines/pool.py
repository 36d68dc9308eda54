"""The engines that a run's rollouters share, as one ``ports.Sampler``: routed, and failed over when one dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from streamrl.engines.remote import RemoteEngine
from streamrl.engines.router import Router
from streamrl.errors import EngineLost, StreamRLError
from streamrl.ports import EngineStatistics
from streamrl.types import Generation, SamplingParams

LOSSES = 2
"""Engines that may die with one request before it counts as lost: a request must not go on killing them."""

Waiting = Callable[[str], AbstractContextManager[None]]


class EnginePool:
    """A request goes to the engine that the ``Router`` names, and to another when that one dies; what it had sampled
    is sampled anew. While no engine serves, requests wait for one. ``follow`` must run beside them."""

    def __init__(self, engines: Sequence[RemoteEngine], waiting: Waiting = lambda what: nullcontext()) -> None:
        self._engines = {engine.name: engine for engine in engines}
        self._router = Router()
        self._waiting = waiting
        self._closed = False
        self._news = asyncio.Event()
        """Set whenever an engine may have begun to serve."""
        for engine in engines:
            engine.changed = lambda engine=engine: self._heard(engine)  # type: ignore[misc]

    async def follow(self) -> None:
        """Keep up with all engines until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for engine in self._engines.values():
                tasks.create_task(engine.follow())

    @property
    def version(self) -> int:
        """The oldest that serves; -1 while none does."""
        return min((engine.version for engine in self._engines.values() if engine.state), default=-1)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """As ``ports.Engine``; raises ``EngineLost`` when as many engines died with this request as may."""
        if self._closed:
            raise StreamRLError("the shared engines were let go of; nothing can be asked after close")
        losses = 0
        while True:
            name = await self._chosen(prompt_ids)
            self._router.began(name, prompt_ids)
            try:
                generation = await self._engines[name].generate(prompt_ids, params)
            except EngineLost:
                losses += 1
                if losses >= LOSSES:
                    raise
            else:
                self._router.had(name, [*prompt_ids, *generation.token_ids.tolist()])
                return generation
            finally:
                self._router.ended(name)

    def statistics(self) -> EngineStatistics:
        """Sums over the engines, as they came with their last answers; the oldest version, the fullest KV cache."""
        each = [engine.statistics() for engine in self._engines.values()]
        return EngineStatistics(
            running=sum(one.running for one in each),
            waiting=sum(one.waiting for one in each),
            generated_tokens=sum(one.generated_tokens for one in each),
            prefilled_tokens=sum(one.prefilled_tokens for one in each),
            busy_s=sum(one.busy_s for one in each),
            version=self.version,
            kv_used=max(one.kv_used for one in each),
            preemptions=sum(one.preemptions for one in each),
        )

    async def close(self) -> None:
        """Let go of the engines; requests end with ``asyncio.CancelledError``. Idempotent."""
        self._closed = True
        self._news.set()
        for engine in self._engines.values():
            await engine.close()

    async def _chosen(self, token_ids: Sequence[int]) -> str:
        while (name := self._router.choose(token_ids)) is None:
            with self._waiting("an engine: none serves"):
                self._news.clear()
                await self._news.wait()
            if self._closed:
                raise asyncio.CancelledError
        return name

    def _heard(self, engine: RemoteEngine) -> None:
        state = engine.state
        if state is None:
            self._router.lost(engine.name)
            return
        self._router.report(
            engine.name, slots=state.slots, serving=state.serving, paused=state.paused,
            requests=state.running + state.waiting,
        )  # fmt: skip
        self._news.set()
