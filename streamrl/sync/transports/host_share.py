"""Who of the receivers on one host pulls: the first of them, and the others copy what it has out of its memory.

::

    first (holds the name)                      another
                         ←   Question            has it bucket i of version v? (and: I wait)
        Answer           →                       when it has it: where its memory is; or that it will not have it

The name is one of abstract unix sockets: the kernel gives it to one process of a host, and takes it back when that
process ends, however it does. Whoever asks next takes the name then. Who is not answered in time pulls the rest of that
version: nobody fails for another's sake. What the first has may be overwritten while it is copied; as with every
bucket, the digest tells.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from pathlib import Path

import msgspec

from streamrl.errors import WeightSyncError
from streamrl.sync.arena import Arena, ArenaReader
from streamrl.sync.staging import bucket_of
from streamrl.sync.transport import BucketId

FRAME_LIMIT = 4096
GUESTS = 128
"""Connections that wait to be accepted; a host has fewer receivers."""
HOST_VARIABLE = "STREAMRL_HOST"
"""Environment variable: a process with another value counts to another host. For trying out several on one machine."""
_CREDENTIALS = struct.Struct("3i")
"""pid, uid and gid (unix(7), SO_PEERCRED)."""


class Question(msgspec.Struct, frozen=True):
    number: int
    version: int
    slot: int
    index: int
    wait: bool
    """Answer when the bucket is there, rather than at once that it is not."""


class Answer(msgspec.Struct, frozen=True):
    number: int
    """Of the question."""
    path: str
    """Of the memory that holds the bucket; empty: it is not there."""


_ENCODER = msgspec.msgpack.Encoder()
_QUESTION = msgspec.msgpack.Decoder(Question)
_ANSWER = msgspec.msgpack.Decoder(Answer)


class HostShare:
    """One receiver's part in it. All methods belong to the event loop.

    ``name``: of who shares; ``patience_s``: for an answer to come.
    """

    def __init__(self, name: str, memory: Arena, patience_s: float) -> None:
        self._name = f"\0streamrl-{name}"
        self._memory = memory
        self._patience_s = patience_s
        self._held: dict[int, tuple[int, set[int]]] = {}
        """By slot: a version, and its buckets that are here."""
        self._listener: socket.socket | None = None
        """Of the first."""
        self._guests: dict[socket.socket, Question | None] = {}
        """Those who ask, and what they wait for."""
        self._first: socket.socket | None = None
        """Of the others: the connection to the first."""
        self._theirs: tuple[str, ArenaReader] | None = None
        self._number = 0
        self._alone = -1
        """The version for which the first was asked in vain."""

    @property
    def first(self) -> bool:
        """Whether this one pulls, and the others of this host copy from it."""
        return self._listener is not None

    # What this process has --------------------------------------------------------------------------------------------

    def lacks(self, bucket: BucketId) -> None:
        """It is about to be written."""
        version, indices = self._held.get(bucket.slot, (-1, set()))
        if version != bucket.version:
            self._held[bucket.slot] = bucket.version, set()
        indices.discard(bucket.index)

    def has(self, bucket: BucketId) -> None:
        """It is here: who waits for it is told."""
        self._held[bucket.slot][1].add(bucket.index)
        self._reconsider()

    def fails(self, bucket: BucketId) -> None:
        """It could not be had: who waits for it is told."""
        for guest, question in list(self._guests.items()):
            if question is not None and question.version == bucket.version:
                self._answer(guest, question, "")

    # Asking the first -------------------------------------------------------------------------------------------------

    async def find(self, bucket: BucketId) -> memoryview | None:
        """The bucket in the memory of this host's first receiver; None: it has to be pulled."""
        alone = self._listener is None and self._first is None
        # Who gets all in private, as an observer, cannot be the one that the others wait for.
        if alone and (bucket.private or not self._take_name()):
            self._connect()
        if self._first is None or bucket.attempt or bucket.version == self._alone:
            return None
        path = await self._ask(self._first, bucket)
        if path:
            with contextlib.suppress(WeightSyncError):  # in another PID namespace, or it has just ended
                if self._theirs is None or self._theirs[0] != path:
                    self._theirs = path, ArenaReader(path, self._memory.manifest)
                return bucket_of(self._memory.manifest, self._theirs[1].slot(bucket.slot), bucket.index)
        self._alone = bucket.version
        return None

    async def _ask(self, first: socket.socket, bucket: BucketId) -> str:
        loop = asyncio.get_running_loop()
        self._number += 1
        question = Question(self._number, bucket.version, bucket.slot, bucket.index, wait=not bucket.private)
        try:
            async with asyncio.timeout(self._patience_s):
                await loop.sock_sendall(first, _ENCODER.encode(question))
                while True:
                    answer = _ANSWER.decode(await loop.sock_recv(first, FRAME_LIMIT))
                    if answer.number == self._number:
                        return answer.path
        except TimeoutError:
            return ""
        except (OSError, msgspec.DecodeError):  # it ended
            self._leave()
            return ""

    def _take_name(self) -> bool:
        """Become the first; False: another one is."""
        listener = _socket()
        try:
            listener.bind(self._name)
            listener.listen(GUESTS)
        except OSError:
            listener.close()
            return False
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)
        return True

    def _connect(self) -> None:
        """Find the first; where there is none that can be spoken to, this time the bucket is pulled."""
        first = _socket()
        try:
            first.connect(self._name)
            if not _is_ours(first):
                raise PermissionError("another user's")
        except OSError:
            first.close()
        else:
            self._first = first

    def _leave(self) -> None:
        if self._first is not None:
            self._first.close()
        self._first = self._theirs = None

    # As the first -----------------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        try:
            guest, _ = listener.accept()
        except OSError:  # it went away again
            return
        if not _is_ours(guest):
            guest.close()
            return
        guest.setblocking(False)
        self._guests[guest] = None
        asyncio.get_running_loop().add_reader(guest, self._hear, guest)

    def _hear(self, guest: socket.socket) -> None:
        try:
            question = _QUESTION.decode(guest.recv(FRAME_LIMIT))
        except BlockingIOError:
            return
        except (OSError, msgspec.DecodeError):  # it ended, or is none of us
            self._drop(guest)
            return
        self._guests[guest] = question
        self._reconsider()

    def _reconsider(self) -> None:
        """Answer every question that has an answer by now."""
        for guest, question in list(self._guests.items()):
            if question is None:
                continue
            version, indices = self._held.get(question.slot, (-1, set()))
            if version == question.version and question.index in indices:
                self._answer(guest, question, self._memory.path)
            elif not question.wait or version > question.version:
                self._answer(guest, question, "")

    def _answer(self, guest: socket.socket, question: Question, path: str) -> None:
        self._guests[guest] = None
        try:
            guest.send(_ENCODER.encode(Answer(question.number, path)))
        except OSError:  # it ended, or reads nothing
            self._drop(guest)

    def _drop(self, guest: socket.socket) -> None:
        del self._guests[guest]
        asyncio.get_running_loop().remove_reader(guest)
        guest.close()

    def close(self) -> None:
        """Give the name back, and end all connections. Idempotent."""
        self._leave()
        for guest in list(self._guests):
            self._drop(guest)
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None


def this_host() -> str:
    """What processes have in common that share a kernel and its network interfaces."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}/{os.environ.get(HOST_VARIABLE, '')}"


def same_network(one: str, other: str) -> bool:
    """Whether loopback leads from one ``this_host`` to the other."""
    return one.split("/")[:2] == other.split("/")[:2]


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setblocking(False)
    return made


def _is_ours(peer: socket.socket) -> bool:
    """Whether a process of the same user is at the other end: anybody on this host can use such a name."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.getuid())
