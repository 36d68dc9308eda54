"""The journal of an orderly life: append, roll, recycle, make durable, read back, replay."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import streamrl.buffers.journal.writer as journal_module
from streamrl.buffers.journal.writer import Fsync, Journal, JournalError, Position, Recovery, read_journal
from streamrl.errors import StreamRLError

Opened = tuple[Journal, Recovery]


def start(
    folder: Path,
    *,
    snapshot: Callable[[], bytes] = lambda: b"state",
    segment_bytes: int = 1 << 20,
    fsync: Fsync = Fsync.NEVER,
    interval_s: float = 0.001,
    keep_all: bool = False,
) -> Opened:
    return Journal.open(
        folder,
        segment_bytes=segment_bytes,
        fsync=fsync,
        interval_s=interval_s,
        keep_all=keep_all,
        snapshot=snapshot,
    )


def bodies(recovery: Recovery) -> list[bytes]:
    return [body for _, body, _ in recovery.records]


def segments(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.journal"))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# Records --------------------------------------------------------------------------------------------------------------


def test_a_new_journal_has_nothing_to_recover(tmp_path: Path) -> None:
    journal, recovery = start(tmp_path / "deep" / "journal")
    journal.close()
    assert (recovery.snapshot, recovery.records, recovery.cut) == (None, [], [])


def test_records_come_back_after_their_snapshot_in_the_order_of_appending(tmp_path: Path) -> None:
    journal, _ = start(tmp_path, snapshot=lambda: b"nothing yet")
    tokens = np.arange(1000, dtype=np.int32)
    first = journal.append(b"one", [tokens.view(np.uint8).data, b"", b"tail"])
    second = journal.append(b"two")
    journal.close()
    journal, recovery = start(tmp_path)
    journal.close()
    assert recovery.snapshot == b"nothing yet"
    assert recovery.records == [(first, b"one", tokens.tobytes() + b"tail"), (second, b"two", b"")]
    assert first < second


def test_payloads_are_aligned_read_only_views(tmp_path: Path) -> None:
    journal, _ = start(tmp_path)
    for length in (1, 31, 32, 33, 64):
        journal.append(b"b" * length, [bytes(length)])
    journal.close()
    journal, recovery = start(tmp_path)
    journal.close()
    for _, _, payload in recovery.records:
        assert payload.readonly
        assert np.frombuffer(payload, np.uint8).ctypes.data % 64 == 0


def test_frames_of_other_item_sizes_are_written_as_their_bytes(tmp_path: Path) -> None:
    journal, _ = start(tmp_path)
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    position = journal.append(b"", [memoryview(array), memoryview(np.zeros((0, 3)))])
    assert journal.read(position) == (b"", array.tobytes())
    journal.close()


def test_more_frames_than_one_system_call_takes_are_one_record(tmp_path: Path) -> None:
    frames = [index.to_bytes(4, "little") for index in range(3 * os.sysconf("SC_IOV_MAX"))]
    journal, _ = start(tmp_path)
    position = journal.append(b"body", frames)
    assert journal.read(position) == (b"body", b"".join(frames))
    journal.close()


def test_a_write_that_the_kernel_takes_in_parts_is_one_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev

    def few_bytes(fd: int, buffers: list[memoryview], offset: int) -> int:
        return real(fd, [buffers[0][:7]], offset)

    monkeypatch.setattr(os, "pwritev", few_bytes)
    frames = [b"a" * 7, b"b" * 8, b"c" * 20, b"d"]
    journal, _ = start(tmp_path)
    position = journal.append(b"body", frames)
    assert journal.read(position) == (b"body", b"".join(frames))
    journal.close()


def test_reading_where_no_record_starts_is_refused(tmp_path: Path) -> None:
    journal, _ = start(tmp_path)
    position = journal.append(b"body", [bytes(200)])
    for wrong in (Position(1, position.offset + 64), Position(1, position.offset + 1), Position(1, 1 << 40)):
        with pytest.raises(JournalError, match=f"record at {wrong.offset} is damaged or missing"):
            journal.read(wrong)
    with pytest.raises(JournalError, match=r"0000000009\.journal: cannot read this segment"):
        journal.read(Position(9, 64))
    journal.close()


def test_views_of_the_segment_that_is_written_hold_no_descriptors(tmp_path: Path) -> None:
    journal, _ = start(tmp_path)
    before = descriptors()
    read = [journal.read(journal.append(b"%d" % index, [bytes([index])])) for index in range(20)]
    assert descriptors() == before + 1, "only the segment itself is open"
    assert read == [(b"%d" % index, bytes([index])) for index in range(20)]
    journal.close()


# Segments -------------------------------------------------------------------------------------------------------------


def test_a_segment_rolls_when_it_would_pass_its_bytes_and_starts_with_the_state_before_the_record(
    tmp_path: Path,
) -> None:
    state: list[str] = []
    journal, _ = start(tmp_path, segment_bytes=256, snapshot=lambda: " ".join(state).encode())
    positions = []
    for index in range(5):
        # A record of 32 header bytes, 1 body byte and 64 payload bytes takes 64 + 64 = 128: two fit in 256.
        positions.append(journal.append(b"%d" % index, [bytes(64)]))
        state.append(str(index))
    journal.close()
    journal, recovery = start(tmp_path)
    journal.close()
    assert [position.segment for position in positions] == [1, 1, 2, 2, 3]
    assert (recovery.snapshot, bodies(recovery)) == (b"0 1 2 3", [b"4"])


def test_a_record_larger_than_a_segment_gets_one_of_its_own(tmp_path: Path) -> None:
    journal, _ = start(tmp_path, segment_bytes=256)
    sizes = (10, 5000, 10, 10)
    assert [journal.append(b"", [bytes(size)]).segment for size in sizes] == [1, 2, 3, 3]
    journal.close()


def test_a_large_snapshot_does_not_make_every_record_roll(tmp_path: Path) -> None:
    journal, _ = start(tmp_path, segment_bytes=1024, snapshot=lambda: bytes(5000))
    assert [journal.append(b"", [bytes(64)]).segment for _ in range(8)] == [1] * 8
    journal.close()


def test_every_opening_continues_in_a_new_segment_and_old_positions_stay_valid(tmp_path: Path) -> None:
    positions = []
    for index in range(3):
        journal, _ = start(tmp_path)
        positions.append(journal.append(b"%d" % index, [bytes([index]) * 100]))
        journal.close()
    journal, _ = start(tmp_path)
    found = [journal.read(position) for position in positions]
    journal.close()
    assert found == [(b"%d" % index, bytes([index]) * 100) for index in range(3)]


def test_recycling_deletes_only_segments_before_the_needed_payload(tmp_path: Path) -> None:
    journal, _ = start(tmp_path, segment_bytes=128)
    positions = [journal.append(b"%d" % index, [bytes(64)]) for index in range(5)]
    assert journal.recycle(positions[2]) == 2
    assert journal.recycle(positions[2]) == 0
    assert journal.read(positions[2])[0] == b"2"
    journal.close()
    assert segments(tmp_path) == [f"000000000{number}.journal" for number in (3, 4, 5)]


def test_recycling_never_deletes_the_newest_snapshot(tmp_path: Path) -> None:
    journal, _ = start(tmp_path, segment_bytes=128)
    for index in range(3):
        journal.append(b"%d" % index, [bytes(64)])
    assert journal.recycle(None) == 2
    journal.close()
    journal, recovery = start(tmp_path)
    assert journal.recycle(None) == 0
    journal.close()
    assert (recovery.snapshot, bodies(recovery)) == (b"state", [b"2"])


def test_recycling_waits_until_the_newer_snapshot_is_on_the_disk(tmp_path: Path) -> None:
    journal, _ = start(tmp_path, segment_bytes=128, fsync=Fsync.INTERVAL)
    positions = [journal.append(b"%d" % index, [bytes(64)]) for index in range(3)]
    assert journal.recycle(None) == journal.recycle(positions[2]) == 0
    journal.flush()
    assert journal.recycle(None) == 2
    journal.close()


def test_a_view_outlives_the_recycled_segment_and_the_journal(tmp_path: Path) -> None:
    journal, _ = start(tmp_path, segment_bytes=128)
    position = journal.append(b"", [b"kept" * 16])
    journal.append(b"", [bytes(64)])
    _, payload = journal.read(position)
    journal.recycle(None)
    journal.close()
    assert segments(tmp_path) == ["0000000002.journal"]
    assert payload == b"kept" * 16


def test_keep_all_keeps_everything(tmp_path: Path) -> None:
    journal, _ = start(tmp_path, segment_bytes=128, keep_all=True)
    for index in range(4):
        journal.append(b"%d" % index, [bytes(64)])
    assert journal.recycle(None) == 0
    journal.close()
    assert len(segments(tmp_path)) == 4


def test_statistics_add_up_to_the_files(tmp_path: Path) -> None:
    journal, _ = start(tmp_path, segment_bytes=128, fsync=Fsync.INTERVAL)
    for _ in range(3):
        journal.append(b"", [bytes(64)])
    before = journal.statistics()
    journal.flush()
    after = journal.statistics()
    journal.recycle(None)
    left = journal.statistics()
    journal.close()
    # Header 64, snapshot of 5 bytes in 64, record with 64 bytes of payload in 128.
    assert before["journal/bytes"] == before["journal/unsynced_bytes"] == before["journal/disk_bytes"] == 3 * 256
    assert (before["journal/segments"], before["journal/fsyncs"]) == (3, 0)
    # Three files and the folder that names them.
    assert (after["journal/unsynced_bytes"], after["journal/fsyncs"]) == (0, 4)
    assert after["journal/fsync_s"] > 0
    assert (left["journal/segments"], left["journal/disk_bytes"], left["journal/bytes"]) == (1, 256, 768)
    assert sum(path.stat().st_size for path in tmp_path.glob("*.journal")) == 256


# One writer, and what may lie in the folder ---------------------------------------------------------------------------


def test_a_second_writer_is_refused_and_told_who_the_first_is(tmp_path: Path) -> None:
    journal, _ = start(tmp_path)
    with pytest.raises(JournalError, match=f"process {os.getpid()} is writing this journal") as refused:
        start(tmp_path)
    assert "\n" not in str(refused.value)
    assert isinstance(refused.value, StreamRLError)
    journal.close()
    again, _ = start(tmp_path)
    again.close()


def test_another_format_is_refused(tmp_path: Path) -> None:
    journal, _ = start(tmp_path)
    journal.append(b"")
    journal.close()
    with (tmp_path / "0000000001.journal").open("r+b") as file:
        file.seek(8)
        file.write(b"\x02")
    with pytest.raises(JournalError, match="expected journal format 1, got 2"):
        start(tmp_path)


@pytest.mark.parametrize("name", ["notes.txt", "1.journal", "0000000000.journal", "x.new", "0000000001.journal.bak"])
def test_foreign_files_are_refused_and_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(JournalError, match=f"{name}: expected only the journal's own files"):
        start(tmp_path)
    assert (tmp_path / name).read_text() == "mine"


def test_a_file_that_only_has_the_name_of_a_segment_is_refused(tmp_path: Path) -> None:
    (tmp_path / "0000000001.journal").write_bytes(b"x" * 100)
    with pytest.raises(JournalError, match="expected a journal segment, got something else"):
        start(tmp_path)


def test_a_folder_that_cannot_be_made_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match=r"cannot keep a journal here: .* \(errno \d+\); choose another folder"):
        start(tmp_path / "file" / "journal")


def test_a_refused_opening_lets_go_of_the_folder(tmp_path: Path) -> None:
    before = descriptors()
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(JournalError):
        start(tmp_path)
    assert descriptors() == before


def test_a_closed_journal_takes_nothing_and_closes_again(tmp_path: Path) -> None:
    journal, _ = start(tmp_path)
    journal.close()
    journal.close()
    with pytest.raises(JournalError, match="this journal is closed"):
        journal.append(b"")


@pytest.mark.parametrize("fsync", list(Fsync))
def test_no_descriptor_is_left_behind(tmp_path: Path, fsync: Fsync) -> None:
    before = descriptors()
    for _ in range(3):
        journal, recovery = start(tmp_path, segment_bytes=128, fsync=fsync)
        positions = [journal.append(b"", [bytes(64)]) for _ in range(6)]
        read = [journal.read(position) for position in positions]
        journal.flush()
        journal.recycle(positions[3])
        journal.append(b"", [bytes(64)])
        journal.close()
        del recovery, read
    assert descriptors() == before


# Durability -----------------------------------------------------------------------------------------------------------


class Gate:
    """A real ``fdatasync`` that begins and waits until it is let through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Semaphore(0)
        self.open = threading.Semaphore(0)
        self.threads: list[int] = []
        self._real = os.fdatasync
        monkeypatch.setattr(os, "fdatasync", self)

    def __call__(self, fd: int) -> None:
        self.threads.append(threading.get_ident())
        self.begun.release()
        assert self.open.acquire(timeout=20), "this fsync was never let through"
        self._real(fd)

    async def wait(self) -> None:
        assert await asyncio.to_thread(self.begun.acquire, timeout=20), "no fsync began"


def test_waiters_share_the_fsyncs_which_run_off_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    journal, _ = start(tmp_path, fsync=Fsync.ALWAYS)

    async def put(index: int) -> None:
        await journal.durable(journal.append(b"%d" % index))

    async def main() -> None:
        puts = [asyncio.create_task(put(index)) for index in range(20)]
        await gate.wait()
        # The first fsync began with the first record alone; none of the 20 is acknowledged while it lasts.
        assert not any(task.done() for task in puts)
        gate.open.release()
        await gate.wait()
        gate.open.release()
        await asyncio.gather(*puts)

    asyncio.run(main())
    assert len(gate.threads) == 2
    assert threading.get_ident() not in gate.threads
    assert journal.statistics()["journal/unsynced_bytes"] == 0
    journal.close()


def test_a_waiter_that_is_cancelled_leaves_the_others_their_fsync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    journal, _ = start(tmp_path, fsync=Fsync.ALWAYS)

    async def main() -> None:
        position = journal.append(b"")
        impatient = asyncio.create_task(journal.durable(position))
        patient = asyncio.create_task(journal.durable(position))
        await gate.wait()
        impatient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await impatient
        gate.open.release()
        await patient

    asyncio.run(main())
    assert len(gate.threads) == 1
    journal.close()


def test_a_waiter_that_is_cancelled_before_the_fsync_begins_leaves_the_others_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, _ = start(tmp_path, fsync=Fsync.ALWAYS)
    go_on = threading.Event()
    journal._forcing.submit(go_on.wait, 20)  # The thread is busy: the fsync stays in its queue.

    async def main() -> None:
        position = journal.append(b"")
        impatient = asyncio.create_task(journal.durable(position))
        patient = asyncio.create_task(journal.durable(position))
        await asyncio.sleep(0)
        impatient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await impatient
        go_on.set()
        await patient

    asyncio.run(main())
    assert journal.statistics()["journal/unsynced_bytes"] == 0
    journal.close()


def test_a_record_behind_a_roll_is_durable_only_with_all_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []

    def noting(real: Callable[[int], None]) -> Callable[[int], None]:
        def sync(fd: int) -> None:
            synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
            real(fd)

        return sync

    journal, _ = start(tmp_path / "journal", fsync=Fsync.ALWAYS, segment_bytes=128)
    monkeypatch.setattr(os, "fdatasync", noting(os.fdatasync))
    monkeypatch.setattr(os, "fsync", noting(os.fsync))
    positions = [journal.append(b"", [bytes(64)]) for _ in range(3)]
    asyncio.run(journal.durable(positions[-1]))
    asyncio.run(journal.durable(positions[0]))
    journal.close()
    assert synced == ["0000000001.journal", "0000000002.journal", "0000000003.journal", "journal"]


def test_under_always_the_loop_forces_records_that_nobody_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    journal, _ = start(tmp_path, fsync=Fsync.ALWAYS)

    async def main() -> None:
        running = asyncio.create_task(journal.run())
        journal.append(b"")
        await gate.wait()
        gate.open.release()
        running.cancel()

    asyncio.run(main())
    journal.close()
    assert journal.statistics()["journal/unsynced_bytes"] == 0
    assert len(gate.threads) == 1


@pytest.mark.parametrize("fsync", [Fsync.INTERVAL, Fsync.NEVER])
def test_without_always_an_acknowledgement_waits_for_no_fsync(tmp_path: Path, fsync: Fsync) -> None:
    journal, _ = start(tmp_path, fsync=fsync)
    asyncio.run(journal.durable(journal.append(b"")))
    assert journal.statistics()["journal/fsyncs"] == 0
    journal.close()


def test_the_interval_runs_only_while_something_is_unsynced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pause = asyncio.sleep
    naps: list[float] = []
    gate = Gate(monkeypatch)
    journal, _ = start(tmp_path, fsync=Fsync.INTERVAL, interval_s=0.003)

    async def counted(seconds: float) -> None:
        naps.append(seconds)
        await pause(seconds)

    async def idle() -> None:
        for _ in range(50):
            await pause(0)

    async def main() -> None:
        monkeypatch.setattr(journal_module.asyncio, "sleep", counted)
        running = asyncio.create_task(journal.run())
        await idle()
        assert naps == []
        for burst in (1, 2):
            for _ in range(10):
                journal.append(b"")
            await gate.wait()
            gate.open.release()
            journal.flush()  # Joins the fsync that is under way.
            await idle()
            assert naps == [0.003] * burst
            assert len(gate.threads) == burst
            assert journal.statistics()["journal/unsynced_bytes"] == 0
        running.cancel()

    asyncio.run(main())
    journal.close()


def test_closing_flushes_unless_the_policy_is_never(tmp_path: Path) -> None:
    for fsync, unsynced in ((Fsync.INTERVAL, False), (Fsync.ALWAYS, False), (Fsync.NEVER, True)):
        journal, _ = start(tmp_path, fsync=fsync)
        journal.append(b"")
        journal.close()
        assert bool(journal.statistics()["journal/unsynced_bytes"]) is unsynced


# Replay ---------------------------------------------------------------------------------------------------------------


def test_a_replay_sees_every_record_of_every_life_and_changes_nothing(tmp_path: Path) -> None:
    appended = []
    for life in range(3):
        journal, _ = start(tmp_path, segment_bytes=300, keep_all=True)
        for index in range(7):
            body, payload = b"%d.%d" % (life, index), bytes([index]) * 50
            appended.append((journal.append(body, [payload]), body, payload))
        journal.recycle(None)
        journal.close()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert list(read_journal(tmp_path)) == appended
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_replay_reads_beside_a_live_writer(tmp_path: Path) -> None:
    journal, _ = start(tmp_path)
    journal.append(b"one")
    assert [body for _, body, _ in read_journal(tmp_path)] == [b"one"]
    journal.append(b"two")
    assert [body for _, body, _ in read_journal(tmp_path)] == [b"one", b"two"]
    journal.close()


def test_a_replay_of_a_recycled_journal_is_refused(tmp_path: Path) -> None:
    journal, _ = start(tmp_path, segment_bytes=128)
    for _ in range(3):
        journal.append(b"", [bytes(64)])
    journal.recycle(None)
    journal.close()
    with pytest.raises(JournalError, match=r"0000000002\.journal is missing, recycled .* buffer\.keep=all"):
        list(read_journal(tmp_path))


@pytest.mark.parametrize("folder", ["", "missing"])
def test_a_replay_of_no_journal_is_refused(tmp_path: Path, folder: str) -> None:
    with pytest.raises(JournalError, match="there is no journal here"):
        list(read_journal(tmp_path / folder))


# Any life at all ------------------------------------------------------------------------------------------------------

APPEND = st.tuples(st.just("append"), st.integers(0, 90), st.lists(st.integers(0, 200), max_size=3))
RECYCLE = st.tuples(st.just("recycle"), st.integers(0, 5), st.just([]))
REOPEN = st.tuples(st.just("reopen"), st.just(0), st.just([]))
TEAR = st.tuples(st.just("tear"), st.integers(1, 500), st.just([]))


class Life:
    """A writer that keeps the numbers and positions of all it appended, and the model that it must agree with."""

    def __init__(self, folder: Path, keep_all: bool, segment_bytes: int) -> None:
        self.folder = folder
        self.arguments = {"keep_all": keep_all, "segment_bytes": segment_bytes}
        self.state: list[tuple[int, Position]] = []
        self.expected: list[tuple[Position, bytes, bytes]] = []
        self.end = 0
        """Bytes of the newest file when the last record in it was whole."""
        self.next = 0
        self.needed = 0
        self.journal, _ = self.open()

    def open(self) -> Opened:
        return start(self.folder, snapshot=lambda: msgspec.msgpack.encode(self.state), **self.arguments)

    def append(self, padding: int, sizes: list[int]) -> None:
        body = msgspec.msgpack.encode((self.next, bytes(padding)))
        payload = [bytes([self.next % 256]) * size for size in sizes]
        position = self.journal.append(body, payload)
        self.state.append((self.next, position))
        self.expected.append((position, body, b"".join(payload)))
        self.end = self.newest().stat().st_size
        self.next += 1

    def newest(self) -> Path:
        return self.folder / segments(self.folder)[-1]

    def recycle(self, needed: int) -> None:
        self.needed = max(self.needed, len(self.state) - needed)
        oldest = self.state[self.needed][1] if self.needed < len(self.state) else None
        self.journal.recycle(oldest)

    def reopen(self, torn: int) -> None:
        """Restore from the files, of which the newest lost up to ``torn`` bytes of what was appended last."""
        self.journal.close()
        last = self.expected[-1][0] if self.expected else None
        if torn and last and self.newest().stem == f"{last.segment:010d}":
            size = max(last.offset, self.newest().stat().st_size - torn)
            os.truncate(self.newest(), size)
            if size < self.end:
                self.expected.pop()
                self.end = last.offset
                self.needed = min(self.needed, len(self.expected))
        self.state = []
        self.journal, recovery = self.open()
        if recovery.snapshot:
            self.state = msgspec.msgpack.decode(recovery.snapshot, type=list[tuple[int, Position]])
        self.state += [(msgspec.msgpack.decode(body)[0], position) for position, body, _ in recovery.records]
        assert self.state == [(msgspec.msgpack.decode(body)[0], position) for position, body, _ in self.expected]
        for position, body, payload in self.expected[self.needed :]:
            assert self.journal.read(position) == (body, payload)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(APPEND | APPEND | RECYCLE | REOPEN | TEAR, max_size=30), st.booleans(), st.sampled_from([1, 400, 1500]))
def test_any_life_of_a_journal_ends_with_the_same_records(
    tmp_path_factory: pytest.TempPathFactory,
    events: list[tuple[str, int, list[int]]],
    keep_all: bool,
    segment_bytes: int,
) -> None:
    life = Life(tmp_path_factory.mktemp("journal"), keep_all, segment_bytes)
    try:
        for event, number, sizes in events:
            if event == "append":
                life.append(number, sizes)
            elif event == "recycle":
                life.recycle(number)
            else:
                life.reopen(number)
        life.reopen(0)
    finally:
        life.journal.close()
    if keep_all and segments(life.folder):
        assert list(read_journal(life.folder)) == life.expected
