"""A store: holds payloads for the buffer when ``buffer.shards`` spreads them over several processes (C4, C10).

Group descriptions go to the buffer, payloads to the store of their lease (lease mod shards), whatever bytes they are::

    StorePlace (rollouter)             StoreServer                       StoreSource (trainer rank)
    write(group) ────────────────────► holds, journals  ◄─────────────── read(groups, columns)
                                       forgets ◄── StoreJanitor (buffer): leases that are closed
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from streamrl.buffers.journal.writer import Fsync, Journal, JournalError, Position, Recovery
from streamrl.buffers.journaling import AfterSync
from streamrl.buffers.links.link_keys import LinkKeys
from streamrl.buffers.links.link_zmq import Context
from streamrl.buffers.queue.message_server import Asker, MessageServer, OnEvent, OnFatal
from streamrl.buffers.wire.messages import (
    Column,
    Fetched,
    FetchRequest,
    FreeRequest,
    Header,
    Status,
    Stored,
    StoreRequest,
)
from streamrl.buffers.wire.payload import Frame, Payload, narrow, place
from streamrl.clock import Clock
from streamrl.errors import WireError
from streamrl.schema import BufferConfig


class Kept(Struct, tag="kept", array_like=True):
    """A payload was taken; it is the record's."""

    lease: int
    columns: list[Column]


class Freed(Struct, tag="freed", array_like=True):
    leases: list[int]
    oldest: int


class StoreSnapshot(Struct, tag="snapshot", array_like=True):
    kept: list[tuple[int, list[Column], Position]]
    freed: list[int]
    oldest: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Kept | Freed | StoreSnapshot).decode


class StoreServer(MessageServer):
    """Serves payloads at ``endpoint`` until ``run`` is cancelled; restores them from the journal in ``folder``.

    ``on_event`` gets ``malformed_frame``, ``request_refused``, ``store_restored``, ``journal_cut``, ``journal_failed``;
    ``on_fatal`` is called when the journal cannot be written. Raises ``JournalError`` where the folder cannot be used.
    """

    def __init__(
        self,
        endpoint: str,
        config: BufferConfig,
        clock: Clock,
        on_event: OnEvent,
        on_fatal: OnFatal,
        *,
        folder: Path | None = None,
        context: Context | None = None,
        keys: LinkKeys | None = None,
    ) -> None:
        super().__init__(endpoint, clock, on_event, on_fatal, context=context, keys=keys)
        self._config = config
        self._kept: dict[int, tuple[list[Column], Payload, Position | None]] = {}
        self._freed: set[int] = set()
        """Leases from ``_oldest`` on whose payload is not wanted any more, should it still come."""
        self._oldest = 0
        self._held_bytes = 0
        if folder is not None:
            self.journal = self._open(folder)
            self._after_sync = AfterSync(self.journal)

    def close(self) -> None:
        """Let go of the socket and the journal. Idempotent."""
        super().close()
        if self.journal is not None:
            self.journal.close()

    def statistics(self) -> dict[str, float]:
        """Of this store: payloads and their bytes now, bytes received since the start, and its journal."""
        own = {
            "store/payloads": float(len(self._kept)),
            "store/bytes": float(self._held_bytes),
            "store/received_bytes": float(self.bytes),
            "store/malformed": float(self.malformed),
        }
        return own | (self.journal.statistics() if self.journal is not None else {})

    # Messages ---------------------------------------------------------------------------------------------------------

    def handle(self, asker: Asker, header: Header, payload: Payload) -> None:
        match body := header.body:
            case StoreRequest():
                self.answer_when_synced(asker, Status(self._keep(body, payload)))
            case FetchRequest():
                stored, frames = self._fetch(body)
                self.answer(asker, Fetched(stored), frames)
            case FreeRequest():
                self._journal_record(Freed(body.leases, body.oldest), None)
                self._free(body.leases, body.oldest)
                if self.journal is not None:
                    positions = [position for _, _, position in self._kept.values() if position is not None]
                    self.journal.recycle(min(positions, default=None))
                self.answer(asker, Status("freed"))
            case _:
                raise WireError(f"expected a request, got {type(body).__name__}, which is not one for a store")

    def _keep(self, body: StoreRequest, payload: Payload) -> str:
        place(body.columns, payload.nbytes)
        if body.lease < self._oldest or body.lease in self._freed:
            return "late"
        if body.lease not in self._kept:
            position = self._journal_record(Kept(body.lease, body.columns), payload)
            self._hold(body.lease, body.columns, payload, position)
        return "stored"

    def _fetch(self, body: FetchRequest) -> tuple[list[Stored], list[Frame]]:
        stored: list[Stored] = []
        frames: list[Frame] = []
        for lease in body.leases:
            if (kept := self._kept.get(lease)) is not None:
                columns, payload = narrow(kept[0], kept[1], body.columns)
                stored.append(Stored(lease, columns, len(payload.frames)))
                frames += payload.frames
        return stored, frames

    def _free(self, leases: list[int], oldest: int) -> None:
        self._oldest = max(self._oldest, oldest)
        self._freed = {lease for lease in self._freed.union(leases) if lease >= self._oldest}
        for lease in [lease for lease in self._kept if lease < self._oldest or lease in self._freed]:
            self._held_bytes -= self._kept.pop(lease)[1].nbytes

    # Journal ----------------------------------------------------------------------------------------------------------

    def _journal_record(self, record: Kept | Freed, payload: Payload | None) -> Position | None:
        if self.journal is None:
            return None
        return self.journal.append(_encode(record), payload.frames if payload is not None else ())

    def _open(self, folder: Path) -> Journal:
        config = self._config
        journal, recovery = Journal.open(
            folder,
            segment_bytes=config.segment_bytes,
            fsync=Fsync(config.fsync),
            interval_s=config.fsync_interval_s,
            keep_all=config.keep == "all",
            snapshot=self._snapshot,
        )
        try:
            for cut in recovery.cut:
                self._on_event("journal_cut", {"reason": cut.reason, "what": str(cut)})
            if recovery.snapshot is not None:
                self._restore(journal, recovery)
                self._on_event("store_restored", {"payloads": len(self._kept), "bytes": self._held_bytes})
        except BaseException:  # whatever it is: the lock must not outlive a failed start
            journal.close()
            raise
        return journal

    def _restore(self, journal: Journal, recovery: Recovery) -> None:
        assert recovery.snapshot is not None
        snapshot = _decode(recovery.snapshot)
        assert isinstance(snapshot, StoreSnapshot)
        self._freed, self._oldest = set(snapshot.freed), snapshot.oldest
        for lease, columns, position in snapshot.kept:
            try:
                self._hold(lease, columns, Payload([journal.read(position)[1]]), position)
            except JournalError as error:  # lost with the power; whoever asks for it is told that it is not here
                self._on_event("journal_failed", {"error": str(error)})
        for position, body, payload in recovery.records:
            record = _decode(body)
            if isinstance(record, Kept):
                self._hold(record.lease, record.columns, Payload([payload]), position)
            elif isinstance(record, Freed):
                self._free(record.leases, record.oldest)

    def _hold(self, lease: int, columns: list[Column], payload: Payload, position: Position | None) -> None:
        self._kept[lease] = (columns, payload, position)
        self._held_bytes += payload.nbytes

    def _snapshot(self) -> bytes:
        kept = [(lease, columns, where) for lease, (columns, _, where) in self._kept.items() if where is not None]
        return _encode(StoreSnapshot(kept, sorted(self._freed), self._oldest))
