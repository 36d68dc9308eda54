"""Publisher and subscribers on one event loop: members that are missing, slow, broken, restarted or confused."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from sync_support import (
    Events,
    FakeEngine,
    Ring,
    equal,
    fill,
    flip_byte,
    manifest_of,
    ring,
    small_model,
    socket_folder,
    weights,
)

from streamrl.errors import WeightSyncError
from streamrl.sync import messages as wire
from streamrl.sync.arena import Arena
from streamrl.sync.arrival import Arrival
from streamrl.sync.subscriber import Subscriber
from streamrl.sync.update import Step


async def publish_0(it: Ring, *names: str) -> list[FakeEngine]:
    engines = [it.join(name) for name in names]
    it.publisher.set_members(set(names), set())
    it.write(0, small_model(0))
    await it.publisher.publish(0)
    return engines


# Refusals -------------------------------------------------------------------------------------------------------------


def test_a_corrupted_bucket_gives_the_update_up_and_the_old_version_serves_everywhere() -> None:
    async def scenario() -> None:
        async with ring() as it:
            engines = await publish_0(it, "rollouter-0", "rollouter-1")
            updates = it.observe("evaluator").updates()
            it.publisher.set_members({"rollouter-0", "rollouter-1"}, {"evaluator"})
            it.write(1, small_model(1))
            flip_byte(it.publisher._slab._arena, 1, it.publisher._slab.manifest.buckets[1].offset)
            with pytest.raises(
                WeightSyncError, match="version 1 was given up, version 0 serves: .*bucket 1 of 4 .* is corr"
            ):
                await it.publisher.publish(1, observe=True)
            assert it.publisher.current_version == 0
            for engine in engines:
                assert engine.log == ["pause", "load 0", "resume"]
                assert equal(engine.weights, weights(small_model(0)))

            it.write(1, small_model(2))  # the same number again, intact and with other weights
            await it.publisher.publish(1, observe=True)
            assert all(equal(engine.weights, weights(small_model(2))) for engine in engines)
            version, tensors = await anext(updates)
            assert version == 1
            assert equal(tensors, weights(small_model(2)))

    asyncio.run(scenario())


def test_a_member_that_fails_to_stage_once_gets_a_second_try() -> None:
    async def scenario() -> None:
        async with ring() as it:
            (engine,) = await publish_0(it, "rollouter-0")
            tries = []

            def fail_once(arrival: Arrival) -> None:
                tries.append((arrival.stage.version, arrival.stage.attempt))
                if len(tries) == 1:
                    raise WeightSyncError("a cosmic ray")

            it.on_arrival("rollouter-0", fail_once)
            it.write(1, small_model(1))
            await it.publisher.publish(1)
            assert tries == [(1, 0), (1, 1)]
            assert equal(engine.weights, weights(small_model(1)))

    asyncio.run(scenario())


def test_a_version_that_every_engine_refuses_is_given_up_and_all_resume_on_the_old_one() -> None:
    async def scenario() -> None:
        async with ring() as it:
            engines = await publish_0(it, "rollouter-0", "rollouter-1")
            for engine in engines:
                engine.refuse = {1}
            it.write(1, small_model(1))
            with pytest.raises(WeightSyncError, match="rollouter-0: no parameter of mine .* rollouter-1: no parameter"):
                await it.publisher.publish(1)
            assert it.publisher.current_version == 0
            assert it.unresponsive == []
            for engine in engines:
                assert engine.log[-1] == "resume"
                assert equal(engine.weights, weights(small_model(0)))

    asyncio.run(scenario())


def test_a_member_that_alone_refuses_to_commit_is_left_behind_until_it_is_restarted() -> None:
    async def scenario() -> None:
        async with ring() as it:
            good, bad = await publish_0(it, "rollouter-0", "rollouter-1")
            bad.refuse = {1}
            it.write(1, small_model(1))
            report = await it.publisher.publish(1)
            assert (report.rollouters, it.publisher.current_version) == (1, 1)
            assert it.unresponsive == [("rollouter-1", "commit")]
            assert equal(good.weights, weights(small_model(1)))
            assert equal(bad.weights, weights(small_model(0)))

            await it.leave("rollouter-1")
            restarted = it.join("rollouter-1")
            await it.events.wait("version_committed", version=1, members=["rollouter-1"], late=True)
            assert equal(restarted.weights, weights(small_model(1)))

    asyncio.run(scenario())


def test_an_engine_that_breaks_while_it_loads_is_never_resumed() -> None:
    async def scenario() -> None:
        async with ring() as it:
            (engine,) = await publish_0(it, "rollouter-0")

            async def break_down(version: int) -> None:
                raise RuntimeError("half of the tensors are copied")

            engine.before_load = break_down
            it.write(1, small_model(1))
            publish = asyncio.create_task(it.publisher.publish(1))
            with pytest.raises(ExceptionGroup) as raised:
                await it.tasks.pop("rollouter-0")
            assert raised.group_contains(RuntimeError, match="half of the tensors")
            assert engine.log[-1] == "pause"
            it.publisher.set_members(set(), set())
            await publish

    asyncio.run(scenario())


def test_an_engine_whose_slot_was_overwritten_while_it_loaded_is_never_resumed() -> None:
    async def scenario() -> None:
        async with ring() as it:
            engine = it.join("rollouter-0")
            loading, release = engine.hold_load()
            it.publisher.set_members({"rollouter-0"}, set())
            it.write(0, small_model(0))
            publish = asyncio.create_task(it.publisher.publish(0))
            await loading.wait()
            it.publisher.set_members(set(), set())  # declared dead, but it lives
            await publish
            it.write(1, small_model(1))
            await it.publisher.publish(1)
            it.write(2, small_model(2))
            await it.publisher.publish(2)
            release.set()
            with pytest.raises(ExceptionGroup) as raised:
                await it.tasks.pop("rollouter-0")
            assert raised.group_contains(WeightSyncError, match="overwritten while the engine loaded it")
            assert "resume" not in engine.log

    asyncio.run(scenario())


def test_a_member_taken_out_in_mid_commit_is_brought_back_if_the_version_is_given_up() -> None:
    async def scenario() -> None:
        async with ring() as it:
            bad, doubtful = await publish_0(it, "rollouter-0", "rollouter-1")
            bad.refuse = {1}
            loading, release = doubtful.hold_load()
            it.write(1, small_model(1))
            publish = asyncio.create_task(it.publisher.publish(1))
            await loading.wait()
            it.publisher.set_members({"rollouter-0"}, set())
            with pytest.raises(WeightSyncError, match="version 1 was given up, version 0 serves"):
                await publish
            release.set()
            await it.subscribers["rollouter-1"].wait_version(1)
            it.publisher.set_members({"rollouter-0", "rollouter-1"}, set())
            await it.events.wait("version_committed", version=0, members=["rollouter-1"], late=True)
            assert equal(doubtful.weights, weights(small_model(0)))

    asyncio.run(scenario())


# Deadlines and membership ---------------------------------------------------------------------------------------------


def test_a_member_that_never_connects_is_reported_and_then_named_by_the_error() -> None:
    async def scenario() -> None:
        async with ring() as it:
            engine = it.join("rollouter-0")
            it.publisher.set_members({"rollouter-0", "rollouter-8", "rollouter-9"}, set())
            it.write(0, small_model(0))
            publish = asyncio.create_task(it.publisher.publish(0))
            for _ in range(2):
                await it.expire({"rollouter-8": Step.CONNECT, "rollouter-9": Step.CONNECT})
            with pytest.raises(WeightSyncError) as raised:
                await publish
            assert "rollouter-8: no answer within 20 s (connect)" in str(raised.value)
            assert "rollouter-9: no answer within 20 s (connect)" in str(raised.value)
            assert "rollouter-0" not in str(raised.value)
            assert it.unresponsive == [("rollouter-8", "connect"), ("rollouter-9", "connect")]
            timeouts = [(fields["member"], fields["last"]) for fields in it.events.named("sync_timeout")]
            assert timeouts == [(name, last) for last in (False, True) for name in ("rollouter-8", "rollouter-9")]
            assert engine.log == []

    asyncio.run(scenario())


def test_taking_out_an_unresponsive_member_lets_the_update_go_on() -> None:
    async def scenario() -> None:
        async with ring(timeout_s=0.5) as it:
            engine = it.join("rollouter-0")
            it.publisher.set_members({"rollouter-0", "rollouter-9"}, set())
            it.publisher._on_unresponsive = lambda member, phase: it.publisher.set_members({"rollouter-0"}, set())
            it.write(0, small_model(0))
            assert (await it.publisher.publish(0)).rollouters == 1
            assert engine.log == ["pause", "load 0", "resume"]

    asyncio.run(scenario())


def test_the_commit_has_its_own_deadline_after_a_member_was_taken_out_at_that_of_the_stage() -> None:
    async def scenario() -> None:
        async with ring() as it:
            engine = it.join("rollouter-0")
            loading, release = engine.hold_load()

            def take_out(member: str, phase: str) -> None:
                it.unresponsive.append((member, phase))
                it.publisher.set_members({"rollouter-0"}, set())

            it.publisher._on_unresponsive = take_out
            it.publisher.set_members({"rollouter-0", "rollouter-9"}, set())
            it.write(0, small_model(0))
            publish = asyncio.create_task(it.publisher.publish(0))
            await it.expire({"rollouter-9": Step.CONNECT})
            await loading.wait()
            await it.expire({"rollouter-0": Step.COMMIT})
            release.set()
            assert (await publish).rollouters == 1
            assert it.unresponsive == [("rollouter-9", "connect"), ("rollouter-0", "commit")]

    asyncio.run(scenario())


def test_a_commit_that_is_not_answered_is_named_and_the_version_serves_elsewhere() -> None:
    async def scenario() -> None:
        async with ring() as it:
            good, stuck = it.join("rollouter-0"), it.join("rollouter-1")

            async def hang(version: int) -> None:
                await asyncio.Event().wait()

            stuck.before_load = hang
            it.publisher.set_members({"rollouter-0", "rollouter-1"}, set())
            it.write(0, small_model(0))
            publish = asyncio.create_task(it.publisher.publish(0))
            for _ in range(2):
                await it.expire({"rollouter-1": Step.COMMIT})
            with pytest.raises(WeightSyncError, match="serves, but not everywhere: rollouter-1: .* 20 s .commit"):
                await publish
            assert it.unresponsive == [("rollouter-1", "commit")]
            assert it.publisher.current_version == 0
            assert equal(good.weights, weights(small_model(0)))

    asyncio.run(scenario())


def test_a_member_restarted_in_mid_update_is_brought_along() -> None:
    async def scenario() -> None:
        async with ring() as it:
            await publish_0(it, "rollouter-0", "rollouter-1")
            await it.leave("rollouter-1")
            it.write(1, small_model(1))
            publish = asyncio.create_task(it.publisher.publish(1))
            restarted = it.join("rollouter-1")
            assert (await publish).rollouters == 2
            assert restarted.log == ["pause", "load 1", "resume"]

    asyncio.run(scenario())


def test_of_two_processes_with_one_name_the_newer_counts() -> None:
    async def scenario() -> None:
        async with ring() as it:
            old = it.join("rollouter-0")
            it.tasks["zombie"] = it.tasks.pop("rollouter-0")
            it.publisher.set_members({"rollouter-0"}, set())
            it.write(0, small_model(0))
            await it.publisher.publish(0)
            new = it.join("rollouter-0")
            await it.events.wait("version_committed", version=0, late=True)
            it.write(1, small_model(1))
            assert (await it.publisher.publish(1)).rollouters == 1
            assert new.log == ["pause", "load 0", "resume", "pause", "load 1", "resume"]
            assert old.log == ["pause", "load 0", "resume"]

    asyncio.run(scenario())


def test_stopping_the_publisher_ends_an_update_that_waits() -> None:
    async def scenario() -> None:
        async with ring() as it:
            it.publisher.set_members({"rollouter-0"}, set())
            it.write(0, small_model(0))
            publish = asyncio.create_task(it.publisher.publish(0))
            await asyncio.sleep(0)
            await it.leave("publisher")
            with pytest.raises(WeightSyncError, match="stopped during an update"):
                await publish

    asyncio.run(scenario())


def test_a_cancelled_publish_brings_members_back_to_the_current_version() -> None:
    async def scenario() -> None:
        async with ring() as it:
            quick, slow = await publish_0(it, "rollouter-0", "rollouter-1")
            loading, release = slow.hold_load()
            it.write(1, small_model(1))
            publish = asyncio.create_task(it.publisher.publish(1))
            await loading.wait()
            publish.cancel()
            with pytest.raises(asyncio.CancelledError):
                await publish
            release.set()
            for name in ("rollouter-0", "rollouter-1"):
                await it.events.wait("version_committed", version=0, members=[name], late=True)
            for engine in (quick, slow):
                assert equal(engine.weights, weights(small_model(0)))
            assert it.publisher.current_version == 0

    asyncio.run(scenario())


def say_hello(endpoint: str, incarnation: int) -> zmq.asyncio.Socket:
    """A bare member's socket, which has said Hello as ``rollouter-0``."""
    member = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    member.linger, member.identity = 0, wire.identity_of("rollouter-0", incarnation)
    member.connect(endpoint)
    member.send(wire.encode(wire.Hello(name="rollouter-0", pid=1, incarnation=incarnation)))
    return member


def test_a_member_that_is_gone_is_waited_for_to_connect_and_not_to_stage() -> None:
    async def scenario() -> None:
        async with ring() as it:
            member = say_hello(it.endpoint, 5)
            assert isinstance(wire.decode_to_subscriber(await member.recv()), wire.Welcome)
            member.close()
            gone, question = wire.identity_of("rollouter-0", 5), wire.Refused(reason="still there?")
            while it.publisher._exchange.transmit(gone, question):  # noqa: ASYNC110 - ZeroMQ has no event for a lost route
                await asyncio.sleep(0)
            it.write(0, small_model(0))
            await it.publisher.publish(0)
            it.publisher.set_members({"rollouter-0"}, set())
            assert not it.publisher._running  # nobody there to be brought to version 0
            it.write(1, small_model(1))
            publish = asyncio.create_task(it.publisher.publish(1))
            await it.expire({"rollouter-0": Step.CONNECT})
            assert it.unresponsive == [("rollouter-0", "connect")]
            engine = it.join("rollouter-0")
            assert (await publish).rollouters == 1
            assert engine.log == ["pause", "load 1", "resume"]

    asyncio.run(scenario())


def test_a_member_that_connects_again_takes_its_identity_along() -> None:
    async def scenario() -> None:
        async with ring() as it:
            before = say_hello(it.endpoint, 5)
            assert isinstance(wire.decode_to_subscriber(await before.recv()), wire.Welcome)
            again = say_hello(it.endpoint, 5)  # the publisher has not noticed that the connection of before is dead
            assert isinstance(wire.decode_to_subscriber(await again.recv()), wire.Welcome)
            before.close()
            again.close()

    asyncio.run(scenario())


# The wire -------------------------------------------------------------------------------------------------------------

GARBAGE = [
    pytest.param([b"\xc1 not msgpack"], id="no msgpack"),
    pytest.param([b""], id="empty"),
    pytest.param([msgspec.msgpack.encode({"type": "Detonate"})], id="unknown type"),
    pytest.param([msgspec.msgpack.encode({"type": "Staged", "session": 3, "update": "x"})], id="ill-typed"),
    pytest.param([wire.encode(wire.Staged(schema=99, session="s", update=1))], id="other schema version"),
    pytest.param([b"two", b"frames"], id="two frames"),
    pytest.param([wire.encode(wire.Hello(name="rollouter-0", pid=1, incarnation=1))], id="foreign name"),
]


@pytest.mark.parametrize("frames", GARBAGE)
def test_a_malformed_frame_is_counted_answered_and_survived_by_the_publisher(frames: list[bytes]) -> None:
    async def scenario() -> None:
        async with ring() as it:
            stranger = zmq.asyncio.Context.instance().socket(zmq.DEALER)
            stranger.linger, stranger.identity = 0, b"stranger"
            stranger.connect(it.endpoint)
            await stranger.send_multipart(frames)
            answer = wire.decode_to_subscriber(await stranger.recv())
            stranger.close()
            assert isinstance(answer, wire.Refused)
            assert it.publisher.malformed_frames == 1
            assert it.events.named("malformed_frame") == [{"sender": "stranger", "reason": answer.reason}]
            (engine,) = await publish_0(it, "rollouter-0")
            assert engine.log == ["pause", "load 0", "resume"]

    asyncio.run(scenario())


def test_a_reply_to_an_earlier_publisher_or_update_counts_for_nothing() -> None:
    async def scenario() -> None:
        async with ring() as it:
            it.publisher.set_members({"rollouter-0"}, set())
            it.write(0, small_model(0))
            publish = asyncio.create_task(it.publisher.publish(0))
            member = say_hello(it.endpoint, 5)
            welcome, stage = [wire.decode_to_subscriber(await member.recv()) for _ in range(2)]
            assert isinstance(welcome, wire.Welcome)
            assert isinstance(stage, wire.Stage)
            staged = wire.Staged(session=stage.session, update=stage.update)
            for late in (msgspec.structs.replace(staged, session="before"), msgspec.structs.replace(staged, update=99)):
                await member.send(wire.encode(late))
            await member.send(b"garbage")  # whose answer shows that all before it was read
            assert isinstance(wire.decode_to_subscriber(await member.recv()), wire.Refused)
            await member.send(wire.encode(staged))
            assert isinstance(wire.decode_to_subscriber(await member.recv()), wire.Commit)
            committed = wire.Committed(session=stage.session, update=stage.update, pause_seconds=0.5, canary_rms=0.0)
            await member.send(wire.encode(committed))
            assert (await publish).pause_seconds == 0.5
            member.close()

    asyncio.run(scenario())


class BarePublisher:
    """The publisher's socket without its logic, to say things that it would not say."""

    def __init__(self, endpoint: str) -> None:
        self.socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.bind(endpoint)
        self.peer = b""

    async def receive(self) -> wire.ToPublisher:
        self.peer, frame = await self.socket.recv_multipart()
        return wire.decode_to_publisher(frame)

    async def ask(self, message: wire.Message) -> wire.ToPublisher:
        await self.socket.send_multipart([self.peer, wire.encode(message)])
        return await self.receive()


MALFORMED_STAGES = {
    "a third slot": {"slot": 2},
    "a slot below 0": {"slot": -1},
    "a version below 0": {"version": -3},
    "a version that no number holds": {"version": 1 << 63},
    "a base that cannot be": {"base": -2},
    "a payload below 0": {"buckets": [wire.BucketEntry(0, -1, True)]},
}


def open_stage(**fields: Any) -> wire.Stage:
    usual = {"version": 0, "slot": 0, "attempt": 0, "private": False, "base": -1, "buckets": []}
    return wire.Stage(session="s", update=3, **(usual | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("fields", MALFORMED_STAGES.values(), ids=MALFORMED_STAGES)
def test_a_malformed_stage_is_refused_and_ends_nothing(fields: dict[str, Any]) -> None:
    async def scenario(endpoint: str) -> None:
        subscriber = Subscriber(endpoint, "rollouter-0", FakeEngine(), Events())
        publisher = BarePublisher(endpoint)
        task = asyncio.create_task(subscriber.run())
        try:
            await publisher.receive()
            assert isinstance(await publisher.ask(open_stage(**fields)), wire.Refused)
            assert isinstance(await publisher.ask(open_stage()), wire.StageFailed), "it is still there"
            assert subscriber.malformed_frames == 1
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            publisher.socket.close()

    with socket_folder() as endpoint:
        asyncio.run(asyncio.wait_for(scenario(endpoint), 60))


def welcome_of(arena: Arena, **fields: Any) -> wire.Welcome:
    usual = {"transport": "shm", "address": arena.path, "manifest": arena.manifest}
    return wire.Welcome(session="s", **(usual | fields))


STAGES_THAT_FAIL = {
    "codes against what is not held": ({}, {"base": 17, "buckets": [wire.BucketEntry(0, 8, True)]}, "is not held here"),
    "a code longer than its bucket": ({}, {"base": 17, "buckets": [wire.BucketEntry(0, 1 << 40, True)]}, "a code of"),
    "a transport of another version": ({"transport": "carrier pigeon"}, {}, "no transport here"),
}


@pytest.mark.parametrize(("welcome", "stage", "reason"), STAGES_THAT_FAIL.values(), ids=STAGES_THAT_FAIL)
def test_a_stage_that_cannot_be_followed_fails_and_ends_nothing(
    welcome: dict[str, Any], stage: dict[str, Any], reason: str
) -> None:
    async def scenario(endpoint: str) -> None:
        arena = Arena(manifest_of(small_model(1)))
        subscriber = Subscriber(endpoint, "rollouter-0", FakeEngine(), Events())
        publisher = BarePublisher(endpoint)
        task = asyncio.create_task(subscriber.run())
        try:
            await publisher.receive()
            said = welcome_of(arena, **({"transport": "zmq", "address": f"{endpoint}-none"} | welcome))
            await publisher.socket.send_multipart([publisher.peer, wire.encode(said)])
            for _ in range(2):
                failed = await publisher.ask(open_stage(**stage))
                assert isinstance(failed, wire.StageFailed)
                assert reason in failed.reason
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            publisher.socket.close()
            arena.close()

    with socket_folder() as endpoint:
        asyncio.run(asyncio.wait_for(scenario(endpoint), 60))


def test_a_subscriber_answers_what_is_asked_again_without_doing_it_again() -> None:
    async def scenario(endpoint: str) -> None:
        model, engine, events = small_model(1), FakeEngine(), Events()
        arena = Arena(manifest_of(model))
        entries = fill(arena, 0, 0, model.named_parameters())
        publisher = BarePublisher(endpoint)
        subscriber = Subscriber(endpoint, "rollouter-0", engine, events)
        task = asyncio.create_task(subscriber.run())
        try:
            assert isinstance(await publisher.receive(), wire.Hello)
            await publisher.socket.send_multipart([publisher.peer, b"garbage"])
            assert isinstance(await publisher.receive(), wire.Refused)
            assert subscriber.malformed_frames == len(events.named("malformed_frame")) == 1

            stage = wire.Stage(
                session="s", update=3, version=0, slot=0, attempt=0, private=False, base=-1, buckets=entries
            )
            commit = wire.Commit(session="s", update=3, scores=[])
            refused = await publisher.ask(stage)
            assert isinstance(refused, wire.StageFailed)
            assert "no Welcome of session s" in refused.reason

            welcome = wire.Welcome(session="s", transport="shm", address=arena.path, manifest=arena.manifest)
            await publisher.socket.send_multipart([publisher.peer, wire.encode(welcome)])
            staged = wire.Staged(session="s", update=3)
            assert await publisher.ask(stage) == staged
            assert await publisher.ask(stage) == staged
            assert len(events.named("version_staged")) == 1
            committed = await publisher.ask(commit)
            assert isinstance(committed, wire.Committed)
            assert await publisher.ask(commit) == committed
            assert await publisher.ask(stage) == staged
            assert await publisher.ask(commit) == committed
            assert engine.log == ["pause", "load 0", "resume"]

            other = await publisher.ask(wire.Commit(session="s", update=4, scores=[]))
            assert isinstance(other, wire.CommitFailed)
            assert other.reason == "update 4 is not staged here"
            assert await publisher.ask(msgspec.structs.replace(stage, update=5)) == wire.Staged(session="s", update=5)
            discard = wire.Discard(session="s", update=5)
            await publisher.socket.send_multipart([publisher.peer, wire.encode(discard)])
            assert isinstance(await publisher.ask(wire.Commit(session="s", update=5, scores=[])), wire.CommitFailed)
            assert engine.log == ["pause", "load 0", "resume"]
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            publisher.socket.close()
            arena.close()

    with socket_folder() as endpoint:
        asyncio.run(scenario(endpoint))


def test_buckets_that_were_never_announced_fail_the_attempt_and_not_the_process() -> None:
    async def scenario(endpoint: str) -> None:
        model, engine = small_model(1), FakeEngine()
        arena = Arena(manifest_of(model))
        entries = fill(arena, 0, 0, model.named_parameters())
        publisher = BarePublisher(endpoint)
        task = asyncio.create_task(Subscriber(endpoint, "rollouter-0", engine, Events()).run())
        try:
            assert isinstance(await publisher.receive(), wire.Hello)
            welcome = wire.Welcome(session="s", transport="shm", address=arena.path, manifest=arena.manifest)
            stage = wire.Stage(
                session="s", update=3, version=0, slot=0, attempt=0, private=False, base=-1, buckets=entries[:1]
            )
            for message in (welcome, stage):
                await publisher.socket.send_multipart([publisher.peer, wire.encode(message)])
            failed = await publisher.ask(wire.Buckets(session="s", update=3, first=2, buckets=entries[2:]))
            assert isinstance(failed, wire.StageFailed)
            assert failed.reason == "buckets 1 to 1 were never announced"
            again = msgspec.structs.replace(stage, attempt=1, buckets=entries)
            assert await publisher.ask(again) == wire.Staged(session="s", update=3)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            publisher.socket.close()
            arena.close()

    with socket_folder() as endpoint:
        asyncio.run(asyncio.wait_for(scenario(endpoint), 60))
