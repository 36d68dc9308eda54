"""One segment file of the journal: its bytes, how a record gets in, and how to tell a whole record from a broken one.

::

    segment   header, 64 bytes: magic, format, segment number, resumes (segment, offset), xxh3-64 of all that
              snapshot record, then records in the order of ``append``
    record    header, 32 bytes: magic, body bytes, payload bytes, checksum
              body · zeros up to 64 · payload · zeros up to 64

Records start at multiples of 64 bytes, and so do payloads: arrays can be viewed in the mapped file. The checksum is
xxh3-64 over the header's fields, the segment number, the record's offset, body, payload and the zeros between, so
bytes of another place or an older file never pass for a record here.

``resumes`` is where the history that this segment continues ends: the segment before it and the offset behind its last
good record, (0, 0) for the first segment of all. What lies behind that offset was cut. The files stay as they are: to
cut is to resume earlier, so a crash during recovery changes nothing and no byte that might be wanted is destroyed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from streamrl.buffers.wire.codec import Frame
from streamrl.errors import JournalError

FORMAT = 1
ALIGNMENT = 64
ASIDE = ".new"
"""Ending of a segment that is being made; it takes its name when its snapshot is complete."""
LOCK = "lock"
"""File whose flock makes its holder the one writer; it holds the writer's pid."""

_MAGIC = b"sRLjrnl\n"
_HEADER = struct.Struct("<8sQQQQQ")
HEADER_BYTES = ALIGNMENT
_RECORD_MAGIC = b"\xa5record\n"
_RECORD = struct.Struct("<8sQQ")
_CHECKSUM = struct.Struct("<Q")
_PLACE = struct.Struct("<QQ")
_BODY_START = _RECORD.size + _CHECKSUM.size
_MAX_BUFFERS = os.sysconf("SC_IOV_MAX")
_ZEROS = bytes(ALIGNMENT)


class Position(msgspec.Struct, array_like=True, frozen=True, order=True):
    """Where a record starts. Grows with every record; stays valid until the segment is recycled."""

    segment: int
    offset: int
    """Bytes from the start of the segment's file."""


START = Position(0, 0)
"""What the first segment of all resumes: nothing."""


class Record(NamedTuple):
    """One whole record as it was read and verified."""

    position: Position
    body: bytes
    payload: memoryview
    """Read-only view of the mapped file, 64-byte aligned; it keeps the mapping alive, also when the file is gone."""
    end: int
    """Offset of the next record."""


def segment_name(number: int) -> str:
    return f"{number:010d}.journal"


# Writing --------------------------------------------------------------------------------------------------------------


class Segment:
    """The segment that is written to. Creates the file aside and names it once its snapshot is complete.

    Raises ``JournalError``; nothing of the segment is left behind then.
    """

    def __init__(self, folder: Path, number: int, resumes: Position, snapshot: bytes) -> None:
        self.number = number
        self.path = folder / segment_name(number)
        aside = self.path.with_suffix(ASIDE)
        self.fd = -1
        try:
            self.fd = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            header = _encode_header(number, resumes)
            buffers, size = _encode_record(snapshot, (), number, HEADER_BYTES)
            _write_all(self.fd, [memoryview(header), *buffers], 0)
            os.rename(aside, self.path)
        except OSError as error:
            self.close()
            aside.unlink(missing_ok=True)
            raise _unwritten(self.path, "snapshot", error) from None
        self.end = self.first = HEADER_BYTES + size
        """``end``: bytes of the file. ``first``: offset of the first record after the snapshot."""

    def append(self, body: bytes, payload: Sequence[Frame]) -> Position:
        """Write one record behind the last. Raises ``JournalError``; the file then ends where it ended before."""
        position = Position(self.number, self.end)
        buffers, size = _encode_record(body, payload, self.number, self.end)
        try:
            _write_all(self.fd, buffers, self.end)
        except OSError as error:
            with contextlib.suppress(OSError):  # Gives the space back; should it fail, the next record overwrites it.
                os.ftruncate(self.fd, self.end)
            raise _unwritten(self.path, f"record of {size} bytes", error) from None
        self.end += size
        return position

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def record_bytes(body: bytes, payload: Sequence[Frame]) -> int:
    """Size of a record in its segment."""
    return _align(_align(_BODY_START + len(body)) + sum(memoryview(frame).nbytes for frame in payload))


def _encode_header(number: int, resumes: Position) -> bytes:
    fields = (_MAGIC, FORMAT, number, resumes.segment, resumes.offset)
    digest = xxhash.xxh3_64_intdigest(_HEADER.pack(*fields, 0))
    return _HEADER.pack(*fields, digest).ljust(HEADER_BYTES, b"\0")


def _encode_record(body: bytes, payload: Sequence[Frame], number: int, offset: int) -> tuple[list[memoryview], int]:
    """Buffers of a record, none of them copied, and their bytes in all."""
    frames = [memoryview(frame).cast("B") for frame in payload if memoryview(frame).nbytes]
    payload_bytes = sum(map(len, frames))
    fields = _RECORD.pack(_RECORD_MAGIC, len(body), payload_bytes)
    content: list[Frame] = [body, _padding(_BODY_START + len(body)), *frames, _padding(payload_bytes)]
    digest = _digest(fields, number, offset, content)
    views = [memoryview(part) for part in (fields + _CHECKSUM.pack(digest), *content) if len(part)]
    return views, sum(map(len, views))


def _digest(fields: bytes, number: int, offset: int, content: Sequence[Frame]) -> int:
    state = xxhash.xxh3_64(fields + _PLACE.pack(number, offset))
    for part in content:
        state.update(part)
    return state.intdigest()


def _write_all(fd: int, buffers: list[memoryview], offset: int) -> None:
    """``pwritev`` until everything is written: the kernel takes up to IOV_MAX buffers and may write a part only."""
    while buffers:
        written = os.pwritev(fd, buffers[:_MAX_BUFFERS], offset)
        offset += written
        whole = 0
        while whole < len(buffers) and written >= len(buffers[whole]):
            written -= len(buffers[whole])
            whole += 1
        buffers = buffers[whole:]
        if written:
            buffers[0] = buffers[0][written:]


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _padding(size: int) -> bytes:
    return _ZEROS[: _align(size) - size]


def _unwritten(path: Path, what: str, error: OSError) -> JournalError:
    return JournalError(
        f"{path}: cannot write a {what}: {error.strerror} (errno {error.errno}); nothing of it is kept, "
        "the journal goes on once there is room on this disk"
    )


# Reading --------------------------------------------------------------------------------------------------------------


def list_segments(folder: Path) -> list[int]:
    """Numbers of the segments in ``folder``, in order. Raises ``JournalError`` for a file that is not the journal's."""
    numbers = []
    for path in folder.iterdir():
        number = int(path.stem) if path.stem.isdecimal() else 0
        if path.name == segment_name(number) and number:
            numbers.append(number)
        elif path.name != LOCK and path != (folder / segment_name(number)).with_suffix(ASIDE):
            raise JournalError(f"{path}: expected only the journal's own files in this folder; move it elsewhere")
    return sorted(numbers)


class SegmentFile:
    """A segment that is only read: one mapping of the file as long as it was when it was opened.

    Raises ``JournalError`` when the file is missing, is no segment, or has another format. ``resumes`` is ``None``
    when the header is incomplete or damaged: then nothing else of the segment is to be trusted.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self.number = number
        self.path = folder / segment_name(number)
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                size = os.fstat(fd).st_size
                # The mapping lives as long as the last view of it and is closed by the collector: views may be held.
                self.memory = memoryview(mmap.mmap(fd, size, prot=mmap.PROT_READ) if size else b"")
            finally:
                os.close(fd)
        except OSError as error:
            raise JournalError(f"{self.path}: cannot read this segment: {error.strerror}; it may be recycled") from None
        self.resumes = self._read_header()

    def record(self, offset: int) -> Record | None:
        """The record at ``offset``, or ``None`` when there is no whole and intact one."""
        memory, content = self.memory, offset + _BODY_START
        if offset % ALIGNMENT or content > len(memory):
            return None
        magic, body_bytes, payload_bytes = _RECORD.unpack_from(memory, offset)
        if magic != _RECORD_MAGIC:
            return None
        start = offset + _align(_BODY_START + body_bytes)
        end = start + _align(payload_bytes)
        if end > len(memory):
            return None
        (checksum,) = _CHECKSUM.unpack_from(memory, offset + _RECORD.size)
        fields = bytes(memory[offset : offset + _RECORD.size])
        if checksum != _digest(fields, self.number, offset, [memory[content:end]]):
            return None
        body = bytes(memory[content : content + body_bytes])
        return Record(Position(self.number, offset), body, memory[start : start + payload_bytes], end)

    def snapshot(self) -> Record | None:
        """The snapshot that a complete segment starts with."""
        return self.record(HEADER_BYTES) if self.resumes else None

    def records(self, offset: int) -> Iterator[Record]:
        """Records from ``offset`` on, up to the first that is not whole."""
        while record := self.record(offset):
            yield record
            offset = record.end

    def intact_after(self, offset: int) -> int:
        """Whole records behind ``offset``, wherever they start: 0 behind a torn tail, some behind damage."""
        mapped = self.memory.obj
        count = 0
        while isinstance(mapped, mmap.mmap) and (offset := mapped.find(_RECORD_MAGIC, offset)) >= 0:
            count += self.record(offset) is not None
            offset += 1
        return count

    def _read_header(self) -> Position | None:
        header = bytes(self.memory[:HEADER_BYTES])
        if len(header) < HEADER_BYTES or not any(header):
            return None  # The host lost power before the file's content was on the disk.
        magic, version, number, segment, offset, _ = _HEADER.unpack_from(header)
        if magic != _MAGIC:
            raise JournalError(f"{self.path}: expected a journal segment, got something else; move it elsewhere")
        resumes = Position(segment, offset)
        if version != FORMAT:
            raise JournalError(
                f"{self.path}: expected journal format {FORMAT}, got {version}; "
                "use the streamrl that wrote it, or another folder"
            )
        return resumes if header == _encode_header(self.number, resumes) else None
