"""Groups as description and payload: any group survives, and a buffer takes none that contradicts itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from codec_support import groups, same_array, same_group, trajectory
from hypothesis import given
from hypothesis import strategies as st

from streamrl.buffers.wire.groups import (
    MAX_METADATA_BYTES,
    STANDARD,
    check_group,
    pack_group,
    shared_prompt_length,
    unpack_group,
    unpack_trajectories,
)
from streamrl.buffers.wire.messages import GroupMeta
from streamrl.buffers.wire.payload import OWN_FRAME_BYTES, Payload, narrow
from streamrl.errors import WireError
from streamrl.types import Group, Trajectory


def received(meta: GroupMeta) -> GroupMeta:
    """As it comes out of a header."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(meta), type=GroupMeta)


def flattened(payload: Payload) -> bytearray:
    return bytearray(b"".join(payload.frames))


@given(groups())
def test_any_group_survives_and_is_accepted(group: Group) -> None:
    meta, payload = pack_group(group)
    meta = received(meta)
    check_group(meta, payload)
    assert same_group(unpack_group(meta, payload), group)
    assert meta.nbytes == payload.nbytes
    assert meta.shared == shared_prompt_length(group.trajectories)
    assert [one.sampled for one in meta.trajectories] == [one.sampled_count for one in group.trajectories]


@given(groups(), st.data())
def test_only_the_wanted_columns_and_trajectories_come(group: Group, data: st.DataObject) -> None:
    meta, payload = pack_group(group)
    everywhere = sorted({name for one in group.trajectories for name in one.columns})
    names = data.draw(st.sets(st.sampled_from(everywhere))) if everywhere else set()
    count = len(group.trajectories)
    rows = data.draw(st.lists(st.integers(0, count - 1), max_size=4)) if count else []
    columns, part = narrow(meta.columns, payload, {*STANDARD, *names})
    narrowed = msgspec.structs.replace(meta, columns=columns, nbytes=part.nbytes)
    check_group(narrowed, part)
    expected = []
    for row in rows:
        one = group.trajectories[row]
        expected.append(copy.copy(one))
        expected[-1].episode = row
        expected[-1].columns = {name: array for name, array in one.columns.items() if name in names}
    wanted = Group(group.lease, group.prompt, group.env, expected)
    assert same_group(unpack_group(meta, payload, names, rows), wanted)
    assert same_group(unpack_group(narrowed, part, rows=rows), wanted)


def test_wider_arrays_and_tensors_are_brought_to_the_standard_dtypes() -> None:
    one = trajectory([(4, 2)])
    one.tokens, one.behaviour = one.tokens.astype(np.int64), torch.tensor(one.behaviour, dtype=torch.bfloat16)  # type: ignore[assignment]
    got = unpack_trajectories(*pack_group(Group(0, 0, "sums", [one])))[0]
    assert same_array(got.tokens, trajectory([(4, 2)]).tokens)
    assert same_array(got.behaviour, trajectory([(4, 2)]).behaviour)


def test_large_user_columns_are_not_copied_on_either_side() -> None:
    image = np.zeros((OWN_FRAME_BYTES, 2), dtype=np.uint8)
    meta, payload = pack_group(Group(0, 0, "sums", [trajectory([(4, 2)], columns={"image": image})]))
    assert np.shares_memory(unpack_trajectories(meta, payload)[0].columns["image"], image)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"tokens": np.zeros(4, np.int32)}, r"trajectory 1: tokens, sampled, behaviour differ in length: \(4, 5, 5\)"),
        ({"tokens": np.zeros((5, 1), np.int32)}, r"trajectory 1: expected tokens as int32 \[T\], got int32 \[5, 1\]"),
        ({"tokens": np.zeros(5)}, "expected tokens as int32 .*, got float64"),
        ({"tokens": np.full(5, 1 << 40)}, "expected tokens that fit int32, got 1099511627776 to"),
        ({"sampled": np.zeros(5, np.uint8)}, "expected sampled as bool .*, got uint8"),
        ({"behaviour": np.zeros(5, np.complex64)}, "expected behaviour as float32 .*, got complex64"),
        ({"columns": {"tokens": np.zeros(5)}}, "trajectory 1: expected user columns beside tokens, .*, got 'tokens'"),
        ({"columns": {"image": np.array(["a"])}}, "column 'image': expected an array of bool"),
        ({"metrics": {"hops": "many"}}, "trajectory 1: expected metrics that are numbers"),
    ],
)
def test_a_group_that_cannot_travel_is_refused_by_its_sender(change: dict[str, Any], expected: str) -> None:
    bad = trajectory([(4, 2)])
    for name, value in change.items():
        setattr(bad, name, value)
    with pytest.raises(WireError, match=expected):
        pack_group(Group(0, 0, "sums", [trajectory([(4, 2)]), bad]))


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else "end"


METADATA = {
    "an object": ({"why": {"deep": [object()]}}, "expected metadata 'why' of .*, got builtins.object"),
    "a numpy number": ({"why": np.int64(3)}, "'why' .*, got numpy.int64"),
    "a key that is a number": ({"why": {3: 4}}, "'why' .*, got a key that is not a string"),
    "a first key that is a number": ({3: 4}, "'3' .*, got a key that is not a string"),
    "a number over 64 bits": ({"why": -(1 << 64)}, "'why' .*, got 65 bits"),
    "too deep a nesting": ({"why": nested(16)}, "'why' .* at most 16 deep, got more"),
    "a surrogate": ({"why": "\ud800"}, "expected metadata of Unicode text"),
    "too much of it": ({"a": 1, "why": "x" * MAX_METADATA_BYTES}, "most of them in 'why'; send arrays as columns"),
}


@pytest.mark.parametrize("what", METADATA)
def test_metadata_is_plain_and_limited(what: str) -> None:
    metadata, expected = METADATA[what]
    with pytest.raises(WireError, match=f"trajectory 0: .*{expected}"):
        pack_group(Group(0, 0, "sums", [trajectory([(4, 2)], metadata=metadata)]))


def test_metadata_up_to_the_limits_travels() -> None:
    metadata = {"deep": nested(15), "big": 2**64 - 1, "bytes": b"\xff", "none": None, "long": "x" * 60_000}
    meta, payload = pack_group(Group(0, 0, "sums", [trajectory([(4, 2)], metadata=metadata)]))
    check_group(received(meta), payload)
    assert unpack_trajectories(received(meta), payload)[0].metadata == metadata


def test_a_receiver_checks_metadata_too() -> None:
    meta, payload = pack_group(Group(0, 0, "sums", [trajectory([(4, 2)])]))
    for metadata in ({"why": nested(16)}, {"why": {3: 4}}, {"why": msgspec.msgpack.Ext(1, b"")}):
        meta.trajectories[0].metadata = metadata
        with pytest.raises(WireError, match="trajectory 0: expected metadata 'why'"):
            check_group(received(meta), payload)


# Contradictions -----------------------------------------------------------------------------------------------------


def pair() -> tuple[GroupMeta, bytearray]:
    """Trajectories of 6 and 5 tokens: tokens from byte 0, sampled from 64, behaviour from 128."""
    both = [trajectory([(4, 2), (5, 1)]), trajectory([(5, 2)])]
    meta, payload = pack_group(Group(0, 0, "sums", both))
    assert [column.offset for column in meta.columns] == [0, 64, 128]
    return meta, flattened(payload)


def put(dtype: type, offset: int, value: float) -> Callable[[GroupMeta, bytearray], None]:
    def damage(_: GroupMeta, data: bytearray) -> None:
        size = np.dtype(dtype).itemsize
        data[offset : offset + size] = np.array(value, dtype).tobytes()

    return damage


def edit(**changes: Any) -> Callable[[GroupMeta, bytearray], None]:
    """Set fields of the description or, after ``first_`` and ``column_``, of its first trajectory or column."""

    def damage(meta: GroupMeta, _: bytearray) -> None:
        for name, value in changes.items():
            if name.startswith("column_"):
                meta.columns[0] = msgspec.structs.replace(meta.columns[0], **{name.removeprefix("column_"): value})
            else:
                setattr(meta.trajectories[0] if name.startswith("first_") else meta, name.removeprefix("first_"), value)

    return damage


def drop_column(meta: GroupMeta, data: bytearray) -> None:
    meta.columns.pop()
    del data[128:]
    meta.nbytes = 128


CONTRADICTIONS = {
    "a token below 0": (put(np.int32, 4, -1), "column tokens: expected ids from 0"),
    "a sampled byte of 2": (put(np.uint8, 64, 2), "column 'sampled': expected bytes 0 or 1"),
    "a log-prob that is not a number": (put(np.float32, 128, np.nan), "column behaviour: expected finite log-probs"),
    "an infinite log-prob": (put(np.float32, 132, -np.inf), "column behaviour: expected finite log-probs"),
    "a reward that is not a number": (edit(first_reward=np.nan), "trajectory 0: expected a finite reward, got nan"),
    "a turn reward that is not a number": (
        edit(first_turn_rewards=[np.inf]), r"trajectory 0: expected finite turn rewards, got \[inf\]",
    ),
    "turn rewards of more turns than there are": (
        edit(first_turn_rewards=[1.0, 2.0]), "expected a turn reward for each of 1 runs of sampled tokens, got 2",
    ),
    "spans of more tokens than were sampled": (
        edit(first_spans=[(4, 4)]), "trajectory 0: expected spans of 3 tokens, all sampled ones, got 4",
    ),
    "a token sampled but in no span": (put(np.uint8, 64, 1), "trajectory 0: expected spans of 4 tokens"),
    "a length over the columns": (edit(first_length=7), r"tokens: expected shape \[7\] for trajectory 0, .* got \[6\]"),
    "another shared prompt": (edit(shared=2), "expected a shared prompt of 3 tokens, as its columns say, got 2"),
    "a token of the shared prompt changed": (put(np.int32, 4, 9), "expected a shared prompt of 1 tokens, .* got 3"),
    "another size": (edit(nbytes=64), "expected a payload of 64 bytes, as described, got 192"),
    "a trajectory too few": (lambda meta, _: meta.trajectories.pop(), "expected columns of 1 trajectories, got 2"),
    "no trajectory left": (lambda meta, _: meta.trajectories.clear(), "expected columns of 0 trajectories, got 2"),
    "a missing column": (drop_column, "expected the columns tokens, sampled, behaviour, got no behaviour"),
    "tokens of another dtype": (edit(column_dtype="float32"), "column tokens: expected int32, got float32"),
    "a trajectory without tokens": (
        edit(column_shapes=[[6], None]), r"tokens: expected shape \[5\] for trajectory 1, .* got None",
    ),
    "tokens in two dimensions": (
        edit(column_shapes=[[2, 3], [5]]), r"expected shape \[6\] for trajectory 0, .* got \[2, 3\]",
    ),
}  # fmt: skip


def test_the_episodes_and_turn_rewards_of_a_group_arrive_as_they_were_sent() -> None:
    sent = [
        trajectory([(4, 2)], episode=episode, turn_rewards=given) for episode, given in [(2, [0.5]), (2, []), (0, [])]
    ]
    meta, payload = pack_group(Group(0, 0, "sums", sent))
    check_group(received(meta), payload)
    got = unpack_trajectories(received(meta), payload)
    assert [(each.episode, each.turn_rewards) for each in got] == [(2, [0.5]), (2, []), (0, [])]


def test_trajectories_without_an_episode_are_one_each() -> None:
    meta, payload = pack_group(Group(0, 0, "sums", [trajectory([(4, 2)]) for _ in range(3)]))
    assert [each.episode for each in unpack_trajectories(meta, payload)] == [0, 1, 2]


def test_a_group_in_which_some_trajectories_have_an_episode_is_refused_by_its_sender() -> None:
    with pytest.raises(WireError, match="expected the episode of all trajectories or of none"):
        pack_group(Group(0, 0, "sums", [trajectory([(4, 2)], episode=0), trajectory([(4, 2)])]))


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_a_group_that_contradicts_itself_is_refused(what: str) -> None:
    damage, expected = CONTRADICTIONS[what]
    meta, data = pair()
    check_group(meta, Payload([bytes(data)]))
    damage(meta, data)
    with pytest.raises(WireError, match=expected):
        check_group(meta, Payload([bytes(data)]))


@pytest.mark.parametrize("change", [{"turns": -1}, {"spans": [(-1, 3)]}, {"spans": [(4, 0), (4, 3)]}, {"length": -6}])
def test_numbers_below_their_range_do_not_pass_the_header(change: dict[str, Any]) -> None:
    meta, _ = pair()
    for name, value in change.items():
        setattr(meta.trajectories[0], name, value)
    with pytest.raises(msgspec.ValidationError, match="Expected `int` >="):
        received(meta)


def test_the_content_is_checked_in_large_frames_too() -> None:
    count = OWN_FRAME_BYTES // 4
    long = [trajectory([(1, count)]), trajectory([(1, count)])]
    meta, payload = pack_group(Group(0, 0, "sums", long))
    check_group(meta, payload)
    assert len(payload.frames) > 4
    long[1].tokens[-1] = -1
    with pytest.raises(WireError, match="column tokens: expected ids from 0"):
        check_group(meta, payload)


def test_a_group_without_standard_columns_unpacks_into_no_trajectories() -> None:
    meta, payload = pack_group(Group(0, 0, "sums", [trajectory([(4, 2)])]))
    columns, part = narrow(meta.columns, payload, ["tokens"])
    with pytest.raises(WireError, match="got no sampled"):
        unpack_group(msgspec.structs.replace(meta, columns=columns, nbytes=part.nbytes), part)


# The shared prompt --------------------------------------------------------------------------------------------------


def prompted(*prompts: tuple[int, ...]) -> list[Trajectory]:
    return [trajectory([(0, 2)], prompt) for prompt in prompts]


@pytest.mark.parametrize(
    ("trajectories", "expected"),
    [
        ([], 0),
        (prompted((1, 2, 3)), 3),
        (prompted((1, 2, 3), (1, 2, 3)), 3),
        (prompted((1, 2, 3), (1, 2)), 2),  # the third token of the second is sampled
        (prompted((1, 2, 3), (1, 9, 3), (1, 2, 9)), 1),
        (prompted((1, 2, 3), (9, 2, 3)), 0),
        (prompted((), ()), 0),
        ([trajectory([], (1, 2)), trajectory([], (1, 2))], 2),
        ([trajectory([], ()), *prompted((1, 2))], 0),
    ],
)
def test_the_shared_prompt_ends_where_trajectories_differ_or_one_is_sampled(
    trajectories: list[Trajectory], expected: int
) -> None:
    assert shared_prompt_length(trajectories) == expected


def test_the_shared_prompt_does_not_depend_on_the_dtype_of_tokens() -> None:
    narrow_tokens, wide = prompted((1, 2, 3), (1, 2, 3))
    wide.tokens = wide.tokens.astype(np.int64)
    assert shared_prompt_length([narrow_tokens, wide]) == 3
