"""Settings of the weight plane: contradictions, and which transport ``auto`` stands for."""

from __future__ import annotations

from streamrl import nixl
from streamrl.errors import ConfigError
from streamrl.schema import Config

WITHOUT_DELTA = {
    "shm": "maps the trainer's memory, so that nothing travels",
    "disk": "writes files that anything can read, which hold whole tensors",
    "nixl": "reads the trainer's memory, which holds whole tensors",
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
    if transport == "nixl":
        nixl.require("sync.transport=nixl")
    if config.sync.stage == "device":
        _check_device(config)
    if config.sync.on_mismatch == "rollback":
        _check_rollback(config)


def _check_device(config: Config) -> None:
    """Of ``sync.stage=device``, for engines that can take weights only while they are paused."""
    reason = ""
    if config.engine.name == "sglang":
        reason = "engine.name=sglang: SGLang takes weights only while it is paused"
    elif config.engine.urls:
        reason = "engine.urls: a server that somebody else started keeps no second set of weights"
    elif config.model.lora.rank:
        reason = f"model.lora.rank={config.model.lora.rank}: adapters are too small to be worth a second set of weights"
    if reason:
        raise ConfigError(f"sync.stage=device with {reason}; set sync.stage=host")


def most_rejections(config: Config) -> int:
    """Versions in a row that a canary may reject while pacing still grants enough for the next batch.

    At version v with v − r published, (max_lag + 1 − r)·G uses of groups are left, a group has at most
    ``epochs_per_group`` of them, and a batch takes G different groups (``staleness.py``, **Replay**).
    """
    return config.max_lag + 1 - config.buffer.epochs_per_group


def _check_rollback(config: Config) -> None:
    epochs = config.buffer.epochs_per_group
    if most_rejections(config) < 1:
        replayed = f" and buffer.epochs_per_group={epochs}" if epochs > 1 else ""
        raise ConfigError(
            f"sync.on_mismatch=rollback with max_lag={config.max_lag}{replayed}: engines back at the version before "
            f"would sample nothing that may be trained on; set max_lag={epochs} or more, or sync.on_mismatch=stop"
        )
    if config.staleness.target_ess:
        raise ConfigError(
            f"sync.on_mismatch=rollback with staleness.target_ess={config.staleness.target_ess:g}: steering may leave "
            "engines back at the version before nothing to sample, and the run would stand still; set "
            "staleness.target_ess=0, or sync.on_mismatch=stop"
        )
