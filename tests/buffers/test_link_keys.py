"""Keys of tcp sockets: who has the run's key is served, anybody else never gets a message through (C11)."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio
from buffer_support import Ring, over_sockets
from zmq.utils.monitor import parse_monitor_message

from streamrl.buffers.links.link_keys import LinkKeys
from streamrl.buffers.wire import codec
from streamrl.buffers.wire.messages import LeaseRequest

RUN = LinkKeys.new()


def test_a_key_file_is_for_its_owner_alone_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    RUN.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert LinkKeys.load(path) == RUN
    with pytest.raises(FileExistsError):
        LinkKeys.new().save(path)
    assert LinkKeys.load(path) == RUN


def no_keys(socket: zmq.Socket[Any]) -> None:
    pass


def keys_of_another_run(socket: zmq.Socket[Any]) -> None:
    LinkKeys.new().secure_client(socket)


def the_servers_public_key_alone(socket: zmq.Socket[Any]) -> None:
    """It is no secret on the wire; a stranger may know it."""
    LinkKeys.new().secure_client(socket)
    socket.curve_serverkey = RUN.public


@pytest.mark.parametrize("disguise", [no_keys, keys_of_another_run, the_servers_public_key_alone])
def test_a_stranger_is_never_served(disguise: Any) -> None:
    async def conversation(ring: Ring) -> None:
        stranger = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        stranger.linger = 0
        disguise(stranger)
        failed = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        monitor = stranger.get_monitor_socket(failed | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            stranger.connect(ring.endpoint)
            await stranger.send_multipart(codec.encode(LeaseRequest(1), 0, 0.0))
            event = parse_monitor_message(await monitor.recv_multipart())
            assert event["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED
            assert len(await ring.producer("rollouter-0").lease(1)) == 1
            assert not await stranger.poll(0)
            assert ring.server.statistics()["queue/messages"] == 1
            assert ring.buffer.ledger.issued == 1
        finally:
            stranger.disable_monitor()
            monitor.close()
            stranger.close()

    over_sockets(conversation, transport="tcp", keys=RUN)
