"""Replies by the content of their requests: the newest in memory, all of them in a file where one is given."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streamrl.errors import ConfigError, EnvironmentFailed

BUSY_S = 10.0
"""Seconds to wait for another process that writes to the file."""


class ScoreCache:
    """At most ``size`` replies in memory, the least recently used goes first. Any thread may use it.

    ``path``: a SQLite file that keeps all of them; processes may share it. Raises ``ConfigError`` where it cannot be
    used.
    """

    def __init__(self, size: int, path: str = "") -> None:
        if size < 0:
            raise ConfigError(f"cache_size={size}: must be at least 0")
        self._size = size
        self._path = path
        self._lock = threading.Lock()
        self._newest: OrderedDict[str, str] = OrderedDict()
        self._file = self._open() if path else None

    @staticmethod
    def name(content: Mapping[str, Any]) -> str:
        """The same for the same content, and for no other."""
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def get(self, name: str) -> str | None:
        """The reply, or None. Raises ``EnvironmentFailed`` where the file cannot be read."""
        with self._lock:
            if name in self._newest:
                self._newest.move_to_end(name)
                return self._newest[name]
            if not self._path:
                return None
            try:
                row = self._connected().execute("SELECT reply FROM replies WHERE name = ?", (name,)).fetchone()
            except sqlite3.Error as error:
                raise EnvironmentFailed(f"judge: cache_path={self._path}: {error}") from error
            if row is not None:
                self._remember(name, row[0])
            return None if row is None else str(row[0])

    def put(self, name: str, reply: str) -> None:
        """Keep it. Raises ``EnvironmentFailed`` where the file cannot be written."""
        with self._lock:
            self._remember(name, reply)
            if not self._path:
                return
            try:
                with self._connected() as transaction:
                    transaction.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (name, reply))
            except sqlite3.Error as error:
                raise EnvironmentFailed(f"judge: cache_path={self._path}: {error}") from error

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _remember(self, name: str, reply: str) -> None:
        self._newest[name] = reply
        self._newest.move_to_end(name)
        while len(self._newest) > self._size:
            self._newest.popitem(last=False)

    def _connected(self) -> sqlite3.Connection:
        if self._file is None:
            self._file = self._open()
        return self._file

    def _open(self) -> sqlite3.Connection:
        try:
            Path(self._path).parent.mkdir(parents=True, exist_ok=True)
            file = sqlite3.connect(self._path, timeout=BUSY_S, check_same_thread=False)
            file.execute("PRAGMA journal_mode = WAL")
            file.execute("PRAGMA synchronous = NORMAL")
            with file:
                file.execute("CREATE TABLE IF NOT EXISTS replies (name TEXT PRIMARY KEY, reply TEXT NOT NULL)")
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(f"cache_path={self._path}: cannot be used: {error}") from error
        return file
