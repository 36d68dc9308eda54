"""Where payloads lie when they do not travel through the buffer: seams for the stores and for arenas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from streamrl.buffers.links.link_zmq import ClientLink
from streamrl.buffers.wire.groups import check_group
from streamrl.buffers.wire.messages import BatchGroup, Column, GroupMeta, InArena
from streamrl.buffers.wire.payload import Payload
from streamrl.errors import WireError


@dataclass(slots=True)
class Found:
    """What came of reading groups, by lease."""

    groups: dict[int, tuple[GroupMeta, Payload]] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    """Why each of the others cannot be read."""

    def add(self, group: GroupMeta, columns: list[Column], payload: Payload) -> None:
        """Take a group whose ``columns`` were read, unless they do not fit its description."""
        group = msgspec.structs.replace(group, columns=columns, nbytes=payload.nbytes)
        try:
            check_group(group, payload)
        except WireError as error:
            self.lost[group.lease] = str(error)
        else:
            self.groups[group.lease] = (group, payload)


class Place(Protocol):
    """A producer's side."""

    def attach(self, link: ClientLink) -> None:
        """The producer's connection to the buffer, before anything is written."""
        ...

    async def write(self, group: GroupMeta, payload: Payload) -> InArena | None:
        """Put a payload where consumers find it; waits while there is no room."""
        ...

    def statistics(self) -> dict[str, float]: ...

    def close(self) -> None: ...


class Source(Protocol):
    """A consumer's side."""

    async def read(self, groups: Sequence[BatchGroup], names: Sequence[str]) -> Found:
        """The wanted columns of each group, with the description that fits them."""
        ...

    def close(self) -> None: ...
