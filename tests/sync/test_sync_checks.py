"""Settings of transports: what ``auto`` stands for, and what does not go together."""

from __future__ import annotations

import sys

import pytest

from streamrl.config import load_config
from streamrl.errors import ConfigError
from streamrl.sync_checks import choose_transport
from streamrl.validation import derived_bounds


def test_auto_is_shared_memory_and_says_why() -> None:
    config = load_config("base", [])
    assert choose_transport(config) == (
        "shm",
        "all rollouters run on the trainer's host: they read its memory, and nothing travels",
    )
    assert str(derived_bounds(config)["weights travel by"]).startswith("shm – all rollouters run on")


def test_a_transport_that_is_named_is_taken() -> None:
    assert choose_transport(load_config("base", ["sync.transport=disk"])) == ("disk", "sync.transport names it")


@pytest.mark.parametrize("transport", ["auto", "shm", "disk", "nixl"])
def test_deltas_are_refused_where_whole_tensors_lie_or_nothing_travels(transport: str) -> None:
    with pytest.raises(ConfigError, match=r"sync.encoding=delta .*; set sync.encoding=full, or sync.transport=zmq"):
        load_config("base", [f"sync.transport={transport}", "sync.encoding=delta"])


@pytest.mark.parametrize("transport", ["zmq", "collective"])
def test_deltas_go_with_what_carries_bytes(transport: str) -> None:
    assert load_config("base", [f"sync.transport={transport}", "sync.encoding=delta"]).sync.encoding == "delta"


def test_a_transport_that_is_not_there_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="sync.transport=carrier-pigeon: expected one of auto, shm, zmq, collective, disk, nixl"
    ):
        load_config("base", ["sync.transport=carrier-pigeon"])


def test_nixl_without_its_package_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(
        ConfigError, match=r"sync\.transport=nixl needs the nixl package: pip install 'streamrl\[nixl\]'"
    ):
        load_config("base", ["sync.transport=nixl"])
