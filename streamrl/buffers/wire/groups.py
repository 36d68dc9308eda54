"""Groups to their description and payload and back (C3), and what a buffer checks on arrival.

A group's standard columns are ``tokens`` int32 ``[T]``, ``sampled`` bool ``[T]`` and ``behaviour`` float32 ``[T]`` per
trajectory; the user's columns follow under their own names. Rewards, versions and the like are in the description.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from streamrl.buffers.wire.dtypes import as_array
from streamrl.buffers.wire.messages import GroupMeta, Part, TrajectoryMeta, encoder
from streamrl.buffers.wire.payload import (
    Payload,
    Placed,
    column_arrays,
    pack_columns,
    place,
    unpack_columns,
    whole_column,
)
from streamrl.errors import WireError
from streamrl.types import Group, TrainGroup, Trajectory

STANDARD = ("tokens", "sampled", "behaviour")
"""Columns that every trajectory has."""
STANDARD_DTYPES = {"tokens": np.dtype(np.int32), "sampled": np.dtype(np.bool_), "behaviour": np.dtype(np.float32)}

MAX_METADATA_BYTES = 1 << 16
"""Per trajectory, encoded: descriptions pass through the buffer's memory; what is larger belongs in a column."""
MAX_METADATA_DEPTH = 16


def pack_group(group: Group) -> tuple[GroupMeta, Payload]:
    """Description and payload of a group.

    Raises ``WireError`` for standard columns of other shapes or of values that do not fit their dtype, user columns
    that take a standard name or that ``pack_columns`` refuses, and metadata that is not plain, too deep or too large.
    """
    rows = [_row(index, trajectory) for index, trajectory in enumerate(group.trajectories)]
    columns, payload = pack_columns(rows)
    episodes = _episodes(group.trajectories)
    metas = [_describe(index, each, episodes[index]) for index, each in enumerate(group.trajectories)]
    shared = _shared([row["tokens"] for row in rows], [row["sampled"] for row in rows])
    return GroupMeta(group.lease, group.prompt, group.env, shared, metas, columns, payload.nbytes), payload


def unpack_group(
    meta: GroupMeta, payload: Payload, names: Collection[str] | None = None, rows: Sequence[int] | None = None
) -> Group:
    """The group with the trajectories of ``unpack_trajectories``."""
    return Group(meta.lease, meta.prompt, meta.env, unpack_trajectories(meta, payload, names, rows))


def unpack_trajectories(
    meta: GroupMeta, payload: Payload, names: Collection[str] | None = None, rows: Sequence[int] | None = None
) -> list[Trajectory]:
    """Trajectories with read-only views of the payload.

    ``names``: the wanted user columns, all by default; those that a trajectory does not have are left out. ``rows``:
    the wanted trajectories in the wanted order. Raises ``WireError`` where description and columns do not fit each
    other; what the columns hold is for ``check_group``, once per group.
    """
    _check_standard(meta, place(meta.columns, payload.nbytes))
    wanted = None if names is None else {*STANDARD, *names}
    found = unpack_columns(meta.columns, payload, wanted, rows)
    described = meta.trajectories if rows is None else [meta.trajectories[row] for row in rows]
    return [_trajectory(one, row) for one, row in zip(described, found, strict=True)]


def unpack_part(part: Part, meta: GroupMeta, payload: Payload, names: Collection[str] | None = ()) -> TrainGroup:
    """What a micro-batch holds of a group; ``names`` as in ``unpack_trajectories``. Raises ``WireError``."""
    trajectories = unpack_trajectories(meta, payload, names, part.rows)
    return TrainGroup(part.lease, meta.env, trajectories, np.asarray(part.advantages), np.asarray(part.token_weights))


def check_description(meta: GroupMeta) -> None:
    """Check what a description says without its payload: rewards and metadata. Raises ``WireError``."""
    for index, one in enumerate(meta.trajectories):
        if not math.isfinite(one.reward):
            raise WireError(f"trajectory {index}: expected a finite reward, got {one.reward}")
        if not all(map(math.isfinite, one.turn_rewards)):
            raise WireError(f"trajectory {index}: expected finite turn rewards, got {str(one.turn_rewards)[:80]}")
        _check_metadata(index, one.metadata)


def check_group(meta: GroupMeta, payload: Payload) -> None:
    """Check a received description against its standard columns; user columns stay unread. Raises ``WireError``.

    What a number may be alone (counts and versions from 0, spans of at least 1) the header's decoder has checked.
    """
    if meta.nbytes != payload.nbytes:
        raise WireError(f"group: expected a payload of {meta.nbytes} bytes, as described, got {payload.nbytes}")
    standard = _check_standard(meta, place(meta.columns, payload.nbytes))
    tokens, sampled = (_arrays(one, payload) for one in standard[:2]) if standard else ([], [])
    if standard:
        _check_values(standard[0], payload, lambda values: values.min() >= 0, "ids from 0")
        _check_values(standard[2], payload, lambda values: np.isfinite(values).all(), "finite log-probs")
    check_description(meta)
    for index, one in enumerate(meta.trajectories):
        count = np.count_nonzero(sampled[index])
        if count != one.sampled:
            raise WireError(
                f"trajectory {index}: expected spans of {count} tokens, all sampled ones, got {one.sampled}"
            )
        if one.turn_rewards and len(one.turn_rewards) != (runs := _runs(sampled[index])):
            raise WireError(
                f"trajectory {index}: expected a turn reward for each of {runs} runs of sampled tokens, "
                f"got {len(one.turn_rewards)}"
            )
    shared = _shared(tokens, sampled)
    if meta.shared != shared:
        raise WireError(f"group: expected a shared prompt of {shared} tokens, as its columns say, got {meta.shared}")


def shared_prompt_length(trajectories: Sequence[Trajectory]) -> int:
    """Leading tokens that all trajectories share and none of them sampled: what a packed group computes once."""
    return _shared([one.tokens for one in trajectories], [one.sampled for one in trajectories])


# Packing ------------------------------------------------------------------------------------------------------------


def _row(index: int, trajectory: Trajectory) -> dict[str, Any]:
    row = {
        "tokens": _standard(index, "tokens", trajectory.tokens),
        "sampled": _standard(index, "sampled", trajectory.sampled),
        "behaviour": _standard(index, "behaviour", trajectory.behaviour),
    }
    lengths = tuple(len(array) for array in row.values())
    if len(set(lengths)) != 1:
        raise WireError(f"trajectory {index}: tokens, sampled, behaviour differ in length: {lengths}")
    for name in trajectory.columns:
        if name in STANDARD:
            raise WireError(f"trajectory {index}: expected user columns beside {', '.join(STANDARD)}, got {name!r}")
    return row | trajectory.columns


def _standard(index: int, name: str, value: Any) -> np.ndarray:
    array, dtype = as_array(value, name), STANDARD_DTYPES[name]
    if array.ndim != 1 or not np.can_cast(array.dtype, dtype, "same_kind"):
        raise WireError(f"trajectory {index}: expected {name} as {dtype} [T], got {array.dtype} {list(array.shape)}")
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore"):  # a log-prob that became infinite is refused on arrival
        converted = array.astype(dtype)
    if name == "tokens" and (converted != array).any():
        raise WireError(f"trajectory {index}: expected tokens that fit int32, got {array.min()} to {array.max()}")
    return converted


def _episodes(trajectories: Sequence[Trajectory]) -> list[int]:
    """The episode of each, where each may be one of its own."""
    episodes = [int(each.episode) for each in trajectories]
    own = sum(each < 0 for each in episodes)
    if 0 < own < len(episodes):
        raise WireError(f"group: expected the episode of all trajectories or of none, got {str(episodes)[:80]}")
    return list(range(len(episodes))) if own else episodes


def _runs(sampled: np.ndarray) -> int:
    """Runs of sampled tokens."""
    return int(np.count_nonzero(sampled[1:] & ~sampled[:-1])) + bool(len(sampled) and sampled[0])


def _describe(index: int, trajectory: Trajectory, episode: int) -> TrajectoryMeta:
    try:
        metrics = {name: float(value) for name, value in trajectory.metrics.items()}
    except (TypeError, ValueError) as error:
        raise WireError(f"trajectory {index}: expected metrics that are numbers: {error}") from None
    _check_metadata(index, trajectory.metadata)
    return TrajectoryMeta(
        len(trajectory.tokens),
        [(int(version), int(count)) for version, count in trajectory.versions],
        float(trajectory.reward),
        int(trajectory.turns),
        bool(trajectory.truncated),
        metrics,
        trajectory.metadata,
        episode,
        [float(value) for value in trajectory.turn_rewards],
    )


def _check_metadata(index: int, metadata: Mapping[str, Any]) -> None:
    """Plain values only, so that what arrives is what was sent (but tuples arrive as lists)."""
    if not metadata:
        return
    for key, value in metadata.items():
        problem = "a key that is not a string" if type(key) is not str else _unplain(value, MAX_METADATA_DEPTH - 1)
        if problem:
            raise WireError(
                f"trajectory {index}: expected metadata {str(key)[:40]!r} of nested dicts, lists, strings, bytes, "
                f"numbers up to 64 bits, bools and None, at most {MAX_METADATA_DEPTH} deep, got {problem}"
            )
    try:
        size = len(encoder.encode(metadata))
    except UnicodeEncodeError as error:
        raise WireError(f"trajectory {index}: expected metadata of Unicode text: {error}") from None
    if size > MAX_METADATA_BYTES:
        largest = max(metadata, key=lambda key: len(encoder.encode(metadata[key])))
        raise WireError(
            f"trajectory {index}: expected metadata of at most {MAX_METADATA_BYTES} bytes, got {size}, most of them in "
            f"{largest[:40]!r}; send arrays as columns"
        )


def _unplain(value: Any, depth: int) -> str | None:
    """What is wrong with a value of the metadata; ``None`` where nothing is."""
    kind = type(value)
    if value is None or kind in (bool, float, str, bytes):
        return None
    if kind is int:
        return None if -(1 << 63) <= value < 1 << 64 else f"{value.bit_length()} bits"
    if kind not in (dict, list, tuple):
        return f"{kind.__module__}.{kind.__name__}"
    if not depth:
        return "more"
    if kind is dict:
        if any(type(key) is not str for key in value):
            return "a key that is not a string"
        value = value.values()
    return next((problem for item in value if (problem := _unplain(item, depth - 1))), None)


# Checking -----------------------------------------------------------------------------------------------------------


def _check_standard(meta: GroupMeta, placed: Sequence[Placed]) -> list[Placed]:
    """The standard columns in their order; none for a group without trajectories."""
    count = len(meta.trajectories)
    if meta.columns and len(meta.columns[0].shapes) != count:
        raise WireError(f"group: expected columns of {count} trajectories, got {len(meta.columns[0].shapes)}")
    if not meta.columns and not count:
        return []
    found = {one.column.name: one for one in placed if one.column.name in STANDARD}
    lengths = [[one.length] for one in meta.trajectories]
    for name, dtype in STANDARD_DTYPES.items():
        if name not in found:
            raise WireError(f"group: expected the columns {', '.join(STANDARD)}, got no {name}")
        if found[name].dtype != dtype:
            raise WireError(f"column {name}: expected {dtype}, got {found[name].dtype}")
        if found[name].column.shapes != lengths:
            wrong = next(index for index, shape in enumerate(found[name].column.shapes) if shape != lengths[index])
            raise WireError(
                f"column {name}: expected shape {lengths[wrong]} for trajectory {wrong}, as described, "
                f"got {str(found[name].column.shapes[wrong])[:80]}"
            )
    return [found[name] for name in STANDARD]


def _arrays(one: Placed, payload: Payload) -> list[np.ndarray]:
    return [array for array in column_arrays(one, payload) if array is not None]


def _check_values(one: Placed, payload: Payload, holds: Callable[[np.ndarray], np.bool_], expected: str) -> None:
    whole = whole_column(one, payload)
    for values in _arrays(one, payload) if whole is None else [whole]:
        if values.size and not holds(values):
            raise WireError(f"column {one.column.name}: expected {expected}, got something else")


def _shared(tokens: Sequence[np.ndarray], sampled: Sequence[np.ndarray]) -> int:
    if not tokens:
        return 0
    shared = min(map(_prompt_length, sampled))
    first = tokens[0]
    for other in tokens[1:]:
        # Comparing bytes is ten times as fast as comparing arrays, and nearly always all that is needed.
        if first[:shared].tobytes() != other[:shared].tobytes():
            differs = first[:shared] != other[:shared]
            if differs.any():
                shared = int(differs.argmax())
    return shared


def _prompt_length(sampled: np.ndarray) -> int:
    first = int(sampled.argmax()) if len(sampled) else 0
    return first if first or (len(sampled) and sampled[0]) else len(sampled)


def _trajectory(meta: TrajectoryMeta, row: dict[str, np.ndarray]) -> Trajectory:
    return Trajectory(
        row.pop("tokens"),
        row.pop("sampled"),
        row.pop("behaviour"),
        meta.spans,
        meta.reward,
        meta.turns,
        meta.truncated,
        meta.metrics,
        row,
        meta.metadata,
        meta.episode,
        meta.turn_rewards,
    )
