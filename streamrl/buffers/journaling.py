"""Ties a replay buffer to its journal: writes every change down before it happens, and brings a dead buffer back."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from streamrl.buffers import records
from streamrl.buffers.journal.writer import Fsync, Journal, Position
from streamrl.buffers.records import Record
from streamrl.buffers.replay_buffer import ReplayBuffer
from streamrl.buffers.wire.payload import Payload
from streamrl.errors import JournalError
from streamrl.types import Lease

OnEvent = Callable[[str, dict[str, Any]], None]


def open_journal(folder: Path, buffer: ReplayBuffer, now: float, on_event: OnEvent) -> Journal:
    """Restore ``buffer`` from the journal in ``folder``, new or not; from then on every change of it goes there first.

    Emits ``journal_cut`` for every damaged tail, and ``buffer_restored`` when there was something to restore. Raises
    ``JournalError`` where the folder cannot be used.
    """
    settings = buffer.config.buffer
    journal, recovery = Journal.open(
        folder,
        segment_bytes=settings.segment_bytes,
        fsync=Fsync(settings.fsync),
        interval_s=settings.fsync_interval_s,
        keep_all=settings.keep == "all",
        snapshot=lambda: records.encode(buffer.snapshot()),
    )

    def write_down(record: Record, payload: Payload | None) -> Position:
        return journal.append(records.encode(record), payload.frames if payload is not None else ())

    try:
        for cut in recovery.cut:
            on_event("journal_cut", {"reason": cut.reason, "what": str(cut)})
        if recovery.snapshot is not None:
            payloads = {position: payload for position, _, payload in recovery.records}

            def payload_of(position: Position) -> Payload | None:
                try:
                    return Payload([payloads[position] if position in payloads else journal.read(position)[1]])
                except JournalError as error:  # the host lost power before this part of the journal was on the disk
                    on_event("journal_failed", {"error": str(error)})
                    return None

            buffer.restore(records.decode(recovery.snapshot), recovery.end, payload_of, now)
            for position, body, _ in recovery.records:
                buffer.restore(records.decode(body), position, payload_of, now)
            buffer.ledger.renew(now)
            buffer.write_down = write_down  # what is lost is written down too
            on_event("buffer_restored", {"records": len(recovery.records)} | buffer.summary())
            for lease in _lose_missing(buffer):
                on_event("payload_lost", {"lease": lease.id, "prompt": lease.prompt, "reason": "not in the journal"})
    except BaseException:  # whatever it is: the lock must not outlive a failed start
        journal.close()
        raise
    buffer.write_down = write_down

    return journal


def _lose_missing(buffer: ReplayBuffer) -> list[Lease]:
    """Give up the groups whose payload the journal should hold and does not."""
    if buffer.config.buffer.shards > 1:
        return []
    held = {lease: buffer.held(lease) for lease in buffer.ledger.records}
    missing = [lease for lease, each in held.items() if each and each.payload is None and each.reference is None]
    offer = buffer.offer
    offered = [lease for lease in missing if offer and lease in buffer.ledger.steps[offer.step]]
    lost = buffer.drop(offer.step, offer.attempt, offered) if offer and offered else []
    return lost + buffer.lose(lease for lease in missing if lease not in offered)


class AfterSync:
    """Says things once what was journaled so far is as durable as ``buffer.fsync`` promises; without one, at once."""

    def __init__(self, journal: Journal | None) -> None:
        self._journal = journal if journal is not None and journal.fsync is Fsync.ALWAYS else None
        self._waiting: deque[Callable[[], object]] = deque()
        self._more = asyncio.Event()

    def say(self, what: Callable[[], object]) -> None:
        if self._journal is None:
            what()
        else:
            self._waiting.append(what)
            self._more.set()

    async def run(self) -> None:
        """Until cancelled. Raises ``JournalError`` when the disk fails: then nothing more is said."""
        while True:
            await self._more.wait()
            self._more.clear()
            assert self._journal is not None
            ready, self._waiting = self._waiting, deque()
            if (newest := self._journal.newest) is not None:
                await self._journal.durable(newest)  # those who wait share one fsync
            for what in ready:
                what()
