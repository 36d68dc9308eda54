"""Which process goes by which name at the publisher: the newest one, and what is known of it."""

from __future__ import annotations

from dataclasses import dataclass

from streamrl.errors import WireError
from streamrl.sync import messages as wire


@dataclass
class _Peer:
    identity: bytes
    incarnation: int
    version: int = -1
    online: bool = True
    condemned: bool = False


class Roster:
    """Peers by name. One entry per name that ever said Hello: as many as the run has members."""

    def __init__(self) -> None:
        self._peers: dict[str, _Peer] = {}
        self._names: dict[bytes, str] = {}

    def greet(self, identity: bytes, hello: wire.Hello) -> bool:
        """Take note of a process; False for one whose successor is known or that must be restarted.

        Raises ``WireError`` when the Hello does not belong to the socket that it came from.
        """
        if identity != wire.identity_of(hello.name, hello.incarnation):
            raise WireError(f"weight sync: {wire.readable(identity)} says that it is {hello.name!r}")
        known = self._peers.get(hello.name)
        if known and known.incarnation > hello.incarnation:
            return False
        if known and known.incarnation == hello.incarnation:
            known.online = True
            return not known.condemned
        if known:
            del self._names[known.identity]
        self._peers[hello.name] = _Peer(identity, hello.incarnation)
        self._names[identity] = hello.name
        return True

    def sender(self, identity: bytes) -> str | None:
        """Name of the process that a reply came from; None for one that counts no longer."""
        name = self._names.get(identity)
        return None if name is None or self._peers[name].condemned else name

    def identity(self, name: str) -> bytes:
        return self._peers[name].identity

    def reachable(self, name: str) -> bool:
        peer = self._peers.get(name)
        return peer is not None and peer.online and not peer.condemned

    def version(self, name: str) -> int:
        """What the process is known to serve, -1 before its first commit."""
        return self._peers[name].version

    def serves(self, name: str, version: int) -> None:
        self._peers[name].version = version

    def doubt(self, name: str) -> None:
        """What it serves is not known any more; nothing happens for a name that never connected."""
        if name in self._peers:
            self._peers[name].version = -1

    def lost(self, name: str) -> None:
        """A message could not be delivered: unreachable until it says Hello again."""
        self._peers[name].online = False

    def condemn(self, name: str) -> bool:
        """No further word with this process, only with its successor; False if that was so already."""
        peer = self._peers.get(name)
        if peer is None or peer.condemned:
            return False
        peer.condemned = True
        return True
