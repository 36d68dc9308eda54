"""An engine on vLLM whose update broke off, over a vLLM that never comes to its end: it must never serve again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: `make test-vllm` makes an environment that has it")

import torch
from vllm.v1.engine.exceptions import EngineDeadError

from streamrl.config import load_config
from streamrl.engines.blueprint import Blueprint
from streamrl.engines.vllm.counters import Counters
from streamrl.engines.vllm.engine import VllmEngine
from streamrl.errors import ActorDied
from streamrl.sync.names import NameMap
from streamrl.types import SamplingParams


class Scheduler:
    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        pass


class Endless:
    """``AsyncLLM`` as far as an update needs it. It stops in the middle of one."""

    def __init__(self) -> None:
        self.engine_core = Scheduler()
        self.reached = asyncio.Event()
        self.error: Exception | None = None
        """Instead of the wait."""

    async def start_weight_update(self) -> None:
        pass

    async def update_weights(self, request: object) -> None:
        self.reached.set()
        if self.error is not None:
            raise self.error
        await asyncio.Event().wait()


def engine_over(llm: Any) -> VllmEngine:
    blueprint = Blueprint({}, torch.float32, 104, None, NameMap({}, []), {})
    engine = VllmEngine(load_config(overrides=["engine=vllm"]), llm, Counters(), blueprint)
    engine._arriving = blueprint
    return engine


async def check_ended(engine: VllmEngine, reason: str) -> None:
    assert engine.version == -1
    for call in (engine.resume(), engine.generate([9], SamplingParams()), engine.load(4, {}), engine.score([9, 10])):
        with pytest.raises(ActorDied, match=reason):
            await call


def test_a_load_that_is_cancelled_half_way_ends_the_engine():
    async def run() -> None:
        llm = Endless()
        engine = engine_over(llm)
        await engine.pause()
        loading = asyncio.create_task(engine.load(3, {}))
        await llm.reached.wait()
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        await check_ended(engine, "version 3 was half loaded .*CancelledError.* must be replaced")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (EngineDeadError(), "engine process died"),
        (RuntimeError("no weights came for ['norm']"), "version 3 was half loaded .*no weights came"),
    ],
)
def test_a_load_that_fails_half_way_ends_the_engine(error: Exception, reason: str):
    async def run() -> None:
        llm = Endless()
        llm.error = error
        engine = engine_over(llm)
        await engine.pause()
        with pytest.raises(ActorDied, match="version 3 was half loaded"):
            await engine.load(3, {})
        await check_ended(engine, reason)

    asyncio.run(run())
