"""``sync.stage=device``: the engine gets verified tensors while it generates, and only the exchange is in the pause."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from sync_support import Events, FakeEngine, Ring, equal, flip_byte, ring, small_model, socket_folder, weights

from streamrl.config import load_config
from streamrl.errors import ConfigError, WeightSyncError
from streamrl.sync.subscriber import Subscriber


class StagingEngine(FakeEngine):
    """Keeps what is staged in memory of its own; a load takes that up and copies nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.staged: tuple[int, dict[str, torch.Tensor]] | None = None
        self.refuse_staging: set[int] = set()
        """Versions of which one attempt is refused."""
        self.staging = asyncio.Event()
        self.stage_on = asyncio.Event()
        self.stage_on.set()

    async def stage(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        self.staged = None
        self.staging.set()
        await self.stage_on.wait()
        if version in self.refuse_staging:
            self.refuse_staging.remove(version)
            raise WeightSyncError(f"no room for version {version}")
        self.staged = version, {name: tensor.clone() for name, tensor in tensors.items()}
        self.log.append(f"stage {version}")

    def unstage(self) -> None:
        if self.staged is not None:
            self.log.append(f"unstage {self.staged[0]}")
        self.staged = None

    async def load(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        assert self.staged is not None, "nothing is staged"
        assert self.staged[0] == version
        (_, tensors), self.staged = self.staged, None
        await super().load(version, tensors)

    def hold_staging(self) -> tuple[asyncio.Event, asyncio.Event]:
        """Stop in every call of ``stage`` before the release: (one has begun, release)."""
        self.staging, self.stage_on = asyncio.Event(), asyncio.Event()
        return self.staging, self.stage_on


def steps(version: int) -> list[str]:
    return [f"stage {version}", "pause", f"load {version}", "resume"]


def join(it: Ring, *names: str, **settings: Any) -> list[StagingEngine]:
    engines = [it.join(name, StagingEngine(), stage="device", **settings) for name in names]
    it.publisher.set_members(set(it.engines), set())
    return engines


async def publish(it: Ring, version: int, seed: int | None = None) -> None:
    it.write(version, small_model(version if seed is None else seed))
    await it.publisher.publish(version)


@pytest.mark.parametrize("rolling", [False, True], ids=["together", "rolling"])
@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_each_version_is_staged_before_the_pause_and_taken_up_in_it(transport: str, rolling: bool) -> None:
    async def scenario() -> None:
        async with ring(transport=transport, rolling=rolling) as it:
            engines = join(it, "rollouter-0", "rollouter-1")
            for version, seed in enumerate((1, 2, 1, 2)):
                await publish(it, version, seed)
                for engine in engines:
                    assert equal(engine.weights, weights(small_model(seed)))
                    assert engine.log == [each for number in range(version + 1) for each in steps(number)]

    asyncio.run(scenario())


def test_nobody_is_paused_before_every_engine_has_staged() -> None:
    async def scenario() -> None:
        async with ring() as it:
            fast, slow = join(it, "rollouter-0", "rollouter-1")
            await publish(it, 0)
            staging, stage_on = slow.hold_staging()
            publishing = asyncio.create_task(publish(it, 1))
            await staging.wait()
            await it.subscribers["rollouter-0"]._on_event.wait("version_staged", version=1)  # type: ignore[attr-defined]
            assert "pause" not in slow.log[len(steps(0)) :] + fast.log[len(steps(0)) :]
            stage_on.set()
            await publishing
            assert fast.log == slow.log == steps(0) + steps(1)

    asyncio.run(scenario())


def test_a_stage_that_fails_is_told_and_done_once_more_and_nobody_was_paused() -> None:
    async def scenario() -> None:
        async with ring() as it:
            first, second = join(it, "rollouter-0", "rollouter-1")
            await publish(it, 0)
            second.refuse_staging = {1}
            await publish(it, 1)
            assert first.log == second.log == steps(0) + steps(1)
            assert equal(second.weights, weights(small_model(1)))
            told = it.subscribers["rollouter-1"]._on_event.named("version_failed")  # type: ignore[attr-defined]
            assert told == [{"version": 1, "reason": "no room for version 1"}]

    asyncio.run(scenario())


def test_a_version_that_one_engine_cannot_stage_is_dropped_everywhere_and_the_old_one_serves() -> None:
    async def scenario() -> None:
        async with ring() as it:
            engine, _ = join(it, "rollouter-0", "rollouter-1")
            await publish(it, 0)
            it.write(1, small_model(1))
            flip_byte(it.publisher._slab._arena, 1, it.publisher._slab.manifest.buckets[1].offset)
            with pytest.raises(WeightSyncError, match="version 1 was given up, version 0 serves"):
                await it.publisher.publish(1)
            assert engine.log == steps(0), "what is corrupted never reaches the engine"

            second = it.engines["rollouter-1"]
            refused, second.stage = second.stage, _always_refuses
            it.write(1, small_model(5))
            with pytest.raises(WeightSyncError, match="version 1 was given up, version 0 serves: .*it never fits"):
                await it.publisher.publish(1)
            second.stage = refused
            await publish(it, 1, seed=6)
            assert equal(engine.weights, weights(small_model(6))), "and not the one that was staged under that number"
            assert engine.log == [*steps(0), "stage 1", "unstage 1", *steps(1)]

    asyncio.run(scenario())


async def _always_refuses(version: int, tensors: Mapping[str, torch.Tensor]) -> None:
    raise WeightSyncError("it never fits")


def test_a_late_joiner_stages_its_own_version_and_disturbs_nobody() -> None:
    async def scenario() -> None:
        async with ring() as it:
            (engine,) = join(it, "rollouter-0")
            for version in range(2):
                await publish(it, version)
            (late,) = join(it, "rollouter-1")
            await it.events.wait("version_committed", version=1, members=["rollouter-1"], late=True)
            assert late.log == steps(1)
            assert equal(late.weights, weights(small_model(1)))
            assert engine.log == steps(0) + steps(1)
            await publish(it, 2)
            assert equal(late.weights, weights(small_model(2)))

    asyncio.run(scenario())


def test_an_engine_that_refuses_the_load_resumes_on_the_old_version_and_keeps_nothing_staged() -> None:
    async def scenario() -> None:
        async with ring() as it:
            (engine,) = join(it, "rollouter-0")
            await publish(it, 0)
            engine.refuse = {1}
            it.write(1, small_model(1))
            with pytest.raises(WeightSyncError, match="no parameter of mine is called like that"):
                await it.publisher.publish(1)
            assert engine.staged is None
            assert engine.version == 0
            assert engine.log[-2:] == ["pause", "resume"]

    asyncio.run(scenario())


def test_a_member_that_ends_while_its_engine_stages_leaves_nothing_staged() -> None:
    async def scenario() -> None:
        async with ring() as it:
            engine, _ = join(it, "rollouter-0", "rollouter-1")
            await publish(it, 0)
            staging, _ = engine.hold_staging()
            publishing = asyncio.create_task(publish(it, 1))
            await staging.wait()
            await it.leave("rollouter-0")
            it.publisher.set_members({"rollouter-1"}, set())
            await publishing
            assert engine.staged is None
            assert it.engines["rollouter-1"].log == steps(0) + steps(1)

    asyncio.run(scenario())


def test_memory_that_gets_another_version_while_the_engine_copies_it_fails_the_attempt() -> None:
    async def scenario() -> None:
        async with ring() as it:
            (engine,) = join(it, "rollouter-0")
            await publish(it, 0)
            staging, stage_on = engine.hold_staging()
            publishing = asyncio.create_task(publish(it, 1))
            await staging.wait()
            arrival = it.subscribers["rollouter-0"]._link._arrival
            assert arrival is not None
            arrival.intact = lambda: False  # type: ignore[method-assign]
            stage_on.set()
            await publishing  # by the second attempt
            assert engine.log == [*steps(0), "stage 1", "unstage 1", *steps(1)]
            failed = it.subscribers["rollouter-0"]._on_event.named("version_failed")  # type: ignore[attr-defined]
            assert failed == [{"version": 1, "reason": "version 1 was overwritten while the engine staged it"}]

    asyncio.run(scenario())


def test_an_engine_that_cannot_stage_is_refused_in_one_line() -> None:
    with socket_folder() as endpoint, pytest.raises(ConfigError, match=r"FakeEngine takes .*; set sync.stage=host$"):
        Subscriber(endpoint, "rollouter-0", FakeEngine(), Events(), stage="device")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["engine=sglang"], "engine.name=sglang"),
        (["engine=vllm", "engine.urls=[http://127.0.0.1:8000]"], "engine.urls"),
        (["model.lora.rank=8"], "model.lora.rank=8"),
    ],
)
def test_settings_under_which_no_engine_can_stage_are_refused(settings: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"^sync.stage=device with {named}: .*; set sync.stage=host$"):
        load_config("base", [*settings, "sync.stage=device"])


@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_engines_that_can_stage_are_taken(engine: str) -> None:
    assert load_config("base", [f"engine={engine}", "sync.stage=device"]).sync.stage == "device"
