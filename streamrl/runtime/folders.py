"""Where a run puts its files: the run folder, and the private folder of its sockets."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

from streamrl.config import to_yaml
from streamrl.errors import ConfigError
from streamrl.schema import Config

MINIMUM_FREE_BYTES = 16 << 20
"""A run that starts with less would die on its first checkpoint or log."""
PROCESS_FILE = "process.json"
"""In the run folder: host and number of the run's process, whose end is the run's."""
_SOCKET_PREFIX = "streamrl-"
_LONGEST_FOLDER = 80
"""Bytes of a socket folder's path; the kernel takes 107 for a whole socket address."""


def default_run_dir(config: Config) -> Path:
    return Path("runs") / f"{config.run}-{time.strftime('%Y%m%d-%H%M%S')}"


def create_run_folder(path: Path, config: Config) -> Path:
    """Make ``path`` with ``config.yaml`` in it; ``ConfigError`` where it is in use, unwritable or on a full disk."""
    if (path / "config.yaml").exists():
        raise ConfigError(f"--run-dir {path}: already holds a run; choose another folder or remove this one")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"--run-dir {path}: exists and is not an empty folder; choose another one")
    try:
        path.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(path).free
        if free < MINIMUM_FREE_BYTES:
            raise ConfigError(
                f"--run-dir {path}: {free >> 10} KiB free on this disk, a run needs {MINIMUM_FREE_BYTES >> 20} MiB; "
                "free some space or choose another folder"
            )
        (path / "logs").mkdir()
        (path / PROCESS_FILE).write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}) + "\n")
        (path / "config.yaml").write_text(to_yaml(config))
    except OSError as error:
        raise ConfigError(f"--run-dir {path}: cannot be written ({error.strerror}); choose another folder") from error
    return path


def is_alive(pid: int | str) -> bool:
    """Whether this machine's process ``pid`` runs; a dead one that nobody has waited for yet (a zombie) does not."""
    try:
        stat = Path("/proc", str(pid), "stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b") ")[2][:1] not in (b"Z", b"X")


def create_socket_folder() -> str:
    """A new folder of mode 0700 with a short path. The spawner removes it, or the next run if that was killed too."""
    parent = tempfile.gettempdir()
    if len(parent) > _LONGEST_FOLDER - 2 * len(_SOCKET_PREFIX):
        parent = "/tmp"
    _sweep(Path(parent))
    folder = tempfile.mkdtemp(prefix=_SOCKET_PREFIX, dir=parent)
    (Path(folder) / "owner").write_text(str(os.getpid()))
    return folder


def _sweep(parent: Path) -> None:
    """Remove socket folders of this user whose run is gone without a trace (all its processes killed at once)."""
    for owner in parent.glob(f"{_SOCKET_PREFIX}*/owner"):
        try:
            gone = owner.stat().st_uid == os.getuid() and not is_alive(owner.read_text())
        except OSError:
            continue  # removed by its own run meanwhile, or not ours
        if gone:
            shutil.rmtree(owner.parent, ignore_errors=True)
