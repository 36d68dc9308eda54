"""What an episode returned, checked before anything travels: the reward, metrics, user columns and metadata.

Whatever cannot be used raises ``EnvironmentFailed`` in one line that names the metric, the column or the key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np

from streamrl.buffers.wire.dtypes import as_array
from streamrl.buffers.wire.payload import MAX_NAME_CHARACTERS
from streamrl.envs.environment import Reward
from streamrl.errors import EnvironmentFailed, WireError

RESERVED = frozenset({"tokens", "sampled", "behaviour"})
"""Columns that every trajectory has; user columns have other names."""

MAX_COLUMNS = 64
"""Of one trajectory; names and shapes stand in the header that describes its group."""

METADATA_DEPTH = 16
"""Lists and dicts inside each other; it also ends what contains itself."""

METADATA_BYTES = 1 << 12
"""Of one trajectory's metadata as msgpack. It stands in the header of every batch, which may hold thousands."""


def checked_reward(returned: object) -> Reward:
    """What an episode returned, a number or a ``Reward``: floats, ndarray columns, and a copy of the metadata."""
    reward = returned if isinstance(returned, Reward) else Reward(returned)  # type: ignore[arg-type]
    if not _is_finite(reward.value):
        raise EnvironmentFailed(f"the reward must be a finite number or a Reward, got {_named(reward.value)}")
    for name, value in _mapping(reward.metrics, "metrics").items():
        if not _is_finite(value):
            raise EnvironmentFailed(f"metric {name!r} must be a finite number, got {value!r:.80}")
    return Reward(
        float(reward.value),
        {str(name): float(value) for name, value in reward.metrics.items()},
        _columns(_mapping(reward.columns, "columns")),
        _MetadataCopy().of(_mapping(reward.metadata, "metadata"), "metadata", METADATA_DEPTH),
    )


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _named(value: object) -> str:
    """A plain value as it is; of any other object its type, which is the same in all episodes."""
    kind = type(value)
    return f"{value!r:.80}" if kind.__module__ == "builtins" else f"an object of class {kind.__qualname__}"


def _mapping(value: object, name: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise EnvironmentFailed(f"Reward({name}=…) must be a dict with names as keys, got {type(value).__name__}")
    return value


def _columns(columns: Mapping[Any, Any]) -> dict[str, np.ndarray]:
    if len(columns) > MAX_COLUMNS:
        raise EnvironmentFailed(f"columns: expected at most {MAX_COLUMNS}, got {len(columns)}; stack them into fewer")
    return {_column_name(name): _array(name, value) for name, value in columns.items()}


def _column_name(name: object) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARACTERS or not name.isprintable():
        raise EnvironmentFailed(
            f"column {name!r:.80}: a name must be a str of 1 to {MAX_NAME_CHARACTERS} printable characters"
        )
    if name in RESERVED:
        raise EnvironmentFailed(f"column {name!r}: every trajectory has one of this name already; choose another")
    return str(name)


def _array(name: str, value: Any) -> np.ndarray:
    try:
        return as_array(value, name)
    except WireError as error:
        raise EnvironmentFailed(str(error)) from error


class _MetadataCopy:
    """A copy of nested metadata in plain types, so that trajectories share nothing and numpy scalars can be written."""

    def __init__(self) -> None:
        self._left = METADATA_BYTES

    def of(self, value: object, path: str, depth: int) -> Any:
        """``value`` in str, int, float, bool, None, list and dict; ``path`` names it, ``depth`` may still be nested."""
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, bool):
            return self._counted(value, 1, path)
        if isinstance(value, str):
            return self._counted(str(value), 5 + len(self._encoded(value, path)), path)
        if isinstance(value, Integral):
            number = int(value)
            if not -(1 << 63) <= number < 1 << 64:
                bits = number.bit_length()
                raise EnvironmentFailed(f"{path}: expected an int of 64 bits, got one of {bits}; write it as a str")
            return self._counted(number, 9, path)
        if isinstance(value, Real):
            return self._counted(float(value), 9, path)
        if not isinstance(value, Mapping | list | tuple):
            raise EnvironmentFailed(
                f"{path}: expected str, int, float, bool, None, list or dict, got {type(value).__name__}; "
                "arrays belong into columns"
            )
        if depth == 0:
            raise EnvironmentFailed(f"{path:.80}: nested more than {METADATA_DEPTH} deep, or contains itself")
        self._counted(value, 5, path)
        if isinstance(value, Mapping):
            return {
                self._key(key, path): self.of(each, f"{path}[{key!r:.40}]", depth - 1) for key, each in value.items()
            }
        return [self.of(each, f"{path}[{place}]", depth - 1) for place, each in enumerate(value)]

    def _key(self, key: object, path: str) -> str:
        if not isinstance(key, str):
            raise EnvironmentFailed(f"{path}: keys must be str, got {key!r:.40}")
        return self._counted(str(key), 5 + len(self._encoded(key, path)), path)

    def _counted(self, value: Any, nbytes: int, path: str) -> Any:
        self._left -= nbytes
        if self._left < 0:
            raise EnvironmentFailed(
                f"{path}: a trajectory has at most {METADATA_BYTES} bytes of metadata; large data belong into columns"
            )
        return value

    def _encoded(self, text: str, path: str) -> bytes:
        try:
            return text.encode()
        except UnicodeEncodeError as error:
            raise EnvironmentFailed(f"{path}: {text!r:.40} is not valid Unicode") from error
