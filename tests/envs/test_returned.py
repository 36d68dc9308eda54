"""What an episode returns beside its reward travels with the trajectory, or fails it by name."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import lease, runner, says, settings

from streamrl.buffers.wire.payload import MAX_NAME_CHARACTERS
from streamrl.envs.environment import Reward
from streamrl.envs.returned import (
    MAX_COLUMNS,
    METADATA_BYTES,
    METADATA_DEPTH,
    RESERVED,
    checked_reward,
)
from streamrl.errors import EnvironmentFailed
from streamrl.types import Trajectory

EPISODE = """
from streamrl.envs import Reward

async def returns(task, policy, *, columns={}, metadata={}):
    await policy.complete("1=")
    return Reward(1.0, {"hints": 2}, columns, metadata)
"""


@pytest.fixture(autouse=True)
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_rewards.py").write_text(EPISODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "user_rewards", raising=False)


def played(columns: Mapping[Any, Any], metadata: Mapping[Any, Any]) -> list[Trajectory]:
    """The trajectories of an episode that returned these; their failures fail the test."""
    config = settings("user_rewards:returns", columns=columns, metadata=metadata)
    result = asyncio.run(runner(config, says("1$")).run_group(lease(2)))
    assert result.failures == []
    assert result.group is not None
    return result.group.trajectories


def refused(**parts: Any) -> str:
    with pytest.raises(EnvironmentFailed) as caught:
        checked_reward(Reward(1.0, **parts))
    reason = str(caught.value)
    assert "\n" not in reason
    return reason


def test_columns_and_metadata_travel_with_every_trajectory_of_the_group() -> None:
    experts = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)
    metadata = {"puzzle": {"size": (3, 4), "name": "Käse"}, "solved": True, "trace": [None, -1, 0.5]}
    for trajectory in played({"experts": experts, "loss/scale": 0.25}, metadata):
        assert list(trajectory.columns) == ["experts", "loss/scale"]
        np.testing.assert_array_equal(trajectory.columns["experts"], experts, strict=True)
        np.testing.assert_array_equal(trajectory.columns["loss/scale"], np.array(0.25), strict=True)
        assert trajectory.metadata == {
            "puzzle": {"size": [3, 4], "name": "Käse"},
            "solved": True,
            "trace": [None, -1, 0.5],
        }
        assert trajectory.metrics == {"hints": 2.0}
        assert trajectory.nbytes == trajectory.length * (4 + 1 + 4) + 24 + 8


def test_a_number_brings_neither_columns_nor_metadata() -> None:
    assert checked_reward(1) == Reward(1.0)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3)])
def test_an_array_of_any_shape_and_number_type_is_kept_as_it_is(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, dtype=dtype)
    np.testing.assert_array_equal(checked_reward(Reward(1.0, columns={"x": array})).columns["x"], array, strict=True)


def test_what_is_not_finite_may_stand_in_a_column() -> None:
    array = np.array([math.nan, -math.inf, 1.0], dtype=np.float32)
    np.testing.assert_array_equal(checked_reward(Reward(1.0, columns={"x": array})).columns["x"], array, strict=True)


def test_a_torch_tensor_is_a_column_without_a_copy() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(6, dtype=torch.int64).reshape(2, 3).T
    kept = checked_reward(Reward(1.0, columns={"x": tensor})).columns["x"]
    np.testing.assert_array_equal(kept, np.array([[0, 3], [1, 4], [2, 5]], dtype=np.int64), strict=True)
    tensor[0, 0] = 9
    assert kept[0, 0] == 9


def test_a_bfloat16_tensor_keeps_its_type() -> None:
    torch = pytest.importorskip("torch")
    kept = checked_reward(Reward(1.0, columns={"x": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)})).columns["x"]
    assert str(kept.dtype) == "bfloat16"
    assert kept.astype(np.float32).tolist() == [1.5, -2.0]


@pytest.mark.parametrize("value", [np.array([{}, 1], dtype=object), object(), {"a": 1}])
def test_what_is_no_array_of_numbers_fails_by_the_columns_name(value: object) -> None:
    assert refused(columns={"good": np.zeros(1), "experts": value}).startswith("column 'experts': ")


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_a_column_cannot_take_the_name_of_one_that_every_trajectory_has(name: str) -> None:
    reason = refused(columns={name: np.zeros(1)})
    assert reason == f"column {name!r}: every trajectory has one of this name already; choose another"


def test_the_reserved_names_are_the_arrays_of_a_trajectory() -> None:
    arrays = {name for name, kind in Trajectory.__annotations__.items() if kind == "np.ndarray"}
    assert arrays == RESERVED


@pytest.mark.parametrize("name", [3, "", "a\nb", "x" * (MAX_NAME_CHARACTERS + 1), "\ud800", None])
def test_a_column_needs_a_name(name: object) -> None:
    reason = refused(columns={name: np.zeros(1)})
    assert reason == (f"column {name!r:.80}: a name must be a str of 1 to {MAX_NAME_CHARACTERS} printable characters")


def test_the_number_of_columns_is_bounded() -> None:
    columns = {str(place): np.zeros(1) for place in range(MAX_COLUMNS)}
    assert len(checked_reward(Reward(1.0, columns=columns)).columns) == MAX_COLUMNS
    assert refused(columns=columns | {"more": np.zeros(1)}).startswith(
        f"columns: expected at most {MAX_COLUMNS}, got 65"
    )


@pytest.mark.parametrize("part", ["metrics", "columns", "metadata"])
def test_what_has_no_names_is_refused(part: str) -> None:
    assert refused(**{part: [1.0]}) == f"Reward({part}=…) must be a dict with names as keys, got list"


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        (
            {"a": [1, {"b": object()}]},
            "metadata['a'][1]['b']: expected str, int, float, bool, None, list or dict, got object",
        ),
        (
            {"a": np.zeros(3)},
            "metadata['a']: expected str, int, float, bool, None, list or dict, got ndarray; arrays belong",
        ),
        ({"a": b"bytes"}, "metadata['a']: expected str, int, float, bool, None, list or dict, got bytes"),
        ({"a": {1: 2}}, "metadata['a']: keys must be str, got 1"),
        ({"a": 1 << 64}, "metadata['a']: expected an int of 64 bits, got one of 65"),
        ({"a": 10**5000}, "metadata['a']: expected an int of 64 bits, got one of 16610"),
        ({"a": "\ud800"}, "metadata['a']: '\\ud800' is not valid Unicode"),
        (
            {"a": "x" * METADATA_BYTES},
            f"metadata['a']: a trajectory has at most {METADATA_BYTES} bytes of metadata",
        ),
    ],
)
def test_metadata_that_cannot_travel_fails_by_its_key(metadata: dict[str, Any], reason: str) -> None:
    assert refused(metadata=metadata).startswith(reason)


def test_metadata_is_bounded_in_depth_and_may_not_contain_itself() -> None:
    nested: Any = 0
    for _ in range(METADATA_DEPTH - 1):
        nested = [nested]
    assert checked_reward(Reward(1.0, metadata={"a": nested})).metadata == {"a": nested}
    assert f"nested more than {METADATA_DEPTH} deep" in refused(metadata={"a": [nested]})
    ring: list[Any] = []
    ring.append(ring)
    assert "contains itself" in refused(metadata={"a": ring})


def test_metadata_that_repeats_itself_is_counted_as_often_as_it_is_written() -> None:
    wide: Any = "x"
    for _ in range(METADATA_DEPTH - 1):
        wide = [wide] * 100
    assert "bytes of metadata" in refused(metadata={"a": wide})


def test_metadata_is_copied_so_that_trajectories_share_nothing() -> None:
    given_metadata = {"seen": [1]}
    kept = checked_reward(Reward(1.0, metadata=given_metadata)).metadata
    given_metadata["seen"].append(2)
    assert kept == {"seen": [1]}


def test_numpy_numbers_are_metadata() -> None:
    kept = checked_reward(Reward(1.0, metadata={"a": np.int64(3), "b": np.float32(0.5), "c": np.bool_(True)})).metadata
    assert kept == {"a": 3, "b": 0.5, "c": True}
    assert [type(each) for each in kept.values()] == [int, float, bool]


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


@given(metadata=st.dictionaries(st.text(max_size=5), plain, max_size=4))
def test_metadata_that_is_kept_survives_the_wire_within_its_bound(metadata: dict[str, Any]) -> None:
    try:
        kept = checked_reward(Reward(1.0, metadata=metadata)).metadata
    except EnvironmentFailed as error:
        assert "at most" in str(error) or "deep" in str(error)
        return
    written = msgspec.msgpack.encode(kept)
    assert len(written) <= METADATA_BYTES
    assert msgspec.msgpack.decode(written) == metadata
