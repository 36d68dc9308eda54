"""The sockets of the chain (``chain.py``): the trainer's, and one of each host.

The trainer's lies beside the publisher's own, where nobody else can reach it: ``<endpoint>-chain``.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from typing import cast

import msgspec
import zmq
import zmq.asyncio

from streamrl.sync.transport import BucketId
from streamrl.sync.transports.chain import Chain, Orders, Progress, Refused, Source

FRAME_LIMIT = 1 << 16
"""Bytes; ZeroMQ drops the connection of a peer that sends more. An address takes less than 1 KiB for each interface."""

log = logging.getLogger(__name__)

_ENCODER = msgspec.msgpack.Encoder()
_TO_TRAINER: msgspec.msgpack.Decoder[Progress | Refused] = msgspec.msgpack.Decoder(Progress | Refused)
_TO_RECEIVER: msgspec.msgpack.Decoder[Source | Refused] = msgspec.msgpack.Decoder(Source | Refused)


class ChainHub:
    """The trainer's socket: keeps a chain for each version that is on offer. All methods belong to the event loop.

    ``buckets``: of a version. ``patience_s``: see ``Chain``.
    """

    def __init__(self, endpoint: str, buckets: int, patience_s: float) -> None:
        self.address = f"{endpoint}-chain"
        self.malformed_frames = 0
        self._buckets = buckets
        self._patience_s = patience_s
        self._members: set[str] = set()
        self._chains: dict[int, Chain] = {}
        """By version: one for each slot at most."""
        self._socket: zmq.asyncio.Socket | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        try:
            socket.linger = 0
            socket.router_mandatory = True  # one that is gone is an error of the send
            socket.maxmsgsize = FRAME_LIMIT
            socket.bind(self.address)
            self._socket = socket
            while True:
                identity, *frames = await socket.recv_multipart()
                self._receive(identity, frames)
        finally:
            self._socket = None
            if self._timer is not None:
                self._timer.cancel()
            socket.close()

    def set_members(self, names: set[str]) -> None:
        """Who takes part from now on."""
        gone, self._members = self._members - names, set(names)
        for name in gone:
            self._drop(name)

    def begin(self, session: str, version: int) -> None:
        """A version starts to arrive; nothing changes for one that did."""
        if version not in self._chains:
            self._chains[version] = Chain(session, version, self._buckets, self._patience_s)

    def offered(self, version: int, count: int) -> None:
        """Its first ``count`` buckets can be read here."""
        self._chains[version].offered(count, self._now())
        self._arm()

    def withdraw(self, version: int) -> None:
        self._chains.pop(version, None)

    def _receive(self, identity: bytes, frames: list[bytes]) -> None:
        try:
            if len(frames) != 1:
                raise msgspec.DecodeError(f"expected one frame, got {len(frames)}")
            word = _TO_TRAINER.decode(frames[0])
        except msgspec.DecodeError as error:
            self.malformed_frames += 1
            log.warning("chain: %r sent what is no message: %s", identity, error)
            self._transmit(identity, Refused(str(error)))
            return
        if isinstance(word, Progress):
            self._take(identity, word)

    def _take(self, identity: bytes, word: Progress) -> None:
        member = member_of(identity)
        chain = self._chains.get(word.version)
        if chain is None or chain.session != word.session or member not in self._members:
            if word.asks:
                self._transmit(identity, Source(word.session, word.version, self._buckets, b""))
            return
        if word.failed:
            log.warning("chain: %s failed to get version %d, and passes on no more of it", member, word.version)
        self._follow(chain, chain.progress(member, identity, word, self._now()))

    def _follow(self, chain: Chain, orders: Orders) -> None:
        """Send them; who is gone leaves that chain, and those behind are told, however many went at once."""
        if self._socket is None:
            return  # nobody can be told any more
        waiting = deque(orders)
        while waiting:
            identity, source = waiting.popleft()
            if not self._transmit(identity, source):
                member = member_of(identity)
                log.warning("chain: %s is gone, and passes on no more of version %d", member, chain.version)
                waiting.extend(chain.left(member, self._now()))
        self._arm()

    def _drop(self, member: str) -> None:
        for chain in list(self._chains.values()):
            self._follow(chain, chain.left(member, self._now()))

    def _transmit(self, identity: bytes, message: Source | Refused) -> bool:
        """Send without waiting; False when the peer is gone or has left a thousand messages unread."""
        if self._socket is None:
            return False
        sent = self._socket.send_multipart([identity, _ENCODER.encode(message)], zmq.NOBLOCK)
        return cast("asyncio.Future[None]", sent).exception() is None  # with NOBLOCK it is settled already

    def _arm(self) -> None:
        """Have the next that may stand still looked at; patience is one for all, so none is due before that."""
        due = min((chain.due for chain in self._chains.values()), default=math.inf)
        if self._timer is None and due < math.inf and self._socket is not None:
            self._timer = asyncio.get_running_loop().call_at(due, self._expire)

    def _expire(self) -> None:
        self._timer = None
        for chain in list(self._chains.values()):
            still, orders = chain.expire(self._now())
            for member in still:
                log.warning("chain: %s got nothing of version %d for %g s", member, chain.version, self._patience_s)
            self._follow(chain, orders)
        self._arm()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


class ChainEnd:
    """A host's socket. All methods belong to the event loop. ``patience_s``: for the next bucket to be there."""

    def __init__(self, address: str, identity: str, patience_s: float) -> None:
        self._address = address
        self._identity = identity.encode()
        self._patience_s = patience_s
        self._socket: zmq.asyncio.Socket | None = None
        self._source = Source("", 0, 0, b"")
        """What was last heard about the version that it has a place for."""
        self._alone = False
        """The rest of that version is read from the trainer."""

    async def ask(self, bucket: BucketId, own: bytes) -> bytes:
        """Where to read a bucket, as soon as it is there; empty: in the trainer's memory.

        ``own``: where others can read what this host has; with the first bucket of a version, which asks for a place.
        """
        if bucket.index == 0:
            self._source, self._alone = Source(bucket.session, bucket.version, 0, b""), False
            self._say(Progress(bucket.session, bucket.version, 0, own))
        elif not self._concerns(bucket):
            return b""
        try:
            async with asyncio.timeout(self._patience_s):
                while self._source.count <= bucket.index and not self._alone:
                    await self._hear()
        except TimeoutError:
            log.warning("chain: no bucket %d of version %d in time; the trainer is read", bucket.index, bucket.version)
            self.give_up()
        return b"" if self._alone else self._source.address

    def has(self, bucket: BucketId) -> None:
        """It is here, as are all before it."""
        if self._concerns(bucket):
            self._say(Progress(bucket.session, bucket.version, bucket.index + 1))

    def fails(self, bucket: BucketId) -> None:
        """It could not be had."""
        if self._concerns(bucket):
            self._say(Progress(bucket.session, bucket.version, bucket.index, failed=True))

    def give_up(self) -> None:
        """Read the rest of the version from the trainer; whoever reads here reads on."""
        self._alone = True
        self._say(Progress(self._source.session, self._source.version, 0, alone=True))

    def close(self) -> None:
        """Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _concerns(self, bucket: BucketId) -> bool:
        return (self._source.session, self._source.version) == (bucket.session, bucket.version)

    def _say(self, word: Progress | Refused) -> None:
        if self._socket is None:
            self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
            self._socket.linger = 0
            self._socket.maxmsgsize = FRAME_LIMIT
            self._socket.identity = self._identity
            self._socket.connect(self._address)
        # Settled at once. A trainer that has left a thousand words unread learns from the next one.
        cast("asyncio.Future[None]", self._socket.send(_ENCODER.encode(word), zmq.NOBLOCK)).exception()

    async def _hear(self) -> None:
        assert self._socket is not None, "it has asked"
        frames = await self._socket.recv_multipart()
        try:
            if len(frames) != 1:
                raise msgspec.DecodeError(f"expected one frame, got {len(frames)}")
            word = _TO_RECEIVER.decode(frames[0])
        except msgspec.DecodeError as error:
            word = Refused(str(error))
            self._say(word)
        if isinstance(word, Refused):
            log.warning("chain: %s; the trainer is read", word.reason)
            self.give_up()
        elif (word.session, word.version) == (self._source.session, self._source.version):
            self._source = word
            self._alone = self._alone or not word.address


def identity_of(member: str, life: str) -> str:
    """Of one receiver of a member."""
    return f"{member}#{life}"


def member_of(identity: bytes) -> str:
    return identity.decode(errors="backslashreplace").rpartition("#")[0]
