"""The queue's sockets: a ROUTER at the server, a DEALER in each client (C2–C4, C11), carrying ``codec`` messages.

A client's requests survive a lost connection and a server that dies and comes back: each is kept until it is answered
and sent again, in order, whenever the connection is made anew. The server therefore sees some requests twice; every
request of ``messages.py`` may be carried out twice without harm. Messages that are sent in the same turn of the event
loop travel as one multipart (a bundle).

The sockets are driven by their file descriptor rather than by ``zmq.asyncio``, whose future for every message costs
more than the message. The descriptor is edge-triggered: it tells that something changed, once, and any call on the
socket may take that news away. So after every send, too, the socket is looked at again.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from streamrl.buffers.links.link_keys import LinkKeys
from streamrl.buffers.wire import codec
from streamrl.buffers.wire.codec import Frame
from streamrl.buffers.wire.messages import Body, GenerateRequest, Header, LeaseRequest, Refusal, Withdraw
from streamrl.buffers.wire.payload import Payload
from streamrl.errors import StreamRLError, WireError

HIGH_WATER_MESSAGES = 64
"""Messages queued per peer and direction; beyond it a client's messages wait in the client."""

UNANSWERED = 1 << 14
"""Requests of a client that may wait for their answers (C4); so many answers a server keeps for a client to read."""

BUNDLE_FRAMES = 64
"""Frames of one bundle at most."""

MESSAGES_PER_TURN = 64
"""Received in one turn of the event loop, so that a flood does not starve the rest of the process."""

WITHDRAWN = (LeaseRequest, GenerateRequest)
"""Requests whose server is told when their waiter is cancelled: they cost it something while they wait."""

Context = zmq.Context[zmq.Socket[Any]]

SEND_COPY_BELOW_BYTES = 1 << 20
"""Smaller frames are copied on their way out: pyzmq hands each frame that is not copied to a thread that waits for the
kernel to let go of it, and that costs as much as copying so much."""

RECONNECT_MS, RECONNECT_MAX_MS = 20, 1000
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 5_000, 20_000
"""Of tcp connections: a peer whose host vanished is noticed."""

GONE = (errno.EHOSTUNREACH, errno.EAGAIN)
"""The peer has disconnected, or asks and does not read."""


def sender_name(identity: bytes) -> str:
    """The name that a client gave itself, from its socket identity."""
    return identity.decode(errors="backslashreplace").partition("#")[0]


def _frame(part: zmq.Frame) -> Frame:
    return part.bytes if len(part) < codec.COPY_BELOW_BYTES else part.buffer


def _open(kind: int, context: Context | None, endpoint: str) -> zmq.Socket[Any]:
    socket = (context or zmq.Context.instance()).socket(kind)
    socket.linger = 0
    socket.set_hwm(HIGH_WATER_MESSAGES)
    socket.copy_threshold = SEND_COPY_BELOW_BYTES
    socket.setsockopt(zmq.MAXMSGSIZE, codec.MAX_FRAME_BYTES)
    if endpoint.startswith("tcp"):
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    return socket


class _Reader:
    """Calls ``take`` for every multipart that a socket receives, and ``idle`` whenever there is none left.

    What they raise goes to ``failed``, for a callback of the event loop has no caller.
    """

    def __init__(
        self,
        socket: zmq.Socket[Any],
        take: Callable[[list[zmq.Frame]], None],
        idle: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._socket = socket
        self._take = take
        self._idle = idle
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._scheduled: asyncio.Handle | None = None
        self._loop.add_reader(socket.FD, self.look)
        self.look_soon()  # what came before is no news to the descriptor

    def look(self) -> None:
        """Receive what is there."""
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        try:
            self._receive()
        except Exception as error:  # noqa: BLE001 - whatever it is, somebody has to hear of it
            self._failed(error)

    def _receive(self) -> None:
        for _ in range(MESSAGES_PER_TURN):
            try:
                parts = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                self._idle()
                return
            self._take(parts)
            if self._socket.closed:
                return
        self._idle()  # a flood must not keep those waiting whom the messages so far can answer
        if not self._socket.closed and self._scheduled is None:
            self._scheduled = self._loop.call_soon(self.look)

    def look_soon(self, events: int = zmq.POLLIN) -> None:
        """Look again in the next turn if there is news: a call on the socket may have taken the descriptor's away."""
        if self._scheduled is None and int(self._socket.getsockopt(zmq.EVENTS)) & events:
            self._scheduled = self._loop.call_soon(self.look)

    def close(self) -> None:
        self._loop.remove_reader(self._socket.FD)
        if self._scheduled is not None:
            self._scheduled.cancel()


class ServerLink:
    """A bound ROUTER socket: ``receive(identity, frames)`` gets every multipart, ``send`` never waits.

    ``settled`` is called once after each burst of messages; what the two raise comes out of ``failed``. On the event
    loop only. Raises ``StreamRLError`` where the endpoint cannot be bound.
    """

    def __init__(
        self,
        endpoint: str,
        receive: Callable[[bytes, list[Frame]], None],
        settled: Callable[[], None],
        context: Context | None = None,
        keys: LinkKeys | None = None,
    ) -> None:
        self._receive = receive
        self._authenticator: ThreadAuthenticator | None = None
        self._reader: _Reader | None = None
        self._outbox: dict[bytes, list[Frame]] = {}
        """Answers for the end of this turn, by peer."""
        self._flushing: asyncio.Handle | None = None
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._socket = _open(zmq.ROUTER, context, endpoint)
        self._socket.sndhwm = UNANSWERED
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A client that connects again under its identity takes over from its dead connection.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            if keys is not None:
                self._authenticator = keys.secure_server(self._socket)
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise StreamRLError(f"the queue cannot bind {endpoint}: {error}") from None
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """Where it is bound: with the port, where the system chose one."""
        self._reader = _Reader(self._socket, self._take, settled, self._fail)

    def _take(self, parts: list[zmq.Frame]) -> None:
        self._receive(parts[0].bytes, [_frame(part) for part in parts[1:]])

    def _fail(self, error: Exception) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    async def failed(self) -> None:
        """Until cancelled."""
        await self._failure

    def send_soon(self, identity: bytes, frames: Sequence[Frame]) -> None:
        """With the next ``send`` to this peer, or at the end of this turn: one multipart for many answers."""
        self._outbox.setdefault(identity, []).extend(frames)
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = None
        for identity in list(self._outbox):
            self.send(identity, ())

    def send(self, identity: bytes, frames: Sequence[Frame]) -> bool:
        """False when the peer is gone or does not read; it asks again once it is back."""
        bundle = [identity, *self._outbox.pop(identity, ()), *frames]
        try:
            self._socket.send_multipart(bundle, zmq.DONTWAIT, copy=False)
        except zmq.ZMQError as error:
            if error.errno in GONE:
                return False
            raise
        if self._reader is not None:
            self._reader.look_soon()
        return True

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        if self._flushing is not None:
            self._flushing.cancel()
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()


@dataclass(slots=True)
class _Request:
    """One that is not answered yet."""

    what: str
    frames: list[Frame]
    future: asyncio.Future[tuple[Header, Payload]]


class ClientLink:
    """A connected DEALER socket with pipelined requests: any number of coroutines may wait for answers at once.

    ``unclaimed`` gets an answer whose waiter was cancelled; ``connection`` hears that there is one, or none any more.
    """

    def __init__(
        self,
        endpoint: str,
        name: str,
        now: Callable[[], float],
        *,
        context: Context | None = None,
        unclaimed: Callable[[Body], None] | None = None,
        keys: LinkKeys | None = None,
        checksum: bool = False,
        connection: Callable[[bool], None] = lambda there: None,
    ) -> None:
        self.name = name
        self.resent = 0
        """Requests that were sent again after a lost connection."""
        self.reconnects = 0
        self._now = now
        self._unclaimed = unclaimed
        self._checksum = checksum
        self._connection = connection
        self._numbers = itertools.count()
        self._waiting: dict[int, _Request] = {}
        self._outbox: deque[list[Frame]] = deque()
        """Messages for the end of this turn, or for when the socket has room."""
        self._flushing: asyncio.Handle | None = None
        self._connected_before = False
        self._closed = False
        self._socket = _open(zmq.DEALER, context, endpoint)
        # Unique per connection: an answer to a dead process never reaches its successor of the same name.
        self._socket.setsockopt(zmq.IDENTITY, f"{name}#{uuid.uuid4().hex[:12]}".encode())
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        if keys is not None:
            keys.secure_client(self._socket)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._readers: list[_Reader] = []
        self._socket.connect(endpoint)

    async def request(self, body: Body, payload: Payload | None = None, what: str = "") -> tuple[Header, Payload]:
        """The answer to one request. No time limit of its own: ended by the answer, ``close`` or cancellation.

        Raises ``WireError`` when the server calls the message malformed, ``StreamRLError`` when it refuses it.
        """
        if self._closed:
            raise StreamRLError(f"{self.name}: {what} on a queue client that is closed")
        if len(self._waiting) >= UNANSWERED:
            raise StreamRLError(f"{self.name}: {UNANSWERED} requests wait for answers already; await them first")
        if not self._readers:  # here and not in the constructor, which may run before the event loop does
            self._readers = [
                _Reader(self._socket, self._take, self._flush, self.fail_waiting),
                _Reader(self._monitor, self._heard, lambda: None, self.fail_waiting),
            ]
        number = next(self._numbers)
        frames = codec.encode(
            body, number, self._now(), payload.frames if payload is not None else (), checksum=self._checksum
        )
        future: asyncio.Future[tuple[Header, Payload]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = _Request(what, frames, future)
        self._post(frames)
        try:
            header, answer = await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and self._unclaimed is not None:  # both in one turn
                self._unclaimed(future.result()[0].body)
            if isinstance(body, WITHDRAWN) and number in self._waiting and not self._closed:
                # Nobody waits for it; whatever the server answers now goes to ``unclaimed``.
                withdraw = codec.encode(Withdraw(number), next(self._numbers), self._now())
                self._waiting[number].frames = [*frames, *withdraw]  # as a bundle, should it have to be sent again
                self._post(withdraw)
            raise
        if isinstance(header.body, Refusal):
            raise (WireError if header.body.malformed else StreamRLError)(f"{self.name}: {what}: {header.body.error}")
        return header, answer

    # Sending ----------------------------------------------------------------------------------------------------------

    def _post(self, frames: list[Frame]) -> None:
        self._outbox.append(frames)
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Send what waits, in bundles, until the socket is full; it is tried again when the socket changes."""
        self._flushing = None
        if not self._outbox:
            return
        while self._outbox:
            bundle, messages = list(self._outbox[0]), 1
            while messages < len(self._outbox) and len(bundle) + len(self._outbox[messages]) <= BUNDLE_FRAMES:
                bundle += self._outbox[messages]
                messages += 1
            try:
                self._socket.send_multipart(bundle, zmq.DONTWAIT, copy=False)
            except zmq.Again:
                break
            for _ in range(messages):
                self._outbox.popleft()
        self._readers[0].look_soon(zmq.POLLIN | zmq.POLLOUT if self._outbox else zmq.POLLIN)

    def _heard(self, parts: list[zmq.Frame]) -> None:
        """The connection stands; if it is not the first, whatever is unanswered may have been lost with the last."""
        event = parse_monitor_message([part.bytes for part in parts])["event"]
        if event == zmq.EVENT_DISCONNECTED:
            self._connection(False)
        if event != zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return
        if self._connected_before:
            self.reconnects += 1
            self.resent += len(self._waiting)
            self._outbox.clear()
            for request in self._waiting.values():
                self._post(request.frames)
        self._connected_before = True
        self._connection(True)

    # Receiving --------------------------------------------------------------------------------------------------------

    def _take(self, parts: list[zmq.Frame]) -> None:
        for message in codec.split([_frame(part) for part in parts]):
            try:
                self._resolve(message)
            except WireError as error:
                self.fail_waiting(WireError(f"{self.name}: malformed answer of the queue: {error}"))

    def _resolve(self, frames: list[Frame]) -> None:
        header, payload = codec.decode(frames)
        if (request := self._waiting.pop(header.request, None)) is None:
            if isinstance(header.body, Refusal) and header.request < 0:  # of a request that the server could not read
                self.fail_waiting(WireError(f"{self.name}: {header.body.error}"))
            return  # the second answer to a request that was sent twice
        if not request.future.done():
            request.future.set_result((header, Payload(payload)))
        elif self._unclaimed is not None:
            self._unclaimed(header.body)

    def fail_waiting(self, error: Exception) -> None:
        """Raise ``error`` in every waiting request, and forget them."""
        for request in self._waiting.values():
            if not request.future.done():
                request.future.set_exception(error)
        self._waiting.clear()

    def close(self) -> None:
        """Close the socket; every waiting request raises ``StreamRLError`` that names it."""
        if self._closed:
            return
        self._closed = True
        if self._flushing is not None:
            self._flushing.cancel()
        for reader in self._readers:
            reader.close()
        for request in self._waiting.values():
            if not request.future.done():
                request.future.set_exception(
                    StreamRLError(f"{self.name}: the queue client was closed while it waited for {request.what}")
                )
        self._waiting.clear()
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
