"""Payloads by reference between real processes: what arrives, how long it stays, back-pressure, and bad input."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import msgspec
import nixl_support
import pytest
import xxhash
from nixl_support import MB, Child, Producer, consume, everything, needs_nixl, random_bytes, reading, run, writing

from streamrl.buffers.links.link_nixl import COPY_INLINE_BYTES, ArenaReader, ArenaWriter
from streamrl.buffers.wire.reference import HEADER_BYTES, Metadata, ReferenceLost
from streamrl.errors import ConfigError, StreamRLError, WireError

shared, start = nixl_support.shared, nixl_support.start

# What arrives -------------------------------------------------------------------------------------------------------


@needs_nixl
@pytest.mark.parametrize("nbytes", [0, 1, 39_000, COPY_INLINE_BYTES, 5 * MB + 3])
def test_a_payload_of_any_size_arrives_as_it_was_written(shared: Producer, nbytes: int) -> None:
    reference = shared.write(nbytes, seed=nbytes)
    with reading(shared) as reader:
        (payload,) = run(reader.read(reference, everything(reference)))
    assert payload == random_bytes(nbytes, seed=nbytes)
    assert shared.free(reference)


@needs_nixl
def test_only_the_ranges_asked_for_are_read_in_the_order_asked(shared: Producer) -> None:
    payload = random_bytes(3 * MB, seed=1)
    reference = shared.write(3 * MB, seed=1)
    ranges = [(2 * MB + 1, 1000), (0, 64), (70, 0), (63, 2), (3 * MB - 1, 1), (100, MB)]
    with reading(shared) as reader:
        views = run(reader.read(reference, ranges))
        staged = sum(region.nbytes for region in reader._staging._regions)
    assert views == [payload[offset : offset + nbytes] for offset, nbytes in ranges]
    assert all(view.readonly for view in views)
    assert staged < 2 * MB
    assert shared.free(reference)


@needs_nixl
def test_a_payload_given_in_frames_of_any_kind_is_their_bytes_in_order() -> None:
    frames = [b"abc", memoryview(b""), memoryview(bytearray(random_bytes(2 * MB, 2))).cast("I"), b"\0"]

    async def scenario(writer: ArenaWriter, reader: ArenaReader) -> bytes:
        reader.add(writer.name, writer.metadata)
        reference = await writer.write(frames, 2 * MB + 4)
        return bytes((await reader.read(reference, everything(reference)))[0])

    with writing(4 * MB) as writer, reading() as reader:
        assert run(scenario(writer, reader)) == b"abc" + random_bytes(2 * MB, 2) + b"\0"


@needs_nixl
def test_two_producers_are_read_in_one_call_and_answers_keep_their_places(start: Any, shared: Producer) -> None:
    other = start(Producer, "other")
    producers = [shared, other, other, shared, other]
    references = [producer.write(100_000 + seed, seed) for seed, producer in enumerate(producers)]
    other.free(references[2])
    with reading(shared, other) as reader:
        results = run(reader.read_many([(reference, [(seed, 5000)]) for seed, reference in enumerate(references)]))
    assert [bytes(result[0]) for result in results if not isinstance(result, ReferenceLost)] == [
        random_bytes(100_000 + seed, seed)[seed : seed + 5000] for seed in (0, 1, 3, 4)
    ]
    assert str(results[2]) == f"payload of 100002 bytes at {other.agent}: its slot was freed"
    shared.free(references[0])
    shared.free(references[3])


@needs_nixl
def test_two_readers_read_one_producer_at_the_same_time(start: Any, shared: Producer) -> None:
    reference = shared.write(4 * MB, seed=9)
    readers = [start(Child, consume, shared.agent, shared.metadata, reference) for _ in range(2)]
    digest = xxhash.xxh3_64_intdigest(random_bytes(4 * MB, seed=9))
    assert [reader.hear() for _ in range(10) for reader in readers] == [digest] * 20
    shared.free(reference)


@needs_nixl
def test_where_only_tcp_leads_the_same_bytes_arrive_and_a_killed_producer_is_lost(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    producer = start(Producer)
    reference = producer.write(7 * MB, seed=4)
    with reading(producer) as reader:
        (payload,) = run(reader.read(reference, everything(reference)))
        assert payload == random_bytes(7 * MB, seed=4)
        producer.kill()
        with pytest.raises(ReferenceLost, match="its producer is gone"):
            run(reader.read(reference, everything(reference)))


# How long views live ------------------------------------------------------------------------------------------------


@needs_nixl
def test_views_stay_what_they_are_through_later_reads_a_free_and_the_end_of_both_sides(start: Any) -> None:
    producer = start(Producer)
    references = [producer.write(MB, seed) for seed in range(4)]
    with reading(producer) as reader:
        kept = [run(reader.read(reference, [(0, MB)]))[0][10:] for reference in references]
        for reference in references:
            producer.free(reference)
        again = producer.write(4 * MB, seed=99)
        run(reader.read(again, everything(again)))
    producer.kill()
    assert kept == [random_bytes(MB, seed)[10:] for seed in range(4)]


@needs_nixl
def test_memory_is_used_again_once_nothing_refers_to_what_was_read(shared: Producer) -> None:
    reference = shared.write(MB, seed=5)

    async def scenario(reader: ArenaReader) -> list[int]:
        regions = []
        for _ in range(3):
            views = await reader.read(reference, [(0, MB // 2), (MB // 2, MB // 2)])
            last = views[1][100:]
            del views
            regions.append(len(reader._staging._regions))
            assert last == random_bytes(MB, seed=5)[MB // 2 + 100 :]
        return regions

    with reading(shared) as reader:
        # While one read is made the views of the one before are still held.
        assert run(scenario(reader)) == [1, 2, 2]
    shared.free(reference)


# Back-pressure ------------------------------------------------------------------------------------------------------


@needs_nixl
def test_a_full_arena_makes_writes_wait_and_freeing_wakes_them_in_order() -> None:
    third = MB - HEADER_BYTES

    async def scenario(writer: ArenaWriter) -> None:
        held = [await writer.write([bytes(3 * MB - HEADER_BYTES)], 3 * MB - HEADER_BYTES) for _ in range(2)]
        waiting = [asyncio.ensure_future(writer.write([bytes(third)], third)) for _ in range(3)]
        last = asyncio.ensure_future(writer.write([b"small"], 5))
        await asyncio.sleep(0)
        assert writer.statistics() == {
            "arena/bytes": 6 * MB,
            "arena/used_bytes": 6 * MB,
            "arena/slots": 2,
            "arena/waiting": 4,
        }
        writer.free(held[0])
        written = [reference.address - held[0].address for reference in await asyncio.gather(*waiting)]
        assert written == [0, MB, 2 * MB]
        assert (last.done(), writer.statistics()["arena/waiting"]) == (False, 1)
        writer.free(held[1])
        assert (await last).address == held[1].address

    with writing(6 * MB) as writer:
        run(scenario(writer))


@needs_nixl
def test_a_write_that_is_cancelled_while_it_waits_leaves_nothing_taken() -> None:
    async def scenario(writer: ArenaWriter) -> None:
        held = await writer.write([bytes(MB)], MB)
        waiting = asyncio.ensure_future(writer.write([bytes(MB)], MB))
        await asyncio.sleep(0)
        assert writer.statistics()["arena/waiting"] == 1
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        writer.free(held)
        assert writer.statistics() == {
            "arena/bytes": 2 * MB,
            "arena/used_bytes": 0,
            "arena/slots": 0,
            "arena/waiting": 0,
        }

    with writing(2 * MB) as writer:
        run(scenario(writer))


@needs_nixl
def test_the_slot_of_a_write_that_is_cancelled_is_taken_until_its_copy_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nbytes = 6 * MB - HEADER_BYTES
    may_copy = threading.Event()

    async def scenario(writer: ArenaWriter) -> None:
        fill = writer._fill

        def fill_later(*arguments: Any) -> None:
            if threading.current_thread() is not threading.main_thread():
                may_copy.wait()
            fill(*arguments)

        monkeypatch.setattr(writer, "_fill", fill_later)
        copying = asyncio.ensure_future(writer.write([bytes(nbytes)], nbytes))
        await asyncio.sleep(0)
        copying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await copying
        following = asyncio.ensure_future(writer.write([b"next"], 4))
        await asyncio.sleep(0)
        assert (writer.statistics()["arena/used_bytes"], following.done()) == (6 * MB, False)
        may_copy.set()
        assert (await following).nbytes == 4

    with writing(6 * MB) as writer:
        try:
            run(scenario(writer))
        finally:
            may_copy.set()


@needs_nixl
def test_a_payload_that_no_arena_of_this_size_could_hold_names_the_setting() -> None:
    with writing(MB) as writer, pytest.raises(ConfigError, match=r"queue\.arena_bytes: a payload takes 1048832 bytes"):
        run(writer.write([bytes(MB)], MB))


@needs_nixl
def test_frames_that_do_not_add_up_are_refused_and_take_no_room() -> None:
    with writing(MB) as writer:
        with pytest.raises(WireError, match="expected frames of 10 bytes in all, got 9"):
            run(writer.write([b"123456789"], 10))
        assert writer.statistics()["arena/used_bytes"] == 0


@needs_nixl
def test_closing_ends_writes_that_wait_for_room() -> None:
    async def scenario(writer: ArenaWriter) -> None:
        await writer.write([bytes(MB)], MB)
        waiting = asyncio.ensure_future(writer.write([bytes(MB)], MB))
        await asyncio.sleep(0)
        writer.close()
        with pytest.raises(StreamRLError, match="closed"):
            await waiting

    with writing(MB + 512) as writer:
        run(scenario(writer))


# Bad input ----------------------------------------------------------------------------------------------------------


@needs_nixl
def test_an_unknown_a_forgotten_and_a_foreign_reference_are_lost_in_one_line(shared: Producer) -> None:
    reference = shared.write(1000, seed=18)
    beyond = msgspec.structs.replace(reference, address=reference.address + (1 << 40))
    unstamped = msgspec.structs.replace(reference, stamp=reference.stamp ^ 1)
    stranger = msgspec.structs.replace(reference, agent="nobody#0")
    wanted = [(one, [(0, 10)]) for one in (stranger, beyond, unstamped, reference)]
    with reading(shared) as reader:
        unknown, outside, forged, fine = run(reader.read_many(wanted))
        assert str(unknown) == "payload of 1000 bytes at nobody#0: its producer is unknown"
        assert "is not inside the arena" in str(outside)
        assert "its slot was freed" in str(forged)
        assert fine == [random_bytes(1000, seed=18)[:10]]
        reader.forget(shared.agent)
        reader.forget(shared.agent)
        with pytest.raises(ReferenceLost, match="its producer is unknown"):
            run(reader.read(reference, [(0, 10)]))
        reader.add(shared.agent, shared.metadata)
        assert run(reader.read(reference, [(0, 10)]))[0] == random_bytes(1000, seed=18)[:10]
    shared.free(reference)


@needs_nixl
def test_metadata_that_is_broken_is_refused_in_one_line(shared: Producer) -> None:
    with reading() as reader:
        for broken in (b"", b"garbage", shared.metadata[:40], b"\x94\xff"):
            with pytest.raises(WireError, match=r"^metadata of 'shared#[0-9a-f]{12}': [^\n]+$"):
                reader.add(shared.agent, broken)
        with pytest.raises(WireError, match=r"metadata of 'other': it is that of 'shared#[0-9a-f]{12}'"):
            reader.add("other", shared.metadata)
        assert not reader.knows(shared.agent)


@needs_nixl
def test_metadata_that_nixl_refuses_makes_the_producers_references_lost(shared: Producer) -> None:
    reference = shared.write(1000, seed=19)
    good = msgspec.msgpack.decode(shared.metadata, type=Metadata)
    with reading() as reader:
        reader.add(shared.agent, msgspec.msgpack.encode(msgspec.structs.replace(good, nixl=good.nixl[:100])))
        with pytest.raises(ReferenceLost, match="its metadata is refused"):
            run(reader.read(reference, [(0, 10)]))
        reader.add(shared.agent, shared.metadata)
        assert run(reader.read(reference, [(0, 10)]))[0] == random_bytes(1000, seed=19)[:10]
    shared.free(reference)


@needs_nixl
@pytest.mark.parametrize("bad", [(-1, 5), (0, -1), (0, 101), (100, 1)])
def test_a_range_outside_of_its_payload_is_refused_before_anything_is_read(
    shared: Producer, bad: tuple[int, int]
) -> None:
    reference = shared.write(100, seed=20)
    with (
        reading(shared) as reader,
        pytest.raises(WireError, match=r"range of -?\d+ bytes at -?\d+: expected one inside the payload of 100"),
    ):
        run(reader.read(reference, [(0, 10), bad]))
    shared.free(reference)


@needs_nixl
def test_a_reader_that_was_closed_says_so(shared: Producer) -> None:
    reference = shared.write(100, seed=21)
    with reading(shared) as reader:
        reader.close()
        with pytest.raises(StreamRLError, match="closed"):
            run(reader.read(reference, [(0, 10)]))
    shared.free(reference)


def test_without_the_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    for make in (lambda: ArenaReader("consumer"), lambda: ArenaWriter("producer", MB)):
        with pytest.raises(
            ConfigError, match=r"queue\.backend=nixl needs the nixl package: pip install 'streamrl\[nixl\]'"
        ):
            make()
