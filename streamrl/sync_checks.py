"""Settings of the weight plane: contradictions, and which transport ``auto`` stands for."""

from __future__ import annotations

from streamrl.errors import ConfigError
from streamrl.schema import Config

WITHOUT_DELTA = {
    "shm": "maps the trainer's memory, so that nothing travels",
    "disk": "writes files that anything can read, which hold whole tensors",
}
"""Transports that take no deltas, and why."""


def choose_transport(config: Config) -> tuple[str, str]:
    """(transport, why) of a run: the one that is named, or the best that is to be had."""
    if config.sync.transport != "auto":
        return config.sync.transport, "sync.transport names it"
    return "shm", "all rollouters run on the trainer's host: they read its memory, and nothing travels"


def check_sync(config: Config) -> None:
    """``ConfigError`` with the first thing that is wrong."""
    transport, _ = choose_transport(config)
    if config.sync.encoding == "delta" and transport in WITHOUT_DELTA:
        raise ConfigError(
            f"sync.encoding=delta with sync.transport={config.sync.transport}: {transport} {WITHOUT_DELTA[transport]}; "
            "set sync.encoding=full, or sync.transport=zmq or collective"
        )
    if config.sync.on_mismatch == "rollback" and config.max_lag == 0:
        raise ConfigError(
            "sync.on_mismatch=rollback with max_lag=0: engines back at the version before would sample nothing "
            "that may be trained on; set max_lag=1 or more, or sync.on_mismatch=stop"
        )
