"""The journal when things go wrong: killed at any byte, damaged bytes, a full disk, an fsync that fails.

Run as a program, this file is the writer process that some of the tests kill or starve of disk space.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from streamrl.buffers.journal.segment import HEADER_BYTES
from streamrl.buffers.journal.writer import Fsync, Journal, JournalError, Position, Recovery, read_journal

Opened = tuple[Journal, Recovery]


def start(
    folder: Path, *, segment_bytes: int = 1 << 20, fsync: Fsync = Fsync.NEVER, snapshot: bytes = b"state"
) -> Opened:
    return Journal.open(
        folder,
        segment_bytes=segment_bytes,
        fsync=fsync,
        interval_s=0.001,
        keep_all=True,
        snapshot=lambda: snapshot,
    )


def recover(folder: Path) -> Recovery:
    journal, recovery = start(folder)
    journal.close()
    return recovery


def write(folder: Path, count: int, *, snapshot: bytes = b"state") -> list[tuple[Position, bytes, bytes]]:
    """One more segment with ``count`` records of 128 bytes each: header and body up to 64, payload of 33 up to 64."""
    journal, _ = start(folder, snapshot=snapshot)
    number = len(list(folder.glob("*.journal"))) + 1
    records = []
    for index in range(count):
        body, payload = b"%d.%d" % (number, index), bytes([65 + index]) * 33
        records.append((journal.append(body, [payload]), body, payload))
    journal.close()
    return records


def newest(folder: Path) -> Path:
    return sorted(folder.glob("*.journal"))[-1]


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ (1 << bit)]))


def copies(folder: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(folder, target))


# Torn at any byte -----------------------------------------------------------------------------------------------------


def test_a_torn_tail_is_cut_and_reported_whatever_its_last_byte_is(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", 4)
    size = newest(tmp_path / "whole").stat().st_size
    start_of_last_two = whole[2][0].offset
    assert size - start_of_last_two == 2 * 128
    for length in range(start_of_last_two, size + 1):
        folder = copies(tmp_path / "whole", tmp_path / "torn")
        os.truncate(newest(folder), length)
        kept = 2 + (length - start_of_last_two) // 128
        torn = (length - start_of_last_two) % 128
        recovery = recover(folder)
        assert recovery.records == whole[:kept]
        assert recovery.snapshot == b"state"
        cut = [(part.segment, part.offset, part.nbytes, part.reason) for part in recovery.cut]
        assert cut == ([("0000000001.journal", length - torn, torn, "torn")] if torn else [])
        assert list(read_journal(folder)) == whole[:kept]


def test_the_journal_goes_on_behind_a_torn_tail_and_a_replay_skips_it(tmp_path: Path) -> None:
    first = write(tmp_path, 3)
    os.truncate(newest(tmp_path), first[2][0].offset + 50)
    second = write(tmp_path, 3)
    os.truncate(newest(tmp_path), second[1][0].offset + 1)
    third = write(tmp_path, 1)
    assert recover(tmp_path).cut == []
    assert list(read_journal(tmp_path)) == first[:2] + second[:1] + third


def test_a_segment_without_a_whole_snapshot_falls_back_to_the_segment_before_it(tmp_path: Path) -> None:
    first = write(tmp_path / "whole", 2, snapshot=b"first")
    journal, _ = start(tmp_path / "whole", snapshot=b"second")
    second = journal.append(b"2")
    journal.close()
    for length in range(second.offset):
        folder = copies(tmp_path / "whole", tmp_path / "torn")
        os.truncate(newest(folder), length)
        recovery = recover(folder)
        assert (recovery.snapshot, recovery.records) == (b"first", first)
        assert [(part.segment, part.reason) for part in recovery.cut] == [("0000000002.journal", "torn")]
        assert list(read_journal(folder)) == first


def test_zeros_in_place_of_a_tail_that_never_reached_the_disk_are_torn(tmp_path: Path) -> None:
    records = write(tmp_path, 3)
    path = newest(tmp_path)
    size = path.stat().st_size
    os.truncate(path, records[1][0].offset + 10)
    os.truncate(path, size)
    recovery = recover(tmp_path)
    assert recovery.records == records[:1]
    assert [(part.nbytes, part.reason) for part in recovery.cut] == [(256, "torn")]


def test_a_segment_that_was_being_made_leaves_no_trace(tmp_path: Path) -> None:
    records = write(tmp_path, 2)
    (tmp_path / "0000000002.new").write_bytes(b"half a header")
    assert recover(tmp_path).records == records
    assert not (tmp_path / "0000000002.new").exists()


def test_a_first_segment_that_never_reached_the_disk_is_a_new_journal(tmp_path: Path) -> None:
    write(tmp_path, 1)
    os.truncate(newest(tmp_path), HEADER_BYTES + 5)
    recovery = recover(tmp_path)
    assert (recovery.snapshot, recovery.records) == (None, [])
    assert [part.reason for part in recovery.cut] == ["torn"]
    records = write(tmp_path, 2)
    assert list(read_journal(tmp_path)) == records


# Damaged --------------------------------------------------------------------------------------------------------------


def test_a_flipped_bit_in_any_byte_of_a_record_cuts_there_and_says_what_is_lost(tmp_path: Path) -> None:
    records = write(tmp_path, 4)
    path = newest(tmp_path)
    position = records[1][0]
    for offset in range(position.offset, position.offset + 128):
        bit = offset % 8
        flip(path, offset, bit)
        recovery = recover(tmp_path)
        assert recovery.records == records[:1]
        (cut,) = recovery.cut
        assert (cut.offset, cut.nbytes, cut.reason, cut.intact) == (position.offset, 3 * 128, "corrupt", 2)
        with pytest.raises(JournalError, match="damaged, the replay would not be the run that was"):
            list(read_journal(tmp_path))
        flip(path, offset, bit)
    assert recover(tmp_path).records == records


def test_the_report_of_damage_is_one_line_with_the_place_and_the_loss(tmp_path: Path) -> None:
    records = write(tmp_path, 3)
    flip(newest(tmp_path), records[0][0].offset + 40)
    (cut,) = recover(tmp_path).cut
    assert str(cut) == (
        "journal 0000000001.journal: cut 384 bytes from 128 on, corrupt: with 2 intact records behind the damage"
    )


def test_a_flipped_bit_in_any_byte_of_an_older_record_is_never_read(tmp_path: Path) -> None:
    records = write(tmp_path, 3)
    path = newest(tmp_path)
    write(tmp_path, 1)
    position = records[1][0]
    for offset in range(position.offset, position.offset + 128):
        flip(path, offset)
        journal, _ = start(tmp_path)
        with pytest.raises(JournalError, match=f"record at {position.offset} is damaged or missing"):
            journal.read(position)
        assert journal.read(records[2][0]) == records[2][1:]
        journal.close()
        with pytest.raises(JournalError, match="damaged, the replay cannot go on"):
            list(read_journal(tmp_path))
        flip(path, offset)


def test_a_flipped_bit_in_any_byte_of_header_or_snapshot_is_never_taken_for_good(tmp_path: Path) -> None:
    first = write(tmp_path, 1, snapshot=b"first")
    second = write(tmp_path, 2, snapshot=b"second")
    path = newest(tmp_path)
    for offset in range(second[0][0].offset):
        flip(path, offset)
        if offset < 16:  # Magic and format: this may be no segment of ours at all.
            with pytest.raises(JournalError, match="expected"):
                start(tmp_path)
        else:
            recovery = recover(tmp_path)
            assert (recovery.snapshot, recovery.records) == (b"first", first)
            assert [(part.segment, part.reason) for part in recovery.cut] == [("0000000002.journal", "corrupt")]
        flip(path, offset)
    assert recover(tmp_path).records == second


def test_a_journal_whose_only_snapshot_is_damaged_is_refused_in_one_line(tmp_path: Path) -> None:
    write(tmp_path, 2)
    flip(newest(tmp_path), HEADER_BYTES + 33)
    with pytest.raises(JournalError, match="has a whole snapshot.*move the folder away") as refused:
        start(tmp_path)
    assert "\n" not in str(refused.value)


def test_a_record_at_another_place_does_not_pass_for_one(tmp_path: Path) -> None:
    records = write(tmp_path, 3)
    path = newest(tmp_path)
    content = bytearray(path.read_bytes())
    one, two = records[1][0].offset, records[2][0].offset
    content[two : two + 128] = content[one:two]
    path.write_bytes(content)
    recovery = recover(tmp_path)
    assert recovery.records == records[:2]
    assert [part.reason for part in recovery.cut] == ["torn"]


# Killed ---------------------------------------------------------------------------------------------------------------


class Groups:
    """State of the writer process: numbers of all groups so far, and where those lie that are not consumed yet."""

    def __init__(self, folder: Path) -> None:
        self.seen: list[int] = []
        self.places: dict[int, Position] = {}
        self.journal, recovery = Journal.open(
            folder,
            segment_bytes=5 << 20,
            fsync=Fsync.INTERVAL,
            interval_s=0.001,
            keep_all=False,
            snapshot=lambda: msgspec.msgpack.encode((self.seen, self.places)),
        )
        self.cut = recovery.cut
        if recovery.snapshot:
            self.seen, self.places = msgspec.msgpack.decode(
                recovery.snapshot, type=tuple[list[int], dict[int, Position]]
            )
        for position, body, _ in recovery.records:
            self.apply(msgspec.msgpack.decode(body), position)

    def apply(self, number: int, position: Position) -> None:
        self.seen.append(number)
        self.places[number] = position
        self.places.pop(number - 5, None)

    def put(self, number: int) -> None:
        position = self.journal.append(msgspec.msgpack.encode(number), [payload_of(number)])
        self.apply(number, position)
        self.journal.recycle(min(self.places.values()))


def payload_of(number: int) -> bytes:
    """Large and cheap to make: the kill is to find the process inside of a write."""
    return (b"%016d" % number) * (50_000 + number * 7919 % 50_000)


def write_until_killed(folder: Path) -> None:
    """Report each number once its append has returned; the pipe's reader kills this process when it likes."""

    async def main() -> None:
        groups = Groups(folder)
        running = asyncio.create_task(groups.journal.run())
        number = len(groups.seen)
        while not running.done():
            groups.put(number)
            os.write(1, b"%d\n" % number)
            number += 1
            await asyncio.sleep(0)
        await running

    asyncio.run(main())


def write_until_killed_inside_a_write(folder: Path, appends: int, nbytes: int) -> None:
    """Report ``appends`` records; the kill comes when the kernel has taken ``nbytes`` of the next one."""
    groups = Groups(folder)
    first = len(groups.seen)
    for number in range(first, first + appends):
        groups.put(number)
        os.write(1, b"%d\n" % number)
    real = os.pwritev

    def killed(fd: int, buffers: list[memoryview], offset: int) -> int:
        real(fd, [b"".join(buffers)[:nbytes]], offset)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("a killed process goes on")

    os.pwritev = killed
    groups.put(first + appends)


def writer(what: str, folder: Path, *numbers: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, what, str(folder), *map(str, numbers)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_writer_killed_in_mid_stream_loses_no_record_that_it_reported(tmp_path: Path) -> None:
    reported: list[int] = []
    for life in range(6):
        with writer("until-killed", tmp_path) as process:
            assert process.stdout is not None
            reported += [int(process.stdout.readline()) for _ in range(11 + 3 * life)]
            process.send_signal(signal.SIGKILL)
            reported += [int(line) for line in process.stdout if line.endswith("\n")]
        assert process.returncode == -signal.SIGKILL
        groups = Groups(tmp_path)
        # Exactly once each; the last append may have been whole without its report.
        assert groups.seen == list(range(len(groups.seen)))
        assert len(groups.seen) - 1 in (reported[-1], reported[-1] + 1)
        assert all(part.reason == "torn" for part in groups.cut)
        assert sorted(groups.places) == groups.seen[-5:]
        for number, position in groups.places.items():
            body, payload = groups.journal.read(position)
            assert (msgspec.msgpack.decode(body), payload) == (number, payload_of(number))
        groups.journal.close()
        reported = groups.seen
    assert not (tmp_path / "0000000001.journal").exists(), "the first segment was to be recycled meanwhile"


@pytest.mark.parametrize("nbytes", [1, 31, 32, 33, 63, 64, 100_000, 800_000])
def test_a_writer_killed_inside_a_write_loses_that_record_alone(tmp_path: Path, nbytes: int) -> None:
    seen: list[int] = []
    for appends in (2, 1):
        with writer("inside-a-write", tmp_path, appends, nbytes) as process:
            reported, _ = process.communicate()
        assert process.returncode == -signal.SIGKILL
        seen += [int(line) for line in reported.split()]
        groups = Groups(tmp_path)
        groups.journal.close()
        assert groups.seen == seen == list(range(len(seen)))
        assert [(part.nbytes, part.reason) for part in groups.cut] == [(nbytes, "torn")]


# No room --------------------------------------------------------------------------------------------------------------


def test_a_disk_that_fills_up_in_mid_record_leaves_the_journal_whole_and_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, _ = start(tmp_path)
    first = journal.append(b"before", [bytes(1000)])
    size = newest(tmp_path).stat().st_size
    real = os.pwritev
    calls = []

    def fills_up(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) == 1:
            return real(fd, [b"".join(buffers)[:500]], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", fills_up)
    with pytest.raises(JournalError, match=r"No space left on device \(errno 28\); nothing of it is kept") as refused:
        journal.append(b"lost", [bytes(1000)])
    assert "\n" not in str(refused.value)
    assert calls == [size, size + 500]
    assert newest(tmp_path).stat().st_size == size
    monkeypatch.undo()
    second = journal.append(b"after")
    journal.close()
    assert [(position, body) for position, body, _ in recover(tmp_path).records] == [
        (first, b"before"),
        (second, b"after"),
    ]


def test_no_room_for_a_new_segment_leaves_the_old_one_active(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, _ = start(tmp_path, segment_bytes=128)
    journal.append(b"one", [bytes(64)])
    before = sorted(path.name for path in tmp_path.iterdir())
    descriptors = len(os.listdir("/proc/self/fd"))

    def full(fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(JournalError, match=r"0000000002\.journal: cannot write a snapshot: No space left"):
        journal.append(b"two", [bytes(64)])
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert len(os.listdir("/proc/self/fd")) == descriptors
    monkeypatch.undo()
    journal.append(b"two", [bytes(64)])
    journal.close()
    assert [body for _, body, _ in read_journal(tmp_path)] == [b"one", b"two"]


def test_a_large_record_that_finds_no_room_leaves_no_trail_of_empty_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, _ = start(tmp_path, segment_bytes=128)
    journal.append(b"one", [bytes(64)])
    real = os.pwritev

    def only_small(fd: int, buffers: list[memoryview], offset: int) -> int:
        if sum(map(len, buffers)) > 1000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", only_small)
    for _ in range(3):
        with pytest.raises(JournalError, match="No space left"):
            journal.append(b"two", [bytes(1000)])
    monkeypatch.undo()
    assert journal.append(b"two", [bytes(1000)]).segment == 2
    journal.close()


def write_over_the_limit(folder: Path) -> None:
    """The kernel lets no file grow over 100,000 bytes: it takes a part of the record that passes it, then EFBIG."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    journal, _ = start(folder)
    written = 0
    try:
        while True:
            journal.append(b"%d" % written, [bytes([written]) * 30_000])
            written += 1
    except JournalError as error:
        print(error)
    print(written, newest(folder).stat().st_size)
    journal.append(b"small")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    journal.append(b"large", [bytes(30_000)])
    journal.close()


def test_a_real_refusal_of_the_kernel_is_taken_back_and_survived(tmp_path: Path) -> None:
    with writer("over-the-limit", tmp_path) as process:
        told, _ = process.communicate()
    assert process.returncode == 0
    refused, numbers = told.splitlines()
    assert "cannot write a record of 30080 bytes: File too large (errno 27)" in refused
    # Header and snapshot take 128 bytes; a record 64 + 30,000 rounded up to 30,016, so three fit in 100,000.
    assert numbers == f"3 {128 + 3 * 30_080}"
    assert [body for _, body, _ in recover(tmp_path).records] == [b"0", b"1", b"2", b"small", b"large"]


# A failing fsync ------------------------------------------------------------------------------------------------------


def test_a_failed_fsync_ends_the_journal_for_all_and_is_never_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def broken(fd: int) -> None:
        calls.append(fd)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    journal, _ = start(tmp_path, fsync=Fsync.ALWAYS)
    monkeypatch.setattr(os, "fdatasync", broken)

    async def main() -> list[BaseException | None]:
        running = asyncio.create_task(journal.run())
        positions = [journal.append(b"%d" % index) for index in range(3)]
        waiters = [journal.durable(position) for position in positions]
        return await asyncio.gather(running, *waiters, return_exceptions=True)

    told = {str(outcome) for outcome in asyncio.run(main()) if isinstance(outcome, JournalError)}
    (line,) = told
    assert line.startswith(f"{tmp_path}/0000000001.journal: fsync failed: Input/output error (errno 5); ")
    with pytest.raises(JournalError, match="fsync failed"):
        journal.append(b"more")
    with pytest.raises(JournalError, match="fsync failed"):
        journal.flush()
    assert len(calls) == 1
    journal.close()
    assert len(calls) == 1
    monkeypatch.undo()
    assert len(recover(tmp_path).records) == 3


def test_every_one_who_waits_hears_of_the_failed_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    journal, _ = start(tmp_path, fsync=Fsync.ALWAYS)
    monkeypatch.setattr(os, "fdatasync", broken)

    async def main() -> list[BaseException | None]:
        positions = [journal.append(b"%d" % index) for index in range(3)]
        return await asyncio.gather(*map(journal.durable, positions), return_exceptions=True)

    assert [type(outcome) for outcome in asyncio.run(main())] == [JournalError] * 3
    journal.close()


def test_closing_tells_of_the_fsync_that_failed_and_lets_go_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    before = len(os.listdir("/proc/self/fd"))
    journal, _ = start(tmp_path, fsync=Fsync.INTERVAL)
    journal.append(b"")
    monkeypatch.setattr(os, "fdatasync", broken)
    with pytest.raises(JournalError, match="fsync failed"):
        journal.close()
    assert len(os.listdir("/proc/self/fd")) == before
    monkeypatch.undo()
    assert len(recover(tmp_path).records) == 1


if __name__ == "__main__":
    {
        "until-killed": write_until_killed,
        "inside-a-write": write_until_killed_inside_a_write,
        "over-the-limit": write_over_the_limit,
    }[sys.argv[1]](Path(sys.argv[2]), *map(int, sys.argv[3:]))
