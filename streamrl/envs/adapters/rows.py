"""Rows of a prompt file by their number: JSON lines, parquet, or a data set of the ``datasets`` library.

A file of JSON lines is scanned once for its lines and then read a line at a time, so that its size costs no memory;
parquet is held in memory, ``datasets`` maps its files.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec

from streamrl.envs.failure import one_line
from streamrl.errors import ConfigError

Row = dict[str, Any]


class Rows(Protocol):
    """A fixed sequence of rows; ``place`` names one for people."""

    def __len__(self) -> int: ...

    def row(self, number: int) -> Row: ...

    def every(self) -> Iterator[Row]:
        """All rows in order, faster than one by one."""
        ...

    def place(self, number: int) -> str: ...


def open_rows(path: str, split: str) -> Rows:
    """The rows of a file or folder, or of the data set of that name. Raises ``ConfigError`` of one line."""
    where = Path(path).expanduser()
    if where.suffix in (".jsonl", ".ndjson", ".parquet") and not where.is_file():
        raise ConfigError(f"env.args.path={path}: no such file, seen from {Path.cwd()}")
    if where.suffix in (".jsonl", ".ndjson"):
        return JsonLines(where)
    if where.suffix == ".parquet":
        return Parquet(where)
    if where.is_file():
        raise ConfigError(f"env.args.path={path}: expected a file .jsonl, .ndjson or .parquet, got {where.name!r}")
    return Dataset(path, where, split)


class JsonLines:
    """One JSON object per line; empty lines are skipped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts = array("Q")  # bytes
        self._lines = array("Q")  # counted from 1
        with path.open("rb") as file:
            start = 0
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    self._starts.append(start)
                    self._lines.append(number)
                start += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, number: int) -> Row:
        with self._path.open("rb") as file:
            file.seek(self._starts[number])
            return self._decoded(file.readline(), self._lines[number])

    def every(self) -> Iterator[Row]:
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    yield self._decoded(line, number)

    def place(self, number: int) -> str:
        return f"{self._path}:{self._lines[number]}"

    def _decoded(self, line: bytes, number: int) -> Row:
        try:
            row = msgspec.json.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{self._path}:{number}: not valid JSON: {error}") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{self._path}:{number}: expected an object with columns, got {type(row).__name__}")
        return row


class Parquet:
    """A parquet file, held in memory as Arrow columns."""

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow
            from pyarrow import parquet
        except ModuleNotFoundError as error:
            raise ConfigError(f"{path}: {error.name} is not installed; pip install 'streamrl[data]'") from error
        self._path = path
        try:
            self._table = parquet.read_table(path)
        except (pyarrow.ArrowException, OSError) as error:
            raise ConfigError(f"{path}: cannot be read as parquet: {one_line(error)}") from error

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def row(self, number: int) -> Row:
        row: Row = self._table.slice(number, 1).to_pylist()[0]
        return row

    def every(self) -> Iterator[Row]:
        for batch in self._table.to_batches(max_chunksize=1_000):
            yield from batch.to_pylist()

    def place(self, number: int) -> str:
        return f"{self._path} row {number}"


class Dataset:
    """A folder that ``datasets`` saved or can load, or a data set's name."""

    def __init__(self, name: str, folder: Path, split: str) -> None:
        try:
            import datasets
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"env.args.path={name}: no such file; for a data set of that name pip install 'streamrl[data]'"
            ) from error
        self._name = f"{name}[{split}]"
        saved = any((folder / each).is_file() for each in ("state.json", "dataset_dict.json"))
        try:
            if saved:
                loaded = datasets.load_from_disk(str(folder))
                self._rows = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
            else:
                self._rows = datasets.load_dataset(name, split=split)
        except Exception as error:
            raise ConfigError(
                f"env.args.path={name}: datasets cannot load split {split!r}: {one_line(error)}"
            ) from error

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int) -> Row:
        row: Row = self._rows[number]
        return row

    def every(self) -> Iterator[Row]:
        yield from self._rows

    def place(self, number: int) -> str:
        return f"{self._name} row {number}"
