"""Arrays, trajectories and groups of every kind, for the tests of what travels."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from streamrl.buffers.wire.dtypes import DTYPES
from streamrl.buffers.wire.groups import STANDARD
from streamrl.types import Group, Trajectory, VersionSpans

# A deadline or a limit on slow draws would make the tests fail on a busy machine.
settings.register_profile("codec", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("codec")

SHAPES = [(), (0,), (1,), (3,), (2, 3), (4, 1, 2), (2, 0, 3), (5, 0)]

names = st.text(min_size=1, max_size=6)
finite = st.floats(allow_nan=False, allow_infinity=False, width=32)


def of_bytes(data: bytes, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """An array with these bytes; as bool, their lowest bits."""
    raw = np.frombuffer(data, np.uint8)
    return (raw & 1 if dtype == "bool" else raw).copy().view(DTYPES[dtype]).reshape(shape)


@st.composite
def arrays(draw: st.DrawFn, dtype: str) -> np.ndarray:
    """Any bits of that dtype (NaN payloads too), any shape, contiguous or not."""
    shape = draw(st.sampled_from(SHAPES))
    size = int(np.prod(shape)) * DTYPES[dtype].itemsize
    array = of_bytes(draw(st.binary(min_size=size, max_size=size)), dtype, shape)
    match draw(st.sampled_from(["as it is", "transposed", "strided", "reversed"])):
        case "transposed":
            return array.T
        case "strided" if array.ndim:
            return np.repeat(array, 2, axis=-1)[..., ::2]
        case "reversed" if array.ndim:
            return array[::-1]
    return array


@st.composite
def rows(draw: st.DrawFn) -> list[dict[str, np.ndarray]]:
    """Up to four trajectories' columns: each of one dtype, jagged, missing here and there."""
    count = draw(st.integers(0, 4))
    made: list[dict[str, np.ndarray]] = [{} for _ in range(count)]
    for name in draw(st.lists(names, unique=True, max_size=4)):
        dtype = draw(st.sampled_from(list(DTYPES)))
        for row in made:
            if draw(st.integers(0, 3)):
                row[name] = draw(arrays(dtype))
    return made


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | finite | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@st.composite
def groups(draw: st.DrawFn) -> Group:
    """Groups that a buffer accepts, of any shape: also without trajectories, and with trajectories without tokens."""
    user_columns = draw(rows())
    trajectories = [draw(trajectories_with(columns)) for columns in user_columns]
    return Group(draw(st.integers(0, 2**50)), draw(st.integers(0, 2**50)), draw(st.text(max_size=9)), trajectories)


@st.composite
def trajectories_with(draw: st.DrawFn, columns: dict[str, np.ndarray]) -> Trajectory:
    length = draw(st.sampled_from([0, 1, 2, 7, 40]))
    sampled = np.array(draw(st.lists(st.booleans(), min_size=length, max_size=length)), dtype=bool)
    runs = len([place for place in range(length) if sampled[place] and not (place and sampled[place - 1])])
    spans, left = [], int(sampled.sum())
    while left:
        spans.append((draw(st.integers(0, 2**40)), draw(st.integers(1, left))))
        left -= spans[-1][1]
    return Trajectory(
        tokens=np.array(draw(st.lists(st.integers(0, 2), min_size=length, max_size=length)), dtype=np.int32),
        sampled=sampled,
        behaviour=np.array(draw(st.lists(finite, min_size=length, max_size=length)), dtype=np.float32),
        versions=spans,
        reward=draw(finite),
        turns=draw(st.integers(0, 9)),
        truncated=draw(st.booleans()),
        metrics=draw(st.dictionaries(st.text(max_size=5), finite, max_size=2)),
        columns={name: array for name, array in columns.items() if name not in STANDARD},
        metadata=draw(st.dictionaries(st.text(max_size=5), plain, max_size=2)),
        turn_rewards=draw(st.sampled_from([[], [0.5] * runs])),
    )


def trajectory(versions: VersionSpans, prompt: tuple[int, ...] = (1, 2, 3), **others: Any) -> Trajectory:
    """A prompt, then as many sampled tokens 7 as ``versions`` counts."""
    count = sum(n for _, n in versions)
    return Trajectory(
        tokens=np.array([*prompt, *[7] * count], dtype=np.int32),
        sampled=np.array([False] * len(prompt) + [True] * count),
        behaviour=np.array([0.0] * len(prompt) + [-0.5] * count, dtype=np.float32),
        versions=versions,
        **({"reward": 1.0} | others),
    )


def same_array(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal in dtype, shape and every bit."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def same_rows(a: list[dict[str, np.ndarray]], b: list[dict[str, np.ndarray]]) -> bool:
    return len(a) == len(b) and all(
        x.keys() == y.keys() and all(same_array(x[name], y[name]) for name in x) for x, y in zip(a, b, strict=True)
    )


def as_row(one: Trajectory) -> dict[str, np.ndarray]:
    return {"tokens": one.tokens, "sampled": one.sampled, "behaviour": one.behaviour} | one.columns


def episodes_of(group: Group) -> list[int]:
    """As they arrive: without one each trajectory is one of its own."""
    return [place if each.episode < 0 else each.episode for place, each in enumerate(group.trajectories)]


def same_group(a: Group, b: Group) -> bool:
    """Equal in everything; arrays in every bit."""
    rest = [
        [
            (t.versions, t.reward, t.turns, t.truncated, t.metrics, t.metadata, t.turn_rewards, episode)
            for t, episode in zip(group.trajectories, episodes_of(group), strict=True)
        ]
        for group in (a, b)
    ]
    named = (a.lease, a.prompt, a.env) == (b.lease, b.prompt, b.env)
    arrays_equal = same_rows([as_row(t) for t in a.trajectories], [as_row(t) for t in b.trajectories])
    return named and arrays_equal and rest[0] == rest[1]
