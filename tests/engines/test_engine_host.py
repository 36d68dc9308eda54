"""The process of a shared engine while it starts: what reaches it before its engine is there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from streamrl.actors.engine_host import EngineHost
from streamrl.actors.rollouter import Rollouter
from streamrl.config import load_config
from streamrl.runtime.actor import Actor, ActorSpec, State
from streamrl.runtime.messages import HolderLost


def starting(kind: type[Actor], name: str) -> Any:
    config = load_config(overrides=["env=streamrl.envs.strings:Addition", "rollouts=2", "rollouters_per_engine=2"])
    return kind(ActorSpec(name, f"{name}-0", 0, 0, "/nowhere", "/nowhere", config))


def test_a_rollouter_that_dies_while_the_engine_starts_is_no_business_of_its_host() -> None:
    async def run() -> None:
        starting(EngineHost, "engine").receive(HolderLost(holder="rollouter-1.0"))

    asyncio.run(run())


@pytest.mark.parametrize(("kind", "name"), [(EngineHost, "engine"), (Rollouter, "rollouter")])
def test_an_actor_that_is_stopped_while_it_starts_says_goodbye_without_gauges(kind: type[Actor], name: str) -> None:
    async def run() -> None:
        actor = starting(kind, name)
        actor.state = State.DRAINING
        assert actor._heartbeat().gauges == {}

    asyncio.run(run())
