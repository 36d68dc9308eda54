"""The journal: an append-only, checksummed log from which the buffer process restores itself after SIGKILL (C10).

The writer appends one record per change of its state; each segment of the log starts with a *snapshot* of that state.
To recover is to take the newest whole snapshot and the records behind it; payloads of older records that the snapshot
refers to by ``Position`` are read from the older segments. ``segment.py`` has the bytes.

What survives, by ``fsync``:

======== ============================ =====================================================================
policy   the writer's process dies    the host loses power
======== ============================ =====================================================================
always   everything appended          everything that ``durable`` returned for
interval everything appended          all but the last ``interval_s`` seconds, and the time of one fsync
never    everything appended          what the kernel happened to have written
======== ============================ =====================================================================

What recovery does with a record that is not whole:

* *torn*: no whole record follows it. That is how a crash in the middle of a write looks; the tail is cut there.
* *corrupt*: whole records follow it. One change of state that is missing makes all later ones wrong, so the tail is
  cut there too, and ``Cut`` says how many whole records that costs.

A segment whose snapshot is not whole is cut from its start in the same way, in favour of the segment before it. After
power loss without ``always`` a snapshot may refer to a payload that was lost: ``read`` raises then.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path

from streamrl.buffers.journal.recovery import Cut, Recovery, read_journal, recover
from streamrl.buffers.journal.segment import (
    ASIDE,
    LOCK,
    Position,
    Segment,
    SegmentFile,
    list_segments,
    record_bytes,
    segment_name,
)
from streamrl.buffers.wire.codec import Frame
from streamrl.errors import JournalError

__all__ = ["Cut", "Fsync", "Journal", "JournalError", "Position", "Recovery", "read_journal"]


class Fsync(StrEnum):
    """When records are forced to the disk (``buffer.fsync``); see the module's table."""

    ALWAYS = "always"
    INTERVAL = "interval"
    NEVER = "never"


class Journal:
    """The one writer of a folder; made by ``open``. For one thread, that of the event loop."""

    def __init__(
        self,
        folder: Path,
        lock: int,
        numbers: list[int],
        end: Position,
        *,
        segment_bytes: int,
        fsync: Fsync,
        interval_s: float,
        keep_all: bool,
        snapshot: Callable[[], bytes],
    ) -> None:
        self.folder = folder
        self._lock = lock
        self._segment_bytes = segment_bytes
        self.fsync = fsync
        self._interval_s = interval_s
        self._keep_all = keep_all
        self._snapshot = snapshot
        self._active: Segment | None = None
        self._end = end
        """Behind the last record: what the next segment resumes."""
        self._last_number = max(numbers, default=0)
        self._finished = {number: (folder / segment_name(number)).stat().st_size for number in numbers}
        """Bytes of each segment that is no longer written to, oldest first."""
        self._files: dict[int, SegmentFile] = {}
        """Finished segments that were read from."""
        self._newest: Position | None = None
        self._fault = ""
        """Why the journal takes nothing any more; empty while it does."""
        self._bytes = 0
        self._synced_bytes = 0
        self._fsyncs = 0
        self._fsync_s = 0.0
        self._durable = end
        """Every record that starts before it is on the disk."""
        self._unsynced = asyncio.Event()
        self._left: list[Segment] = []
        """Finished segments that the next flush syncs and closes."""
        self._flight: Future[None] | None = None
        self._forcing = ThreadPoolExecutor(1, thread_name_prefix="journal-fsync")
        self._deleting = ThreadPoolExecutor(1, thread_name_prefix="journal-delete")

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        segment_bytes: int,
        fsync: Fsync,
        interval_s: float,
        keep_all: bool,
        snapshot: Callable[[], bytes],
    ) -> tuple[Journal, Recovery]:
        """Lock ``folder`` (made if missing) and recover what it holds, which changes none of it.

        ``segment_bytes``: records of one segment, its snapshot not counted; a larger record gets a segment of its own.
        ``interval_s``: seconds from an append to its fsync under ``Fsync.INTERVAL``.
        ``keep_all``: ``recycle`` deletes nothing.
        ``snapshot``: gives the state after the last record; called inside ``append`` before the new record is written,
        so a change is appended first and made then. The first append after ``open`` starts a segment.

        Raises ``JournalError``: another writer has the folder, foreign files, another format, no access, or so much
        damage that no whole snapshot is left.
        """
        lock = -1
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = _take_lock(folder)
            numbers = list_segments(folder)
            for path in folder.glob(f"*{ASIDE}"):
                path.unlink()
            recovery = recover(folder, numbers)
            if fsync is not Fsync.NEVER:
                # The last records of a killed writer are in the page cache only; whoever opens counts them as durable.
                for path in (*(folder / segment_name(number) for number in numbers), folder):
                    _sync_path(path)
            journal = cls(
                folder,
                lock,
                numbers,
                recovery.end,
                segment_bytes=segment_bytes,
                fsync=fsync,
                interval_s=interval_s,
                keep_all=keep_all,
                snapshot=snapshot,
            )
        except BaseException as error:  # Whatever it is: the lock must not outlive a failed open.
            if lock >= 0:
                os.close(lock)
            if not isinstance(error, OSError):
                raise
            raise JournalError(
                f"{folder}: cannot keep a journal here: {error.strerror} (errno {error.errno}); choose another folder"
            ) from None
        return journal, recovery

    @property
    def newest(self) -> Position | None:
        """The record that was appended last since ``open``, before which everything is on the disk."""
        return self._newest

    # Writing ----------------------------------------------------------------------------------------------------------

    def append(self, body: bytes, payload: Sequence[Frame] = ()) -> Position:
        """Write one record; it survives the death of this process from here on. Nothing is copied.

        Raises ``JournalError``: no room (nothing of the record is kept, later appends may work), after a failed fsync,
        or closed.
        """
        self._check()
        size = record_bytes(body, payload)
        active = self._active
        if active is None or (active.end > active.first and active.end + size > active.first + self._segment_bytes):
            active = self._roll()
        position = active.append(body, payload)
        self._grew(active, size)
        self._newest = position
        return position

    def _roll(self) -> Segment:
        """Start the next segment; should that fail, the active one stays as it is."""
        segment = Segment(self.folder, self._last_number + 1, self._end, self._snapshot())
        if self._active:
            self._finished[self._active.number] = self._active.end
            if self.fsync is Fsync.NEVER:
                self._active.close()
            else:
                self._left.append(self._active)
        self._active = segment
        self._last_number = segment.number
        self._grew(segment, segment.end)
        return segment

    def _grew(self, active: Segment, nbytes: int) -> None:
        self._end = Position(active.number, active.end)
        self._bytes += nbytes
        if self.fsync is not Fsync.NEVER:
            self._unsynced.set()

    def recycle(self, oldest_needed: Position | None) -> int:
        """Delete the segments before that of ``oldest_needed`` (``None``: no payload is needed); how many it were.

        Keeps every segment from the newest snapshot on that the fsync policy has made durable. Deletes none with
        ``keep_all``. The files go on a thread; views of them stay valid. Raises ``JournalError`` where that failed.
        """
        self._check()
        safe = self._end if self.fsync is Fsync.NEVER else self._durable
        bound = min(safe, oldest_needed or safe).segment
        used = [number for number in self._finished if number < bound]
        for number in used:
            self._files.pop(number, None)
        if self._keep_all or not used:
            return 0
        for number in used:
            del self._finished[number]
        self._deleting.submit(self._delete, [self.folder / segment_name(number) for number in used])
        return len(used)

    def _delete(self, paths: list[Path]) -> None:
        """On its own thread: to unlink a segment takes the kernel 0.2 ms per MB."""
        for path in paths:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                self._fault = f"{path}: cannot delete this used segment: {error.strerror}; check the disk"

    # Making durable ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Force records to the disk as the policy says, until cancelled. Raises ``JournalError`` when that fails."""
        while True:
            await self._unsynced.wait()
            if self.fsync is Fsync.INTERVAL:
                await asyncio.sleep(self._interval_s)
            await self._sync()

    async def durable(self, position: Position) -> None:
        """Return when the record may be acknowledged: under ``Fsync.ALWAYS`` when it is on the disk, else at once.

        Those who wait share fsyncs: one begins when the one before it ends, and covers all that was appended until
        then. Raises ``JournalError`` when the fsync fails: nobody knows then what is on the disk.
        """
        assert position < self._end, f"{position} was never appended"
        self._check()
        while self.fsync is Fsync.ALWAYS and not position < self._durable:
            await self._sync()

    def flush(self) -> None:
        """Force everything appended to the disk, blocking; nothing under ``Fsync.NEVER``. Raises ``JournalError``."""
        while self.fsync is not Fsync.NEVER and self._synced_bytes < self._bytes:
            self._launch().result()
            self._check()

    async def _sync(self) -> None:
        # Shielded: one waiter that is cancelled must not cancel the fsync of the others.
        await asyncio.shield(asyncio.wrap_future(self._launch()))
        self._check()

    def _launch(self) -> Future[None]:
        """The fsync under way, or a new one for all that is unsynced now."""
        self._check()
        if self._flight is None or self._flight.done():
            assert self._active is not None
            self._unsynced.clear()
            left, self._left = self._left, []
            self._flight = self._forcing.submit(self._force, left, self._active, self._end, self._bytes)
        return self._flight

    def _force(self, left: list[Segment], active: Segment, end: Position, nbytes: int) -> None:
        """On its own thread: sync the files oldest first, then their folder. Failure is told by ``_fault``.

        A file is not synced again after a failure: the kernel marks pages that it could not write as clean, so the
        next fsync would report success for lost data.
        """
        start = time.monotonic()
        path = active.path
        try:
            for segment in (*left, active):
                path = segment.path
                os.fdatasync(segment.fd)
                self._fsyncs += 1
            if end.segment != self._durable.segment:
                path = self.folder
                _sync_path(path)
                self._fsyncs += 1
            self._durable = end
            self._synced_bytes = nbytes
        except OSError as error:
            self._fault = (
                f"{path}: fsync failed: {error.strerror} (errno {error.errno}); what was appended since the one before "
                "may be lost: check the disk, then start again from this journal"
            )
        finally:
            self._fsync_s += time.monotonic() - start
            for segment in left:
                segment.close()

    # Reading and the end ----------------------------------------------------------------------------------------------

    def read(self, position: Position) -> tuple[bytes, memoryview]:
        """Body and payload of the record at ``position``, verified.

        The payload is a read-only view of the mapped file, 64-byte aligned, that stays valid as long as it is held; of
        the segment that is being written it is a copy. Raises ``JournalError`` when the record is missing or damaged.
        """
        self._check()
        finished = position.segment in self._finished
        file = self._files.get(position.segment) or SegmentFile(self.folder, position.segment)
        if finished:
            self._files[position.segment] = file
        record = file.record(position.offset)
        if record is None:
            raise JournalError(
                f"{file.path}: the record at {position.offset} is damaged or missing; its content is lost"
            )
        # A mapping holds a file descriptor, and a growing file would need one mapping per record that is read early.
        return record.body, record.payload if finished else memoryview(bytes(record.payload))

    def statistics(self) -> dict[str, float]:
        """Numbers since ``open``, and what is on the disk now, in bytes and seconds."""
        active = self._active
        return {
            "journal/bytes": self._bytes,
            "journal/disk_bytes": sum(self._finished.values()) + (active.end if active else 0),
            "journal/segments": len(self._finished) + bool(active),
            "journal/fsyncs": self._fsyncs,
            "journal/fsync_s": self._fsync_s,
            "journal/unsynced_bytes": self._bytes - self._synced_bytes,
        }

    def close(self) -> None:
        """Flush and let go of the folder. Idempotent. Raises ``JournalError`` when the last fsync failed."""
        if self._lock < 0:
            return
        try:
            if not self._fault:
                self.flush()
        finally:
            self._forcing.shutdown()
            self._deleting.shutdown()
            for segment in (*self._left, *filter(None, [self._active])):
                segment.close()
            self._files.clear()
            os.close(self._lock)
            self._lock = -1
            self._fault = self._fault or f"{self.folder}: this journal is closed; open it again"

    def _check(self) -> None:
        if self._fault:
            raise JournalError(self._fault)


def _take_lock(folder: Path) -> int:
    """Descriptor that holds the folder's flock; the kernel lets go of it with the process, however that ends."""
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
    except BlockingIOError:
        holder = os.pread(lock, 20, 0).decode(errors="replace") or "unknown"
        os.close(lock)
        raise JournalError(
            f"{folder}: process {holder} is writing this journal; end it first, or choose another folder"
        ) from None
    except OSError:
        os.close(lock)
        raise
    return lock


def _sync_path(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
