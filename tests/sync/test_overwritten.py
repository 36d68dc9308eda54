"""A member that was given up but lives: its engine serves from memory that gets other versions, and nothing of what it
samples then may be trained on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from shared_support import sharing
from sync_support import Ring, ring
from tiny_transformer import tied_transformer

from streamrl.actors.rollouter import Rollouter
from streamrl.config import load_config
from streamrl.engines.embedded import EmbeddedEngine
from streamrl.envs.group import GroupResult
from streamrl.errors import EngineLost, WeightSyncError
from streamrl.runtime.actor import ActorSpec
from streamrl.types import Generation, Group, Lease, SamplingParams

NAME = "rollouter-0"
PROMPT = [1, 2, 3]
PARAMS = SamplingParams(max_tokens=8)
OVERWRITTEN = "version 0, which this engine serves, was overwritten by a later one"


@asynccontextmanager
async def member(**settings: Any) -> AsyncIterator[tuple[Ring, EmbeddedEngine]]:
    """A publisher, and an embedded engine that serves its version 0."""
    engine = EmbeddedEngine(tied_transformer(3), slots=2, max_length=128)
    await engine.start()
    try:
        async with ring(model=tied_transformer(0), **settings) as it:
            it.join(NAME, engine)
            it.publisher.set_members({NAME}, set())
            await publish(it, 0)
            yield it, engine
    finally:
        await engine.close()


async def publish(it: Ring, version: int) -> None:
    it.write(version, tied_transformer(version))
    await it.publisher.publish(version)


async def go_on_without_it(it: Ring) -> None:
    """It is declared dead, but lives; two further versions are published."""
    it.publisher.set_members(set(), set())
    await publish(it, 1)
    await publish(it, 2)


def rollouter(it: Ring) -> tuple[Rollouter, list[Group]]:
    """One whose engine is the member, and what it has delivered."""
    config = load_config(overrides=["env=streamrl.envs.strings:Addition"])
    made, delivered = Rollouter(ActorSpec("rollouter", NAME, 0, 0, "/nowhere", "/nowhere", config)), []

    async def put(group: Group) -> None:
        delivered.append(group)

    made._shared = made._reference = None
    made._holding = SimpleNamespace(require_intact=it.subscribers[NAME].require_intact)  # type: ignore[assignment]
    made._producer = SimpleNamespace(put=put)  # type: ignore[assignment]
    return made, delivered


async def deliver(it: Rollouter, generation: Generation) -> None:
    tokens = [*PROMPT, *generation.token_ids.tolist()]
    trajectory = SimpleNamespace(tokens=tokens, versions=generation.versions)
    group = Group(lease=1, prompt=0, env="addition", trajectories=[trajectory])  # type: ignore[list-item]
    await it._deliver(Lease(1, 0, 1, 0, 60.0), GroupResult(group, []), attached=False)


def test_a_group_that_was_sampled_from_overwritten_weights_is_never_delivered() -> None:
    async def scenario() -> None:
        async with member() as (it, engine):
            actor, delivered = rollouter(it)
            await deliver(actor, await engine.generate(PROMPT, PARAMS))
            before = await engine.score(PROMPT)
            await go_on_without_it(it)
            generation = await engine.generate(PROMPT, PARAMS)
            assert generation.versions == [(0, 8)]
            assert (await engine.score(PROMPT)).tolist() != before.tolist()  # and yet it computes with version 2
            with pytest.raises(WeightSyncError, match=OVERWRITTEN):
                await deliver(actor, generation)
            assert len(delivered) == 1

    asyncio.run(scenario())


def test_a_group_that_was_sampled_before_one_further_version_is_delivered() -> None:
    async def scenario() -> None:
        async with member() as (it, engine):
            actor, delivered = rollouter(it)
            it.publisher.set_members(set(), set())
            await publish(it, 1)
            await deliver(actor, await engine.generate(PROMPT, PARAMS))
            assert len(delivered) == 1

    asyncio.run(scenario())


def test_a_shared_engine_answers_nothing_from_overwritten_weights_and_ends() -> None:
    async def scenario() -> None:
        async with member() as (it, engine), sharing(engine) as shared:
            (host,) = shared.hosts
            host.require_intact = it.subscribers[NAME].require_intact
            assert (await shared.generate(PROMPT, PARAMS)).versions == [(0, 8)]
            await go_on_without_it(it)
            (remote,) = shared.remotes
            with pytest.raises(EngineLost):
                await remote.generate(PROMPT, PARAMS)
            with pytest.raises(ExceptionGroup) as raised:
                await host.ended()
            assert raised.group_contains(WeightSyncError, match=OVERWRITTEN)

    asyncio.run(scenario())


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_member_that_missed_a_version_takes_no_further_one(transport: str) -> None:
    """What it sampled last may be of the overwritten memory, and would pass for good after the next commit."""

    async def scenario() -> None:
        async with member(transport=transport) as (it, engine):
            it.publisher.set_members(set(), set())
            await publish(it, 1)
            before = await engine.score(PROMPT)
            it.write(2, tied_transformer(2))
            publishing = asyncio.create_task(it.publisher.publish(2))
            it.publisher._rollouters = {NAME}  # as where it comes back at the very moment of the next version
            with pytest.raises(ExceptionGroup) as raised:
                await it.tasks.pop(NAME)
            message = "version 2 would overwrite version 0, which this engine serves: it missed a version"
            assert raised.group_contains(WeightSyncError, match=message)
            if transport == "zmq":  # its own memory: not a byte was written
                assert (await engine.score(PROMPT)).tolist() == before.tolist()
            assert engine.version == 0
            it.publisher.set_members(set(), set())
            await publishing

    asyncio.run(scenario())


def test_memory_that_is_overwritten_between_stage_and_pause_is_noticed_at_the_pause() -> None:
    """A version that was staged in a copy of its own does not hide that the one before it was overwritten."""

    async def scenario() -> None:
        async with member() as (it, engine):
            await go_on_without_it(it)
            it.publisher.set_members({NAME}, set())  # brought to version 2 in private
            with pytest.raises(ExceptionGroup) as raised:
                await it.tasks.pop(NAME)
            assert raised.group_contains(WeightSyncError, match=OVERWRITTEN)
            assert engine.version == 0
            it.publisher.set_members(set(), set())

    asyncio.run(scenario())


def test_a_late_joiner_serves_from_a_copy_of_its_own_and_may_be_overtaken() -> None:
    async def scenario() -> None:
        async with ring(model=tied_transformer(0)) as it:
            await publish(it, 0)
            engine = EmbeddedEngine(tied_transformer(3), slots=2, max_length=128)
            await engine.start()
            it.join(NAME, engine)
            it.publisher.set_members({NAME}, set())
            await it.subscribers[NAME].wait_version(0)
            actor, delivered = rollouter(it)
            before = await engine.score(PROMPT)
            await go_on_without_it(it)
            assert (await engine.score(PROMPT)).tolist() == before.tolist()
            await deliver(actor, await engine.generate(PROMPT, PARAMS))
            assert len(delivered) == 1
            await engine.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_who_joins_between_two_versions_that_follow_at_once_goes_on(transport: str) -> None:
    """It was brought to the older one, in memory of its own that the version after the next takes."""

    async def scenario() -> None:
        async with ring(model=tied_transformer(0), transport=transport) as it:
            await publish(it, 0)
            engine = EmbeddedEngine(tied_transformer(3), slots=2, max_length=128)
            await engine.start()
            content = it.publisher.open(1)
            publishing = asyncio.create_task(it.publisher.publish(1))
            await asyncio.sleep(0)  # the update has begun: who joins now is none of it
            it.join(NAME, engine)
            it.publisher.set_members({NAME}, set())
            await it.subscribers[NAME].wait_version(0)
            with content:
                content.put(tied_transformer(1).named_parameters())
            await publishing
            await publish(it, 2)
            await it.subscribers[NAME].wait_version(2)
            it.subscribers[NAME].require_intact()
            await engine.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))
