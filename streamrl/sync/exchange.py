"""The publisher's socket: frames in and out, and what is no message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import zmq
import zmq.asyncio

from streamrl.errors import WireError
from streamrl.sync import messages as wire

OnEvent = Callable[[str, dict[str, Any]], None]


class Exchange:
    """A ROUTER that hands every message to ``take(identity, message)``, and answers what cannot be decoded.

    A ``WireError`` of ``take`` counts as a malformed frame too.
    """

    def __init__(self, endpoint: str, take: Callable[[bytes, wire.ToPublisher], None], on_event: OnEvent) -> None:
        self.malformed_frames = 0
        self._endpoint = endpoint
        self._take = take
        self._on_event = on_event
        self._socket: zmq.asyncio.Socket | None = None

    async def run(self) -> None:
        """Own the socket until cancelled."""
        socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        try:
            socket.linger = 0
            socket.router_mandatory = True  # a member that is gone is an error of the send, not a silent loss
            socket.router_handover = True  # a member that reconnects takes its identity along
            socket.maxmsgsize = wire.FRAME_LIMIT
            socket.bind(self._endpoint)
            self._socket = socket
            while True:
                identity, *frames = await socket.recv_multipart()
                self._receive(identity, frames)
        finally:
            self._socket = None
            socket.close()

    def transmit(self, identity: bytes, message: wire.Message) -> bool:
        """Send without waiting; False when the peer is gone or has left a thousand messages unread."""
        if self._socket is None:
            return False
        sent = self._socket.send_multipart([identity, wire.encode(message)], zmq.NOBLOCK)
        # With NOBLOCK the future that pyzmq returns is settled already: EHOSTUNREACH, EAGAIN or done.
        return cast("asyncio.Future[None]", sent).exception() is None

    def _receive(self, identity: bytes, frames: list[bytes]) -> None:
        try:
            if len(frames) != 1:
                raise WireError(f"weight sync: expected one frame per message, got {len(frames)}")
            message = wire.decode_to_publisher(frames[0])
            if isinstance(message, wire.Refused):
                self._on_event("frame_refused", {"by": wire.readable(identity), "reason": message.reason})
            else:
                self._take(identity, message)
        except WireError as error:
            self.malformed_frames += 1
            self._on_event("malformed_frame", {"sender": wire.readable(identity), "reason": str(error)})
            self.transmit(identity, wire.Refused(reason=str(error)))
