"""Who takes part: the baseline in its variants, streamrl in its settings, and the peers that were asked for."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from streamrl.bench.queue.stage import Contender

_HERE = "streamrl.bench.queue"


def _raw(frames: str, transport: str) -> Contender:
    bytes_of = {"arrays": "array frames", "packed": "packed", "narrow": "streamrl's bytes"}[frames]
    name = f"raw pyzmq, {bytes_of}, {transport}"
    return Contender(name, f"{_HERE}.raw_zmq", {"transport": transport, "frames": frames})


def _ours(backend: str, transport: str, journal: bool) -> Contender:
    name = f"streamrl {backend}, {transport}{', journal' if journal else ''}"
    options = {"backend": backend, "transport": transport, "journal": journal}
    return Contender(name, f"{_HERE}.ours", options, serves=True, shares=True)


RAW = [_raw(frames, transport) for frames in ("arrays", "packed") for transport in ("ipc", "tcp")]
"""With the field's bytes. The fastest of them is the baseline."""
RAW_NARROW = _raw("narrow", "ipc")
"""So that a reader sees how much of a difference comes from the representation alone."""
ZMQ, ZMQ_JOURNAL = _ours("zmq", "ipc", False), _ours("zmq", "ipc", True)
ZMQ_TCP = _ours("zmq", "tcp", False)
NIXL, NIXL_JOURNAL = _ours("nixl", "ipc", False), _ours("nixl", "ipc", True)

PEERS = {
    "mp": Contender("multiprocessing.Queue", f"{_HERE}.peer_mp", shares=True),
    "redis": Contender("redis streams", f"{_HERE}.peer_redis", serves=True),
    "ray": Contender("ray object store", f"{_HERE}.peer_ray", serves=True),
    "transferqueue": Contender("TransferQueue of verl", f"{_HERE}.peer_transferqueue", serves=True),
}
"""By what ``--peer`` calls them."""


def ours() -> list[Contender]:
    """streamrl in its settings; without the NIXL backend, and a line that says so, where NIXL is not installed."""
    return [ZMQ, ZMQ_JOURNAL, ZMQ_TCP, *with_nixl(NIXL, NIXL_JOURNAL)]


def with_nixl(*contenders: Contender) -> list[Contender]:
    """These if NIXL is installed; otherwise none, and a line that says so."""
    if importlib.util.find_spec("nixl") is not None:
        return list(contenders)
    print("NIXL rows are left out: nixl is not installed; pip install 'streamrl[nixl]'", file=sys.stderr)
    return []


def peers(names: Sequence[str]) -> list[Contender]:
    """Those that were asked for. Raises ``ConfigError`` where one is not installed, before anything runs."""
    chosen = [PEERS[name] for name in dict.fromkeys(names)]
    for contender in chosen:
        importlib.import_module(contender.module).check_installed()
    return chosen


def with_options(contender: Contender, **options: Any) -> Contender:
    """The same with further options."""
    return replace(contender, options=contender.options | options)
