"""What a journal still holds after a crash, and the walk over all of it for a replay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from streamrl.buffers.journal.segment import (
    HEADER_BYTES,
    START,
    Position,
    Record,
    SegmentFile,
    list_segments,
    segment_name,
)
from streamrl.errors import JournalError


@dataclass(frozen=True, slots=True)
class Cut:
    """Bytes of a journal that are not whole records, or lie behind such bytes; recovery ends before them."""

    segment: str
    """File name."""
    offset: int
    nbytes: int
    intact: int
    """Whole records among them, lost too."""

    @property
    def reason(self) -> str:
        """``torn``: the last write was not finished. ``corrupt``: bytes changed, for whole records follow."""
        return "corrupt" if self.intact else "torn"

    def __str__(self) -> str:
        lost = f"with {self.intact} intact records behind the damage" if self.intact else "an unfinished write"
        return f"journal {self.segment}: cut {self.nbytes} bytes from {self.offset} on, {self.reason}: {lost}"


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a journal held when it was opened."""

    snapshot: bytes | None
    """Body of the newest whole snapshot; ``None`` when nothing was ever appended."""
    records: list[tuple[Position, bytes, memoryview]]
    """Position, body and payload (read-only view of the mapped file) of each record after the snapshot, in order."""
    cut: list[Cut]
    """In the order of the files; empty after an orderly end."""
    end: Position
    """Behind the last record."""


def recover(folder: Path, numbers: list[int]) -> Recovery:
    """Newest whole snapshot and the whole records after it. Changes nothing. Raises ``JournalError``."""
    cut: list[Cut] = []
    for number in reversed(numbers):
        file = SegmentFile(folder, number)
        snapshot = file.snapshot()
        if not snapshot:
            # Behind a damaged header or snapshot stand the same records as behind any other damage.
            cut.insert(0, _cut(file, HEADER_BYTES if file.resumes else 0))
            continue
        records = list(file.records(snapshot.end))
        end = records[-1].end if records else snapshot.end
        if end < len(file.memory):
            cut.insert(0, _cut(file, end))
        return Recovery(snapshot.body, [_triple(record) for record in records], cut, Position(number, end))
    if numbers and (numbers[0] != 1 or any(part.intact for part in cut)):
        raise JournalError(
            f"{folder}: none of the {len(numbers)} segments has a whole snapshot, the first one reads: {cut[0]}; "
            "move the folder away to start with an empty buffer"
        )
    return Recovery(None, [], cut, START)


def read_journal(folder: Path) -> Iterator[tuple[Position, bytes, memoryview]]:
    """Every record from the first one ever on, snapshots left out, as its writer lived it: what it cut is not there.

    Only reads, also beside a live writer; ends cleanly at a torn tail. Position, body, payload as in ``Recovery``.
    Raises ``JournalError`` where nothing was journaled or the first segments were recycled, or at a damaged record,
    once the records before it were given.
    """
    chain, damage = _chain(folder)
    for number, end in chain:
        file = SegmentFile(folder, number)
        snapshot = file.snapshot()
        offset = snapshot.end if snapshot else HEADER_BYTES
        for record in file.records(offset):
            offset = record.end
            yield _triple(record)
        if end is not None and offset != end:
            raise JournalError(f"{folder}: damaged, the replay cannot go on; {_cut(file, offset)}")
    if damage:
        raise JournalError(f"{folder}: damaged, the replay would not be the run that was; {damage}")


def _chain(folder: Path) -> tuple[list[tuple[int, int | None]], Cut | None]:
    """Number of each segment of the history and the offset where it ends (``None``: at the last whole record).

    Beside it the damage that hides what came after the last segment's end.
    """
    numbers = list_segments(folder) if folder.is_dir() else []
    if not numbers:
        raise JournalError(f"{folder}: there is no journal here; only a run with buffer.keep=all can be replayed")
    recovered = recover(folder, numbers)
    damage = next((part for part in recovered.cut if part.intact), None)
    position, chain = recovered.end, []
    end: int | None = None
    while position != START:
        if position.segment not in numbers:
            raise JournalError(
                f"{folder}: {segment_name(position.segment)} is missing, recycled after its use; "
                "only a run with buffer.keep=all can be replayed"
            )
        chain.append((position.segment, end))
        resumes = SegmentFile(folder, position.segment).resumes
        if resumes is None:
            raise JournalError(
                f"{folder}: the header of {segment_name(position.segment)} is damaged; it cannot be replayed"
            )
        position, end = resumes, resumes.offset
    return chain[::-1], damage


def _triple(record: Record) -> tuple[Position, bytes, memoryview]:
    return record.position, record.body, record.payload


def _cut(file: SegmentFile, offset: int) -> Cut:
    return Cut(file.path.name, offset, len(file.memory) - offset, file.intact_after(offset))
