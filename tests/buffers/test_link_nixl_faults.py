"""What is lost when processes die, hang or free what is read: whole payloads or none, in bounded time."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import nixl_support
import pytest
import xxhash
from nixl_support import MB, Child, Producer, consume, everything, needs_nixl, random_bytes, reading, run, writing

from streamrl.buffers.links.link_nixl import ArenaReader, ArenaWriter
from streamrl.buffers.wire.reference import ReferenceLost

shared, start = nixl_support.shared, nixl_support.start


@needs_nixl
def test_a_freed_slot_is_lost_and_so_is_one_that_holds_another_payload(shared: Producer) -> None:
    old = shared.write(MB, seed=6)
    assert shared.free(old)
    with reading(shared) as reader:
        with pytest.raises(ReferenceLost, match="its slot was freed"):
            run(reader.read(old, [(0, 10)]))
        new = shared.write(MB, seed=7)
        assert (new.address, new.nbytes) == (old.address, old.nbytes)
        with pytest.raises(ReferenceLost, match="its slot was freed"):
            run(reader.read(old, [(0, 10)]))
        assert run(reader.read(new, [(0, 10)]))[0] == random_bytes(MB, seed=7)[:10]
    assert not shared.free(old), "a late second free must not free the successor"
    assert shared.free(new)


@needs_nixl
def test_a_slot_that_is_reused_between_the_two_halves_of_a_read_is_lost(
    shared: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = shared.write(MB, seed=8)
    with reading(shared) as reader:
        transfer = reader._transfer
        halves = []

        def transfer_then_reuse(*arguments: Any) -> None:
            transfer(*arguments)
            halves.append(arguments)
            if len(halves) == 1:
                shared.free(old)
                shared.write(MB, seed=9)

        monkeypatch.setattr(reader, "_transfer", transfer_then_reuse)
        with pytest.raises(ReferenceLost, match="its slot was freed"):
            run(reader.read(old, everything(old)))
        assert len(halves) == 2


@needs_nixl
def test_a_slot_that_is_reused_all_the_time_gives_its_own_bytes_or_none() -> None:
    """One slot, written and freed as fast as possible while it is read: every payload is one repeated byte."""
    nbytes = 2 * MB
    refused = 0

    async def scenario(writer: ArenaWriter, reader: ArenaReader) -> int:
        nonlocal refused
        reader.add(writer.name, writer.metadata)
        whole = 0
        for byte in itertools.count():
            if whole >= 20 and refused >= 20:
                return whole
            reference = await writer.write([bytes([byte % 256]) * nbytes], nbytes)
            read = asyncio.ensure_future(reader.read_many([(reference, [(0, nbytes)])]))
            if byte % 2:
                await asyncio.sleep(0)
                writer.free(reference)
                reference = await writer.write([bytes([(byte + 128) % 256]) * nbytes], nbytes)
            (result,) = await read
            if isinstance(result, ReferenceLost):
                refused += 1
            else:
                whole += 1
                assert bytes(result[0]) == bytes([byte % 256]) * nbytes
            writer.free(reference)
        raise AssertionError

    with writing(nbytes + 256) as writer, reading() as reader:
        assert run(scenario(writer, reader)) >= 20


@needs_nixl
def test_a_producer_killed_before_the_first_read_is_lost_and_the_others_are_not(start: Any, shared: Producer) -> None:
    dead, alive = start(Producer, "dead"), shared.write(MB, seed=10)
    gone = dead.write(MB, seed=11)
    dead.kill()
    with reading(dead, shared) as reader:
        for _ in range(2):
            lost, fine = run(reader.read_many([(gone, [(0, MB)]), (alive, [(0, MB)])]))
            assert isinstance(lost, ReferenceLost)
            assert str(lost).startswith(f"payload of {MB} bytes at {dead.agent}: its producer is gone")
            assert fine == [random_bytes(MB, seed=10)]
            assert (reader.knows(dead.agent), reader.knows(shared.agent)) == (False, True)
    shared.free(alive)


@needs_nixl
def test_a_producer_killed_in_the_middle_of_reads_gives_whole_payloads_and_then_is_lost(
    start: Any, shared: Producer
) -> None:
    producer, alive = start(Producer), shared.write(MB, seed=12)
    nbytes = 32 * MB
    reference = producer.write(nbytes, seed=13)
    expected = xxhash.xxh3_64_intdigest(random_bytes(nbytes, seed=13))
    ranges = [(index * MB, MB) for index in range(32)]
    reads_are_running = threading.Event()

    def kill_it() -> None:
        reads_are_running.wait()
        producer.process.kill()

    async def scenario(reader: ArenaReader) -> int:
        for count in itertools.count():
            (result,) = await reader.read_many([(reference, ranges)])
            if isinstance(result, ReferenceLost):
                assert "its producer is gone" in str(result)
                assert (await reader.read(alive, [(0, MB)]))[0] == random_bytes(MB, seed=12)
                return count
            digest = xxhash.xxh3_64()
            for view in result:
                digest.update(view)
            assert digest.intdigest() == expected
            if count == 3:
                reads_are_running.set()
        raise AssertionError

    killer = threading.Thread(target=kill_it)
    killer.start()
    with reading(producer, shared) as reader:
        assert run(scenario(reader)) >= 4
    killer.join()
    shared.free(alive)


@needs_nixl
def test_a_producer_that_hangs_is_lost_at_the_deadline_and_costs_that_wait_only_once(
    start: Any, shared: Producer
) -> None:
    hung, alive = start(Producer), shared.write(MB, seed=14)
    reference = hung.write(MB, seed=15)
    os.kill(hung.process.pid, signal.SIGSTOP)
    with reading(hung, shared, timeout_s=1.0) as reader:
        began = time.monotonic()
        lost, fine = run(reader.read_many([(reference, [(0, MB)]), (alive, [(0, MB)])]))
        assert isinstance(lost, ReferenceLost)
        assert "no answer within 1 s" in str(lost)
        assert fine == [random_bytes(MB, seed=14)]
        assert time.monotonic() - began >= 1.0
        with pytest.raises(ReferenceLost, match="no answer within 1 s"):
            run(reader.read(reference, [(0, MB)]))
        # It lives again; what it was asked for must not land in memory that later reads use.
        os.kill(hung.process.pid, signal.SIGCONT)
        views = [run(reader.read(alive, [(0, MB)]))[0] for _ in range(20)]
        assert all(view == random_bytes(MB, seed=14) for view in views)
        reader.add(hung.agent, hung.metadata)
        assert run(reader.read(reference, [(0, MB)]))[0] == random_bytes(MB, seed=15)
    shared.free(alive)


@needs_nixl
def test_a_producer_that_closed_its_arena_is_lost(start: Any) -> None:
    producer = start(Producer)
    reference = producer.write(MB, seed=16)
    with reading(producer) as reader:
        run(reader.read(reference, [(0, MB)]))
        producer.pipe.send(("close",))
        producer.hear()
        with pytest.raises(ReferenceLost, match="its producer is gone"):
            run(reader.read(reference, [(0, MB)]))


@needs_nixl
def test_a_killed_reader_leaves_the_producer_as_it_was(start: Any, shared: Producer) -> None:
    reference = shared.write(16 * MB, seed=17)
    victim = start(Child, consume, shared.agent, shared.metadata, reference)
    victim.hear()
    victim.hear()  # it reads on and on
    victim.kill()
    with reading(shared) as reader:
        assert run(reader.read(reference, everything(reference)))[0] == random_bytes(16 * MB, seed=17)
    assert shared.free(reference)


@needs_nixl
def test_no_agent_makes_named_shared_memory_that_could_stay_behind(start: Any) -> None:
    producer = start(Producer)
    reference = producer.write(MB, seed=22)
    with reading(producer) as reader:
        run(reader.read(reference, everything(reference)))
        for process in (producer.process.pid, os.getpid()):
            maps = Path(f"/proc/{process}/maps").read_text()
            assert [line for line in maps.splitlines() if "ucx_shm" in line or "SYSV" in line] == []


@needs_nixl
def test_agents_listen_on_the_loopback_interface_only(shared: Producer) -> None:
    folder = Path(f"/proc/{shared.process.pid}")
    own = {os.readlink(descriptor) for descriptor in (folder / "fd").iterdir()}
    rows = [row.split() for name in ("tcp", "tcp6") for row in (folder / "net" / name).read_text().splitlines()[1:]]
    listening = {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}
    assert listening == {"0100007F"}  # 127.0.0.1, little end first


@needs_nixl
def test_the_environment_and_the_logging_of_the_process_stay_as_they_were() -> None:
    before = dict(os.environ), logging.raiseExceptions
    with writing(MB), reading():
        assert (dict(os.environ), logging.raiseExceptions) == before


@needs_nixl
def test_a_process_with_an_agent_still_ends_when_its_terminal_does(start: Any) -> None:
    producer = start(Producer)
    os.kill(producer.process.pid, signal.SIGHUP)
    producer.process.join(30)
    assert producer.process.exitcode == -signal.SIGHUP
