from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sync_support import socket_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    """For sockets and weights, with a path that is short enough for a socket."""
    with socket_folder() as endpoint:
        yield Path(endpoint.removeprefix("ipc://")).parent
