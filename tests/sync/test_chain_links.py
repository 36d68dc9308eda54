"""The sockets of the chain: who is answered what, and what is no message. No memory is read here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from sync_support import socket_folder
from transport_support import SESSION, bucket_id

from streamrl.sync.transports.chain import Progress, Refused, Source
from streamrl.sync.transports.chain_links import FRAME_LIMIT, ChainEnd, ChainHub, identity_of

BUCKETS = 3


@asynccontextmanager
async def hub(*members: str, patience_s: float = 60.0) -> AsyncIterator[ChainHub]:
    with socket_folder() as endpoint:
        made = ChainHub(endpoint, BUCKETS, patience_s)
        made.set_members(set(members))
        running = asyncio.create_task(made.run())
        try:
            async with asyncio.timeout(60):
                yield made
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def on_offer(it: ChainHub, version: int = 0) -> None:
    it.begin(SESSION, version)
    it.offered(version, BUCKETS)


@asynccontextmanager
async def end(it: ChainHub, member: str, patience_s: float = 60.0, life: str = "1") -> AsyncIterator[ChainEnd]:
    made = ChainEnd(it.address, identity_of(member, life), patience_s)
    try:
        yield made
    finally:
        made.close()


def test_a_bucket_is_waited_for_until_the_host_before_has_it() -> None:
    async def scenario() -> None:
        async with hub("a", "b") as it, end(it, "a") as a, end(it, "b") as b:
            on_offer(it)
            assert await a.ask(bucket_id(0, 0, 0), b"at a") == b""
            asking = asyncio.create_task(b.ask(bucket_id(0, 0, 0), b"at b"))
            a.has(bucket_id(0, 0, 0))
            assert await asking == b"at a"
            asking = asyncio.create_task(b.ask(bucket_id(0, 0, 1), b""))
            b.has(bucket_id(0, 0, 0))
            a.has(bucket_id(0, 0, 1))
            assert await asking == b"at a"

    asyncio.run(scenario())


@pytest.mark.parametrize("ends", ["fails", "is taken out", "stands still"])
def test_who_waits_for_a_host_that_ends_is_told_to_read_from_the_trainer(ends: str) -> None:
    async def scenario() -> None:
        patience_s = 0.1 if ends == "stands still" else 60.0
        async with hub("a", "b", patience_s=patience_s) as it, end(it, "a") as a, end(it, "b") as b:
            on_offer(it)
            await a.ask(bucket_id(0, 0, 0), b"at a")
            asking = asyncio.create_task(b.ask(bucket_id(0, 0, 0), b"at b"))
            if ends == "fails":
                a.fails(bucket_id(0, 0, 0))
            elif ends == "is taken out":
                it.set_members({"b"})
            assert await asking == b""
            assert await b.ask(bucket_id(0, 0, 1), b"") == b""

    asyncio.run(scenario())


def test_a_host_that_is_gone_is_noticed_when_it_is_spoken_to() -> None:
    async def scenario() -> None:
        async with hub("a", "b", "c") as it, end(it, "a") as a, end(it, "c") as c:
            on_offer(it)
            await a.ask(bucket_id(0, 0, 0), b"at a")
            async with end(it, "b") as b:
                asking = asyncio.create_task(b.ask(bucket_id(0, 0, 0), b"at b"))
                a.has(bucket_id(0, 0, 0))
                await asking
                monitor = it._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)  # type: ignore[union-attr]
            await monitor.recv_multipart()
            it._socket.disable_monitor()  # type: ignore[union-attr]
            asking = asyncio.create_task(c.ask(bucket_id(0, 0, 0), b"at c"))
            while "c" not in it._chains[0]._readers:  # noqa: ASYNC110 the question is on its way
                await asyncio.sleep(0)
            a.has(bucket_id(0, 0, 1))
            assert await asking == b""

    asyncio.run(scenario())


def test_of_hosts_that_vanish_at_once_none_is_waited_for_however_many_they_are() -> None:
    vanished = [f"h{index}" for index in range(600)]

    async def scenario() -> None:
        async with hub("a", "b", *vanished) as it, end(it, "a") as a, end(it, "b") as b:
            on_offer(it)
            await a.ask(bucket_id(0, 0, 0), b"at a")
            for host in vanished:
                it._take(identity_of(host, "1").encode(), Progress(SESSION, 0, 0, b"nowhere"))
            asking = asyncio.create_task(b.ask(bucket_id(0, 0, 0), b"at b"))
            while "b" not in it._chains[0]._readers:  # noqa: ASYNC110 the question is on its way
                await asyncio.sleep(0)
            a.has(bucket_id(0, 0, 0))
            assert await asking == b""
            assert set(it._chains[0]._readers) == {"a", "b"}

    asyncio.run(scenario())


def test_a_process_that_is_gone_costs_the_next_one_of_that_member_no_place() -> None:
    async def scenario() -> None:
        async with hub("a", "b", "c") as it, end(it, "a") as a, end(it, "c") as c, end(it, "b", life="2") as b:
            on_offer(it, 0)
            await a.ask(bucket_id(0, 0, 0), b"at a")
            it._take(identity_of("b", "1").encode(), Progress(SESSION, 0, 0, b"nowhere"))
            on_offer(it, 1)
            await b.ask(bucket_id(1, 1, 0), b"at b")
            asking = asyncio.create_task(c.ask(bucket_id(1, 1, 0), b"at c"))
            while "c" not in it._chains[1]._readers:  # noqa: ASYNC110 the question is on its way
                await asyncio.sleep(0)
            a.has(bucket_id(0, 0, 0))
            while "b" in it._chains[0]._readers:  # noqa: ASYNC110 the word is on its way
                await asyncio.sleep(0)
            b.has(bucket_id(1, 1, 0))
            assert await asking == b"at b"

    asyncio.run(scenario())


def test_one_who_is_no_member_or_asks_for_what_is_not_on_offer_reads_from_the_trainer() -> None:
    async def scenario() -> None:
        async with hub("a") as it, end(it, "a") as a, end(it, "stranger") as stranger:
            on_offer(it, 0)
            assert await stranger.ask(bucket_id(0, 0, 0), b"at a stranger's") == b""
            assert await a.ask(bucket_id(9, 1, 0), b"at a") == b""
            assert it._chains[0].due == float("inf"), "nobody was taken in"

    asyncio.run(scenario())


def test_without_an_answer_the_trainer_is_read_after_a_while_and_for_the_rest_of_the_version() -> None:
    async def scenario() -> None:
        async with hub("a", "b") as it, end(it, "a") as a, end(it, "b", patience_s=0.05) as b:
            on_offer(it)
            await a.ask(bucket_id(0, 0, 0), b"at a")
            assert await b.ask(bucket_id(0, 0, 0), b"at b") == b""
            a.has(bucket_id(0, 0, 0))
            a.has(bucket_id(0, 0, 1))
            assert await b.ask(bucket_id(0, 0, 1), b"") == b""
            while it._chains[0]._readers["b"].upstream is not None:  # noqa: ASYNC110 the word is on its way
                await asyncio.sleep(0)

    asyncio.run(scenario())


def test_who_did_not_ask_for_the_first_bucket_has_no_place() -> None:
    async def scenario() -> None:
        async with hub("a") as it, end(it, "a") as a:
            on_offer(it)
            assert await a.ask(bucket_id(0, 0, 1), b"") == b""

    asyncio.run(scenario())


GARBAGE = [[b""], [b"\xff"], [b"no message"], [b"two", b"frames"], [msgspec.msgpack.encode({"type": "Progress"})]]


@pytest.mark.parametrize("frames", GARBAGE)
def test_a_malformed_frame_is_counted_answered_and_survived(frames: list[bytes]) -> None:
    async def scenario() -> None:
        async with hub("a") as it, end(it, "a") as a:
            on_offer(it)
            with dealer(it.address) as stranger:
                await stranger.send_multipart(frames)
                answer = msgspec.msgpack.decode(await stranger.recv(), type=Source | Refused)
            assert isinstance(answer, Refused)
            assert it.malformed_frames == 1
            assert await a.ask(bucket_id(0, 0, 0), b"at a") == b""

    asyncio.run(scenario())


def test_a_frame_over_the_limit_ends_only_its_own_connection() -> None:
    async def scenario() -> None:
        async with hub("a") as it, end(it, "a") as a:
            on_offer(it)
            with dealer(it.address) as stranger:
                monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
                await stranger.send(bytes(FRAME_LIMIT + 1))
                await monitor.recv_multipart()
                stranger.disable_monitor()
            assert await a.ask(bucket_id(0, 0, 0), b"at a") == b""
            assert it.malformed_frames == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("answer", [b"no message", msgspec.msgpack.encode(Refused("no"))], ids=["garbage", "refusal"])
def test_a_trainer_that_answers_what_is_no_answer_is_read_itself(answer: bytes) -> None:
    async def scenario(endpoint: str) -> None:
        socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        socket.linger = 0
        with socket:
            socket.bind(endpoint)
            asker = ChainEnd(endpoint, identity_of("a", "1"), 60.0)
            asking = asyncio.create_task(asker.ask(bucket_id(0, 0, 0), b"at a"))
            identity, _ = await socket.recv_multipart()
            await socket.send_multipart([identity, answer])
            assert await asking == b""
            asker.close()

    with socket_folder() as endpoint:
        asyncio.run(asyncio.wait_for(scenario(endpoint), 60))


def dealer(address: str) -> Any:
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(address)
    return socket
