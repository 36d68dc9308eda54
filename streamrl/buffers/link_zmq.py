"""The transfer queue's sockets: a ROUTER in the buffer, a DEALER in each client (C3, C4), carrying ``codec`` frames.

Both ends have a high-water mark and linger 0. Frames from 64 kB travel without a copy on either side.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import uuid
from collections.abc import Callable

import zmq
import zmq.asyncio

from streamrl.buffers import codec
from streamrl.buffers.codec import Frame, Tensors
from streamrl.buffers.messages import Body, Header, LeaseRequest, Refusal, Withdraw
from streamrl.errors import StreamRLError, WireError

HIGH_WATER_MESSAGES = 64
"""Messages queued per peer and direction; beyond it a client's send waits."""

GONE = (errno.EHOSTUNREACH, errno.EAGAIN)
"""The peer has disconnected, or reads none of its answers."""


def sender_name(identity: bytes) -> str:
    """The name that a client gave itself, from its socket identity."""
    return identity.decode(errors="backslashreplace").partition("#")[0]


def _frame(part: zmq.Frame) -> Frame:
    return part.bytes if len(part) < codec.COPY_BELOW_BYTES else part.buffer


def _send_now(socket: zmq.asyncio.Socket, frames: list[Frame]) -> BaseException | None:
    """Send without waiting; the error if that fails."""
    sent = socket.send_multipart(frames, flags=zmq.DONTWAIT, copy=False)
    assert isinstance(sent, asyncio.Future)
    if not sent.done():  # earlier messages wait for room
        sent.cancel()
        return zmq.Again()
    return sent.exception()


class ServerLink:
    """A bound ROUTER socket. ``receive`` belongs to one task; ``send`` never waits and may be called between."""

    def __init__(self, endpoint: str, context: zmq.asyncio.Context | None = None) -> None:
        self._socket: zmq.asyncio.Socket = (context or zmq.asyncio.Context.instance()).socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.set_hwm(HIGH_WATER_MESSAGES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, codec.MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            raise StreamRLError(f"the transfer queue cannot bind {endpoint}: {error}") from None

    async def receive(self) -> tuple[bytes, list[Frame]]:
        """Identity of the sender and its frames, unchecked. Ended by cancellation."""
        identity, *parts = await self._socket.recv_multipart(copy=False)
        return identity.bytes, [_frame(part) for part in parts]

    def send(self, identity: bytes, frames: list[Frame]) -> bool:
        """False when the peer is gone or does not read."""
        error = _send_now(self._socket, [identity, *frames])
        if error is None:
            return True
        if isinstance(error, zmq.ZMQError) and error.errno in GONE:
            return False
        raise error

    def close(self) -> None:
        self._socket.close()


class ClientLink:
    """A connected DEALER socket with pipelined requests: any number of coroutines may wait for answers at once.

    ``unclaimed`` gets an answer whose waiter was cancelled.
    """

    def __init__(
        self,
        endpoint: str,
        name: str,
        now: Callable[[], float],
        context: zmq.asyncio.Context | None = None,
        unclaimed: Callable[[Body], None] | None = None,
    ) -> None:
        self.name = name
        self._endpoint = endpoint
        self._now = now
        self._unclaimed = unclaimed
        self._requests = itertools.count()
        self._waiting: dict[int, tuple[str, asyncio.Future[tuple[Header, Tensors]]]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._closed = False
        self._socket: zmq.asyncio.Socket = (context or zmq.asyncio.Context.instance()).socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.set_hwm(HIGH_WATER_MESSAGES)
        # Unique per connection: an answer to a dead process never reaches its successor of the same name.
        self._socket.setsockopt(zmq.IDENTITY, f"{name}#{uuid.uuid4().hex[:12]}".encode())
        self._socket.connect(endpoint)

    async def request(self, body: Body, tensors: Tensors | None = None, what: str = "") -> tuple[Header, Tensors]:
        """The answer to one request. No time limit of its own: ended by the answer, ``close`` or cancellation.

        Raises ``WireError`` when the server calls the message malformed, ``StreamRLError`` when it refuses it.
        """
        if self._closed:
            raise StreamRLError(f"{self.name}: {what} on a transfer queue client that is closed")
        number = next(self._requests)
        frames = codec.encode(body, number, self._now(), tensors)
        future: asyncio.Future[tuple[Header, Tensors]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = (what, future)
        if self._reader is None:
            self._reader = asyncio.create_task(self._read(), name=f"{self.name}: answers of the transfer queue")
        try:
            await self._socket.send_multipart(frames, copy=False)
        except BaseException:  # cancellation too: nobody will wait for the answer
            self._waiting.pop(number, None)
            raise
        try:
            header, answer = await future
        except asyncio.CancelledError:
            if isinstance(body, LeaseRequest):
                self._withdraw(number)
            raise
        if isinstance(header.body, Refusal):
            raise (WireError if header.body.malformed else StreamRLError)(f"{self.name}: {what}: {header.body.error}")
        return header, answer

    def _withdraw(self, number: int) -> None:
        """Tell the server that nobody waits for these leases. Never waits; a full socket keeps the request open."""
        if not self._closed:
            frames = codec.encode(Withdraw(number), next(self._requests), self._now())
            _send_now(self._socket, frames)

    async def _read(self) -> None:
        try:
            while True:
                parts = await self._socket.recv_multipart(copy=False)
                try:
                    self._resolve([_frame(part) for part in parts])
                except WireError as error:
                    self._fail_all(WireError(f"{self.name}: malformed answer of the transfer queue: {error}"))
        except Exception as error:  # noqa: BLE001 whatever ends this task, its waiters must learn it
            self._closed = True
            self._fail_all(StreamRLError(f"{self.name}: the transfer queue's answers ended: {error!r}"))

    def _resolve(self, frames: list[Frame]) -> None:
        header, tensors = codec.decode(frames)
        if header.request not in self._waiting:
            if isinstance(header.body, Refusal):  # the server could not tell which request it could not read
                self._fail_all(WireError(f"{self.name}: {header.body.error}"))
            return
        _, future = self._waiting.pop(header.request)
        if not future.done():
            future.set_result((header, tensors))
        elif self._unclaimed is not None:
            self._unclaimed(header.body)

    def _fail_all(self, error: Exception) -> None:
        for _, future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
        self._waiting.clear()

    def close(self) -> None:
        """Close the socket; every waiting request raises ``StreamRLError`` that names it."""
        self._closed = True
        if self._reader is not None:
            self._reader.cancel()
        for what, future in self._waiting.values():
            if not future.done():
                future.set_exception(
                    StreamRLError(f"{self.name}: the transfer queue client was closed while it waited for {what}")
                )
        self._waiting.clear()
        self._socket.close()
