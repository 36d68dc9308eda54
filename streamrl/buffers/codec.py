"""Messages to frames and back: a msgspec header, then one raw frame per tensor (C3). Large tensors are not copied.

Any number of trajectories travels as six columns, so a message has about seven frames whatever it carries. With N
trajectories, T tokens and S version spans in all::

    tokens int32 [T] · sampled bool [T] · behaviour float32 [T] · spans int64 [S, 2] (version, count)
    rows int64 [N, 4] (length, spans, turns, truncated) · rewards float64 [N]

Decoding checks every frame against its declared dtype and shape and every column against the others; the arrays it
returns are read-only views of the received frames. Whatever is wrong raises ``WireError`` in one line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from streamrl.buffers.messages import SCHEMA, Batch, Body, Header, PutRequest, decoder, encoder, prefix_decoder
from streamrl.errors import WireError
from streamrl.types import Group, RankBatch, TrainGroup, Trajectory

Frame = bytes | memoryview
Tensors = dict[str, np.ndarray]

MAX_HEADER_BYTES = 1 << 22
"""A batch's header takes about 40 bytes per group, so this is 100,000 groups."""
MAX_FRAME_BYTES = 1 << 29
"""The largest column is the tokens: 4 of a trajectory's 9 bytes per token, of ``buffer.max_bytes`` (1 GiB)."""
MAX_MESSAGE_BYTES = 1 << 30
"""What one message may make the receiver allocate: the default ``buffer.max_bytes``, for a batch that is all of it."""
MAX_TENSORS = 16
COPY_BELOW_BYTES = 1 << 16
"""Smaller frames are copied: cheaper than tracking their owner, and a view would pin the whole receive buffer."""

DTYPES = {name: np.dtype(name) for name in ("<i4", "<i8", "<f4", "<f8", "|b1")}

COLUMNS = {"tokens": "<i4", "sampled": "|b1", "behaviour": "<f4", "spans": "<i8", "rows": "<i8", "rewards": "<f8"}
BATCH_COLUMNS = COLUMNS | {"advantages": "<f8", "token_weights": "<f8"}


# Messages -----------------------------------------------------------------------------------------------------------


def encode(body: Body, request: int, sent_s: float, tensors: Tensors | None = None) -> list[Frame]:
    """Frames of one message, header first. Raises ``WireError`` when it is over a size limit."""
    specs: list[tuple[str, str, list[int]]] = []
    frames: list[Frame] = [b""]
    for name, array in (tensors or {}).items():
        specs.append((name, array.dtype.str, list(array.shape)))
        frames.append(_to_frame(array))
    frames[0] = encoder.encode(Header(SCHEMA, request, sent_s, body, specs))
    check_sizes(frames)
    return frames


def check_sizes(frames: Sequence[Frame]) -> int:
    """Bytes of a message; ``WireError`` when a frame, the header or the whole is over its limit."""
    sizes = [len(frame) for frame in frames]
    if not sizes or len(sizes) > MAX_TENSORS + 1:
        raise WireError(f"message: expected 1 to {MAX_TENSORS + 1} frames, got {len(sizes)}")
    for what, got, limit in (
        ("header", sizes[0], MAX_HEADER_BYTES),
        ("largest frame", max(sizes), MAX_FRAME_BYTES),
        ("message", sum(sizes), MAX_MESSAGE_BYTES),
    ):
        if got > limit:
            raise WireError(f"{what}: expected at most {limit} bytes, got {got}; use shorter or fewer trajectories")
    return sum(sizes)


def decode(frames: Sequence[Frame]) -> tuple[Header, Tensors]:
    """Header and named tensors of a message. Raises ``WireError``."""
    check_sizes(frames)
    header = _decode_header(frames[0])
    if len(header.tensors) != len(frames) - 1:
        raise WireError(
            f"message: expected {len(header.tensors)} tensor frames as its header says, got {len(frames) - 1}"
        )
    tensors: Tensors = {}
    for (name, dtype, shape), frame in zip(header.tensors, frames[1:], strict=True):
        tensors[name] = _from_frame(name, dtype, shape, frame)
    return header, tensors


def request_id(frames: Sequence[Frame]) -> int:
    """Request id of a message that ``decode`` refused, as far as it can be read; −1 otherwise."""
    try:
        return prefix_decoder.decode(frames[0]).request
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, IndexError):
        return -1


def _decode_header(frame: Frame) -> Header:
    try:
        header = decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        _check_schema(frame)
        raise WireError(f"header: {str(error).splitlines()[0]}") from None
    if header.schema != SCHEMA:
        _check_schema(frame)
    return header


def _check_schema(frame: Frame) -> None:
    try:
        schema = prefix_decoder.decode(frame).schema
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    if schema != SCHEMA:
        raise WireError(f"header: expected schema {SCHEMA}, got {schema}; run the same streamrl on both ends")


def _to_frame(array: np.ndarray) -> Frame:
    if array.nbytes < COPY_BELOW_BYTES:
        return array.tobytes()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _from_frame(name: str, dtype_name: str, shape: list[int], frame: Frame) -> np.ndarray:
    dtype = DTYPES.get(dtype_name)
    if dtype is None:
        raise WireError(f"tensor {name[:40]!r}: expected a dtype of {', '.join(DTYPES)}, got {dtype_name[:40]!r}")
    if len(shape) > 2 or any(size < 0 for size in shape):
        raise WireError(f"tensor {name[:40]!r}: expected a shape of one or two sizes from 0, got {shape[:4]}")
    if math.prod(shape) * dtype.itemsize != len(frame):
        raise WireError(f"tensor {name[:40]!r}: expected {dtype_name} {shape} to fill its frame of {len(frame)} bytes")
    array = np.frombuffer(frame, dtype=dtype)
    if not array.flags.aligned:
        array = array.copy()
    array.flags.writeable = False
    return array.reshape(shape)


# Trajectories -------------------------------------------------------------------------------------------------------


def pack_trajectories(trajectories: Sequence[Trajectory]) -> Tensors:
    """The six columns. Raises ``WireError`` when arrays of one trajectory differ in length."""
    for index, trajectory in enumerate(trajectories):
        lengths = (len(trajectory.tokens), len(trajectory.sampled), len(trajectory.behaviour))
        if len(set(lengths)) != 1:
            raise WireError(f"trajectory {index}: tokens, sampled, behaviour differ in length: {lengths}")
    spans = [span for trajectory in trajectories for span in trajectory.versions]
    rows = [(len(t.tokens), len(t.versions), t.turns, t.truncated) for t in trajectories]
    return {
        "tokens": _concatenate([t.tokens for t in trajectories], np.int32),
        "sampled": _concatenate([t.sampled for t in trajectories], np.bool_),
        "behaviour": _concatenate([t.behaviour for t in trajectories], np.float32),
        "spans": np.array(spans, dtype=np.int64).reshape(-1, 2),
        "rows": np.array(rows, dtype=np.int64).reshape(-1, 4),
        "rewards": np.array([t.reward for t in trajectories], dtype=np.float64),
    }


def _concatenate(arrays: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate(arrays, dtype=dtype, casting="same_kind") if arrays else np.zeros(0, dtype=dtype)


def pack_metrics(trajectories: Sequence[Trajectory]) -> list[dict[str, float]]:
    """Environment numbers per trajectory; ``[]`` when there are none."""
    metrics = [trajectory.metrics for trajectory in trajectories]
    return metrics if any(metrics) else []


def unpack_trajectories(tensors: Tensors, metrics: list[dict[str, float]]) -> list[Trajectory]:
    """The trajectories of six columns, as views. Raises ``WireError`` where the columns contradict each other."""
    rows = _check_columns(tensors)
    if metrics and len(metrics) != len(rows):
        raise WireError(f"metrics: expected none or {len(rows)}, one per trajectory, got {len(metrics)}")
    tokens, sampled, behaviour = tensors["tokens"], tensors["sampled"], tensors["behaviour"]
    spans = list(map(tuple, tensors["spans"].tolist()))
    rewards = tensors["rewards"].tolist()
    trajectories = []
    start = span = 0
    for index, (length, span_count, turns, truncated) in enumerate(rows):
        end, span_end = start + length, span + span_count
        trajectories.append(
            Trajectory(
                tokens[start:end],
                sampled[start:end],
                behaviour[start:end],
                spans[span:span_end],
                rewards[index],
                turns,
                bool(truncated),
                metrics[index] if metrics else {},
            )
        )
        start, span = end, span_end
    return trajectories


def _check_columns(tensors: Tensors) -> list[list[int]]:
    tokens, sampled, behaviour = tensors["tokens"], tensors["sampled"], tensors["behaviour"]
    spans, rows, rewards = tensors["spans"], tensors["rows"], tensors["rewards"]
    total = len(tokens)
    _expect(
        tokens.ndim == 1 and tokens.shape == sampled.shape == behaviour.shape, "tokens, sampled, behaviour", "[T] each"
    )
    _expect(rewards.ndim == 1 and rows.shape == (len(rewards), 4), "rows", "[N, 4] beside rewards [N]")
    _expect(spans.ndim == 2 and spans.shape[1] == 2, "spans", "[S, 2]")
    _expect(not total or tokens.min() >= 0, "tokens", "ids from 0")
    _expect(not total or sampled.view(np.uint8).max() <= 1, "sampled", "bytes 0 or 1")
    _expect(bool(np.isfinite(behaviour).all()), "behaviour", "finite log-probs")
    _expect(bool(np.isfinite(rewards).all()), "rewards", "finite numbers")
    if len(rows):
        _expect(rows.min() >= 0 and rows[:, 3].max() <= 1, "rows", "numbers from 0, truncated 0 or 1")
        _expect(rows[:, 0].max() <= total and rows[:, 1].max() <= len(spans), "rows", "lengths within the columns")
    if len(spans):
        _expect(spans[:, 0].min() >= 0, "spans", "versions from 0")
        _expect(spans[:, 1].min() >= 1 and spans[:, 1].max() <= total, "spans", "counts from 1 to T")
    ends, span_ends = rows[:, 0].cumsum(), rows[:, 1].cumsum()
    _expect((int(ends[-1]) if len(ends) else 0) == total, "rows", f"lengths that sum to {total} tokens")
    _expect((int(span_ends[-1]) if len(ends) else 0) == len(spans), "rows", f"span counts that sum to {len(spans)}")
    chosen = _sums_up_to(sampled, ends)
    _expect(
        bool((chosen == _sums_up_to(spans[:, 1], span_ends)).all()), "spans", "counts that sum to the sampled tokens"
    )
    return rows.tolist()


def _sums_up_to(values: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Sum of ``values[:end]`` for each end."""
    return np.concatenate(([0], values.cumsum(dtype=np.int64)))[ends]


def _expect(condition: bool | np.bool_, column: str, expected: str) -> None:
    if not condition:
        raise WireError(f"column {column}: expected {expected}, got something else")


def _check_names(tensors: Tensors, expected: dict[str, str]) -> None:
    got = {name: array.dtype.str for name, array in tensors.items()}
    if got != expected:
        raise WireError(f"tensors: expected {', '.join(f'{k} {v}' for k, v in expected.items())}, got {str(got)[:200]}")


# Groups and batches -------------------------------------------------------------------------------------------------


def pack_group(group: Group) -> tuple[PutRequest, Tensors]:
    """Body and columns of a delivered group."""
    metrics = pack_metrics(group.trajectories)
    return PutRequest(group.lease, group.prompt, group.env, metrics), pack_trajectories(group.trajectories)


def unpack_group(body: PutRequest, tensors: Tensors) -> Group:
    """Inverse of ``pack_group``. Raises ``WireError``."""
    _check_names(tensors, COLUMNS)
    return Group(body.lease, body.prompt, body.env, unpack_trajectories(tensors, body.metrics))


def pack_batch(batch: RankBatch) -> tuple[Batch, Tensors]:
    """Body and columns of what one rank trains on."""
    groups = [group for micro_batch in batch.micro_batches for group in micro_batch]
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    layout = [
        [(group.lease, group.env, len(group.trajectories)) for group in micro_batch]
        for micro_batch in batch.micro_batches
    ]
    tensors = pack_trajectories(trajectories)
    tensors["advantages"] = _concatenate([group.advantages for group in groups], np.float64)
    tensors["token_weights"] = _concatenate([group.token_weights for group in groups], np.float64)
    metrics = pack_metrics(trajectories)
    return Batch(batch.step, batch.version, batch.oldest_allowed, layout, batch.stats, metrics), tensors


def unpack_batch(body: Batch, tensors: Tensors) -> RankBatch:
    """Inverse of ``pack_batch``. Raises ``WireError``."""
    _check_names(tensors, BATCH_COLUMNS)
    trajectories = unpack_trajectories(tensors, body.metrics)
    advantages, weights = tensors["advantages"], tensors["token_weights"]
    total = sum(count for layout in body.micro_batches for _, _, count in layout)
    _expect(advantages.shape == weights.shape == (len(trajectories),) == (total,), "advantages", "one per trajectory")
    _expect(
        bool(np.isfinite(advantages).all() and np.isfinite(weights).all()),
        "advantages, token_weights",
        "finite numbers",
    )
    micro_batches: list[list[TrainGroup]] = []
    start = 0
    for layout in body.micro_batches:
        groups = []
        for lease, env, count in layout:
            part = slice(start, start + count)
            groups.append(TrainGroup(lease, env, trajectories[part], advantages[part], weights[part]))
            start += count
        micro_batches.append(groups)
    return RankBatch(body.step, body.version, body.oldest_allowed, micro_batches, body.stats)
