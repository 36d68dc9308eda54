"""Which host reads from which with transport ``nixl``: a chain, so that each network interface carries a version once.

::

                 trainer ────► host a ────► host b ────► host c       buckets, by one-sided reads
                    ▲ │           ┊            ┊            ┊
        Progress    │ └──────────►┊───────────►┊───────────►┊         Source: up to which bucket, and in whose memory
        from each   └┄┄┄┄┄┄┄┄┄┄┄┄┄┴┄┄┄┄┄┄┄┄┄┄┄┄┴┄┄┄┄┄┄┄┄┄┄┄┄┘

One receiver of each host takes part; the others of that host copy from it (``host_share.py``). It offers its staging
memory for reading, asks for a place at the first bucket of a version, and says after each bucket how many it has; the
trainer tells who reads from it. So bucket i + 1 comes in while bucket i is passed on: H hosts take H − 1 buckets longer
than one. Bytes never go through the trainer twice, and hosts need no sockets to each other but UCX's.

**Order**: hosts read in the order in which they ask; whoever asks is the end of the chain. It is made anew with each
version: a host that left is not in it any more, one that came is, and one that was slow to take up the version before
asks late and has fewer behind it. Receivers on the trainer's own host stay out: their reads pass no interface.

**Failures** cost those behind a read from the trainer, never the version:

- A host that failed, left, or stands still for ``patience_s`` although there is something to read passes nothing on any
  more: who reads from it reads the rest of that version from the trainer, and those further behind read on as before.
- A read that fails, is late, or finds another version in that memory (each has a board, as the trainer's) is repeated
  from the trainer by the reader itself, and so is the rest of that version; it passes that on all the same.
- Buckets are passed on before they are verified, as a digest takes longer than a read and each host would wait for all
  in front of it. Everybody verifies what arrived; a retry reads all of it from the trainer.
- Retries, late joiners, observers and members that are brought back to an older version never take part.

This module is pure: what was said goes in, what to say comes out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import msgspec

AHEAD = 4
"""Buckets that a reader is told of before it has said that it has them: bounds what waits in its socket."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class Progress(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Receiver → trainer: what a host has of a version."""

    session: str
    version: _Count
    count: _Count
    """Buckets, from the first on; 0 asks for a place."""
    address: bytes = b""
    """Where others can read them; said by who asks."""
    failed: bool = False
    """There will be no more."""
    alone: bool = False
    """It reads the rest from the trainer, whoever it was told to read from."""

    @property
    def asks(self) -> bool:
        return self.count == 0 and not self.failed and not self.alone


class Source(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Trainer → receiver: where to read a version."""

    session: str
    version: _Count
    count: _Count
    """Buckets that are there; without an address all, as they are announced."""
    address: bytes
    """Whose memory; empty: the trainer's."""


class Refused(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Answer to a frame that was no message; never answered itself."""

    reason: str


Orders = list[tuple[bytes, Source]]
"""What to tell whom, by the identity of its socket."""


@dataclass(eq=False)
class _Reader:
    """A host, by the receiver that reads for it."""

    identity: bytes
    address: bytes
    upstream: _Reader | None
    """Whom it reads from; None: the trainer."""
    downstream: _Reader | None = None
    """Who reads from it."""
    count: int = 0
    """Buckets that it has."""
    told: int = 0
    """Buckets that it knows to be there for it."""
    passes_on: bool = True
    due: float = math.inf
    """When it counts as standing still; inf while it has nothing to read."""


class Chain:
    """Who reads one version from whom. ``buckets``: of the version, at least one; times: seconds of one clock."""

    def __init__(self, session: str, version: int, buckets: int, patience_s: float) -> None:
        self.session = session
        self.version = version
        self._buckets = buckets
        self._patience_s = patience_s
        self._offered = 0
        self._readers: dict[str, _Reader] = {}
        """By member."""
        self._last: _Reader | None = None
        """Who asked last."""

    def progress(self, member: str, identity: bytes, word: Progress, now: float) -> Orders:
        """A receiver says what it has; who has nothing yet is taken in."""
        reader = self._readers.get(member)
        if word.asks:
            return self.left(member, now) + self._take_in(member, identity, word.address, now)
        if reader is None or reader.identity != identity:
            return []
        if word.failed:
            return self.left(member, now)
        if word.alone:
            self._part(reader)
            self._watch(reader, now)
            return []
        if word.count > reader.count:
            reader.count = min(word.count, self._buckets)
            self._watch(reader, now)
            self._wake(reader.downstream, now)
        return self._tell(reader) + self._tell(reader.downstream)

    def offered(self, count: int, now: float) -> None:
        """The trainer has its first ``count`` buckets; that they can be read is the publisher's to say."""
        self._offered = max(self._offered, count)
        for reader in self._readers.values():
            if reader.upstream is None:
                self._wake(reader, now)

    def left(self, member: str, now: float) -> Orders:
        """It takes part no more; nothing happens for one that did not."""
        reader = self._readers.pop(member, None)
        if reader is None:
            return []
        if self._last is reader:
            self._last = reader.upstream
        self._part(reader)
        return self._cut(reader, now)

    def expire(self, now: float) -> tuple[list[str], Orders]:
        """Members that stand still, and what to tell those behind them."""
        still = {member: reader for member, reader in self._readers.items() if reader.due <= now}
        return sorted(still), [order for reader in still.values() for order in self._cut(reader, now)]

    @property
    def due(self) -> float:
        """When the next of them may stand still; inf: none has anything to read."""
        return min((reader.due for reader in self._readers.values()), default=math.inf)

    def _take_in(self, member: str, identity: bytes, address: bytes, now: float) -> Orders:
        upstream = self._last if self._last is not None and self._last.passes_on else None
        self._last = self._readers[member] = reader = _Reader(identity, address, upstream)
        if upstream is not None:
            upstream.downstream = reader
        self._watch(reader, now)
        return self._tell(reader)

    def _part(self, reader: _Reader) -> None:
        """It reads from no host any more, and needs to be told nothing."""
        if reader.upstream is not None:
            reader.upstream.downstream = None
        reader.upstream, reader.told = None, self._buckets

    def _cut(self, reader: _Reader, now: float) -> Orders:
        """It passes nothing on any more: who read from it reads from the trainer."""
        reader.passes_on, reader.due = False, math.inf
        behind, reader.downstream = reader.downstream, None
        if behind is None:
            return []
        behind.upstream, behind.told = None, 0
        self._watch(behind, now)
        return self._tell(behind)

    def _tell(self, reader: _Reader | None) -> Orders:
        if reader is None:
            return []
        upstream = reader.upstream
        count, address = (self._buckets, b"") if upstream is None else (upstream.count, upstream.address)
        if count <= reader.told or (upstream is not None and reader.told - reader.count >= AHEAD):
            return []
        reader.told = count
        return [(reader.identity, Source(self.session, self.version, count, address))]

    def _wake(self, reader: _Reader | None, now: float) -> None:
        """There may be something to read for one that had nothing."""
        if reader is not None and reader.due == math.inf:
            self._watch(reader, now)

    def _watch(self, reader: _Reader, now: float) -> None:
        """Its patience begins anew, where it has something to read."""
        there = self._offered if reader.upstream is None else reader.upstream.count
        waits = not reader.passes_on or reader.count >= there
        reader.due = math.inf if waits else now + self._patience_s
