"""How the actors of a run reach its TransferQueue: addresses, keys, and where payloads lie, from the settings."""

from __future__ import annotations

import time
from pathlib import Path

from streamrl.buffers.links.link_keys import LinkKeys
from streamrl.buffers.links.link_zmq import ClientLink
from streamrl.buffers.queue.clients import QueueConsumer, QueueProducer
from streamrl.buffers.queue.places import Place, Source
from streamrl.buffers.queue.stores import StorePlace, StoreSource
from streamrl.runtime.actor import ActorSpec

KEYS_FILE = "curve"
"""In the run's private socket folder."""


def link_keys(spec: ActorSpec) -> LinkKeys | None:
    """Keys of the run's tcp sockets; sockets in the private folder need none."""
    return LinkKeys.load(Path(spec.ipc_dir, KEYS_FILE)) if spec.config.queue.transport == "tcp" else None


def bind_address(spec: ActorSpec, plane: str) -> str:
    """Where a server of this plane binds: on tcp its first incarnation takes any port of the loopback interface."""
    if spec.config.queue.transport == "tcp":
        return spec.endpoints.get(plane, "tcp://127.0.0.1:*")
    return spec.endpoint(plane)


def store_links(spec: ActorSpec) -> list[ClientLink]:
    """One connection per store; none where the buffer holds payloads itself."""
    shards, keys = spec.config.buffer.shards, link_keys(spec)
    if shards == 1:
        return []
    checksum = spec.config.queue.checksum
    return [
        ClientLink(spec.endpoint(f"store-{index}"), spec.name, time.monotonic, keys=keys, checksum=checksum)
        for index in range(shards)
    ]


def make_producer(spec: ActorSpec) -> QueueProducer:
    """A rollouter's end of the queue."""
    place: Place | None = None
    if spec.config.queue.backend == "nixl":
        from streamrl.buffers.queue.arena_place import ArenaPlace

        place = ArenaPlace(spec.holder, spec.config.queue.arena_bytes)
    elif links := store_links(spec):
        place = StorePlace(links)
    return QueueProducer(
        spec.endpoint("queue"), spec.holder, keys=link_keys(spec), checksum=spec.config.queue.checksum, place=place
    )


def make_consumer(spec: ActorSpec) -> QueueConsumer:
    """A trainer rank's end of the queue."""
    source: Source | None = None
    if spec.config.queue.backend == "nixl":
        from streamrl.buffers.queue.arena_place import ArenaSource

        source = ArenaSource(spec.name)
    elif links := store_links(spec):
        source = StoreSource(links)
    return QueueConsumer(spec.endpoint("queue"), spec.index, spec.config.trainers, keys=link_keys(spec), source=source)
