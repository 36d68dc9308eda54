"""Transport ``zmq``: what it refuses, what it bounds, and how it hears that the other side has gone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio
from transport_support import (
    Child,
    bucket_id,
    content,
    fetch_version,
    large,
    mixed,
    offer_version,
    receiving,
    refused,
    send,
    sending,
)

from streamrl.sync.staging import bucket_of
from streamrl.sync.transports.zmq_pull import NO_REQUEST, PART_BYTES, WINDOW, Ask, Part


def test_a_sender_that_is_killed_in_mid_bucket_fails_the_fetch_at_once(folder: Path) -> None:
    manifest = large()
    sender = Child(send, "zmq", manifest, folder)

    async def scenario() -> str:
        with receiving("zmq", sender.hear(), manifest) as receiver:
            await asyncio.to_thread(sender.tell, "offer", 0, 0)
            first, second = (bucket_of(manifest, receiver.memory(0), index) for index in range(2))
            await receiver.fetch(bucket_id(0, 0, 0), first)
            sender.stop()
            fetching = asyncio.create_task(refused(receiver.fetch(bucket_id(0, 0, 1), second)))
            await asyncio.sleep(0)
            sender.kill()
            return await fetching

    assert asyncio.run(scenario()) == "bucket 1 of version 0: the publisher went away"


def test_a_sender_that_hangs_fails_the_fetch_after_the_time_limit(folder: Path) -> None:
    manifest = mixed()

    async def scenario() -> str:
        silent = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        silent.bind(f"ipc://{folder}/silent")
        try:
            with receiving("zmq", f"ipc://{folder}/silent", manifest) as receiver:
                receiver._timeout_s = 0.01
                return await refused(fetch_version(receiver, manifest, 0, 0))
        finally:
            silent.close(linger=0)

    assert asyncio.run(scenario()) == "bucket 0 of version 0: the publisher sent nothing for 0.01 s"


def test_what_was_offered_in_place_of_a_bucket_is_fetched_by_its_length(folder: Path) -> None:
    manifest = mixed()

    async def scenario() -> None:
        async with sending("zmq", manifest, folder) as (sender, slab):
            await offer_version(sender, slab, 0, 0)
            await sender.begin(bucket_id(1, 1, -1))
            slab.slots[1][:] = content(manifest, 1)
            await sender.offer(bucket_id(1, 1, 0), memoryview(b"what changed"))
            with receiving("zmq", sender.address, manifest) as receiver:
                short = memoryview(bytearray(12))
                await receiver.fetch(bucket_id(1, 1, 0), short)
                assert short == b"what changed"
                whole = bucket_of(manifest, receiver.memory(1), 0)
                await receiver.fetch(bucket_id(1, 1, 0, attempt=1), whole)
                assert whole == slab.bucket(1, 0)
                wrong = memoryview(bytearray(11))
                reason = await refused(receiver.fetch(bucket_id(1, 1, 0), wrong))
                assert (
                    reason
                    == f"bucket 0 of version 1 takes {len(whole)} bytes, or 12 as it was offered; asked for are 11"
                )

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 3}, "version 3 of session 5e551011 is not on offer"),
        ({"slot": 1}, "version 0 of session 5e551011 is not on offer"),
        ({"session": "another"}, "version 0 of session another is not on offer"),
        ({"index": 1}, "bucket 1 of version 0 is not on offer"),
        ({"index": -1}, "bucket -1 of version 0 is not on offer"),
    ],
)
def test_what_is_not_on_offer_is_refused_at_once(change: dict, message: str, folder: Path) -> None:
    manifest = mixed()

    async def scenario() -> str:
        async with sending("zmq", manifest, folder) as (sender, slab):
            await offer_version(sender, slab, 0, 0, buckets=1)
            with receiving("zmq", sender.address, manifest) as receiver:
                bucket = replace(bucket_id(0, 0, 0), **change)
                return await refused(receiver.fetch(bucket, bucket_of(manifest, receiver.memory(0), 0)))

    assert asyncio.run(scenario()) == message


async def ask(socket: zmq.asyncio.Socket, *frames: bytes) -> Part:
    await socket.send_multipart(list(frames))
    answer, payload = await asyncio.wait_for(socket.recv_multipart(), 20)
    assert payload == b""
    return msgspec.msgpack.decode(answer, type=Part)


def test_frames_that_are_no_request_are_counted_answered_and_do_no_harm(folder: Path) -> None:
    manifest = mixed()

    async def scenario() -> None:
        async with sending("zmq", manifest, folder) as (sender, slab):
            await offer_version(sender, slab, 0, 0)
            stranger = zmq.asyncio.Context.instance().socket(zmq.DEALER)
            stranger.connect(sender.address)
            try:
                for frames in ([b"\xff"], [b""], [b"one", b"two"], [msgspec.msgpack.encode({"request": "one"})]):
                    answer = await ask(stranger, *frames)
                    assert answer.request == NO_REQUEST
                    assert "no request for a bucket" in answer.reason
                assert sender.malformed_frames == 4
                for offset, size in ((-1, 1), (slab.bucket(0, 0).nbytes, 1), (0, PART_BYTES + 1), (0, 0)):
                    request = Ask(7, bucket_id(0, 0, 0), slab.bucket(0, 0).nbytes, offset, size)
                    answer = await ask(stranger, msgspec.msgpack.encode(request))
                    assert (answer.request, answer.reason[:7]) == (7, "no part")
            finally:
                stranger.close(linger=0)
            with receiving("zmq", sender.address, manifest) as receiver:
                await fetch_version(receiver, manifest, 0, 0)

    asyncio.run(scenario())


def test_a_receiver_asks_for_no_more_than_its_window(folder: Path) -> None:
    manifest = large(1, (WINDOW + 3) * PART_BYTES)

    async def scenario() -> None:
        server = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        server.bind(f"ipc://{folder}/counting")
        try:
            with receiving("zmq", f"ipc://{folder}/counting", manifest) as receiver:
                out = bucket_of(manifest, receiver.memory(0), 0)
                fetching = asyncio.create_task(receiver.fetch(bucket_id(0, 0, 0), out))
                asked = [await asyncio.wait_for(server.recv_multipart(), 20) for _ in range(WINDOW)]
                part = msgspec.msgpack.decode(asked[0][1], type=Ask)
                answer = [asked[0][0], msgspec.msgpack.encode(Part(part.request, 0)), bytes(PART_BYTES)]
                await server.send_multipart(answer)
                _, after = await asyncio.wait_for(server.recv_multipart(), 20)
                assert msgspec.msgpack.decode(after, type=Ask).offset == WINDOW * PART_BYTES
                assert not await server.poll(0)
                wrong = [asked[0][0], msgspec.msgpack.encode(Part(part.request, 0)), bytes(PART_BYTES)]
                await server.send_multipart(wrong)  # the first part once more
                assert "expected 4194304 bytes from byte 4194304 on, got 4194304 from 0 on" in await refused(fetching)
        finally:
            server.close(linger=0)

    asyncio.run(scenario())
