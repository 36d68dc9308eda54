"""The wire: round trips of any trajectories, views instead of copies, and ``WireError`` for everything malformed."""

from __future__ import annotations

import copy
import math

import msgspec
import numpy as np
import pytest
from buffer_support import trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.buffers import codec
from streamrl.buffers.messages import SCHEMA, Header, PutRequest, Status
from streamrl.errors import WireError
from streamrl.types import Group, RankBatch, TrainGroup, Trajectory

finite = st.floats(allow_nan=False, allow_infinity=False, width=32)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    length = draw(st.sampled_from([0, 1, 2, 7, 40]))
    sampled = np.array(draw(st.lists(st.booleans(), min_size=length, max_size=length)), dtype=bool)
    spans, left = [], int(sampled.sum())
    while left:
        count = draw(st.integers(1, left))
        spans.append((draw(st.integers(0, 2**40)), count))
        left -= count
    return Trajectory(
        tokens=np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length)), dtype=np.int32),
        sampled=sampled,
        behaviour=np.array(draw(st.lists(finite, min_size=length, max_size=length)), dtype=np.float32),
        versions=spans,
        reward=draw(finite),
        turns=draw(st.integers(0, 9)),
        truncated=draw(st.booleans()),
        metrics=draw(st.dictionaries(st.text(max_size=5), finite, max_size=2)),
    )


groups = st.builds(
    Group, st.integers(0, 2**50), st.integers(0, 2**50), st.text(max_size=9), st.lists(trajectories(), max_size=4)
)


def same(a: Trajectory, b: Trajectory) -> bool:
    arrays = all(
        x.dtype == y.dtype and np.array_equal(x, y)
        for x, y in ((a.tokens, b.tokens), (a.sampled, b.sampled), (a.behaviour, b.behaviour))
    )
    rest = [(t.versions, t.reward, t.turns, t.truncated, t.metrics) for t in (a, b)]
    return arrays and rest[0] == rest[1]


def over_the_wire(group: Group) -> Group:
    body, tensors = codec.pack_group(group)
    header, received = codec.decode(codec.encode(body, 5, 1.5, tensors))
    assert (header.request, header.sent_s) == (5, 1.5)
    assert isinstance(header.body, PutRequest)
    return codec.unpack_group(header.body, received)


@given(groups)
def test_any_group_survives_the_wire(group: Group) -> None:
    received = over_the_wire(group)
    assert (received.lease, received.prompt, received.env) == (group.lease, group.prompt, group.env)
    assert len(received.trajectories) == len(group.trajectories)
    assert all(same(a, b) for a, b in zip(group.trajectories, received.trajectories, strict=True))


@given(st.lists(st.lists(groups, max_size=2), max_size=3), st.data())
def test_any_batch_survives_the_wire(layout: list[list[Group]], data: st.DataObject) -> None:
    def numbers(group: Group) -> np.ndarray:
        size = len(group.trajectories)
        return np.array(data.draw(st.lists(finite, min_size=size, max_size=size)), dtype=np.float64)

    micro_batches = [
        [TrainGroup(g.lease, g.env, g.trajectories, numbers(g), numbers(g)) for g in micro_batch]
        for micro_batch in layout
    ]
    batch = RankBatch(3, 7, -1, micro_batches, {"reward/mean": 0.5})
    body, tensors = codec.pack_batch(batch)
    header, received = codec.decode(codec.encode(body, 0, 0.0, tensors))
    got = codec.unpack_batch(header.body, received)  # type: ignore[arg-type]
    assert (got.step, got.version, got.oldest_allowed, got.stats) == (3, 7, -1, {"reward/mean": 0.5})
    assert [len(x) for x in got.micro_batches] == [len(x) for x in micro_batches]
    for sent, came in zip(sum(micro_batches, []), sum(got.micro_batches, []), strict=True):
        assert (sent.lease, sent.env) == (came.lease, came.env)
        np.testing.assert_array_equal(sent.advantages, came.advantages)
        np.testing.assert_array_equal(sent.token_weights, came.token_weights)
        assert all(same(a, b) for a, b in zip(sent.trajectories, came.trajectories, strict=True))


def test_a_message_has_seven_frames_whatever_the_size_of_the_group() -> None:
    for count in (1, 50):
        body, tensors = codec.pack_group(Group(0, 0, "sums", [trajectory([(0, 2)])] * count))
        assert len(codec.encode(body, 0, 0.0, tensors)) == 7


def test_large_tensors_are_sent_and_received_without_a_copy_and_small_ones_with_one() -> None:
    large, small = np.arange(codec.COPY_BELOW_BYTES, dtype=np.int32), np.arange(3, dtype=np.int32)
    frames = codec.encode(Status("x"), 0, 0.0, {"large": large, "small": small})
    assert np.shares_memory(np.frombuffer(frames[1], dtype=np.int32), large)
    assert isinstance(frames[2], bytes)
    _, tensors = codec.decode(frames)
    assert np.shares_memory(tensors["large"], large)


def test_received_arrays_are_read_only() -> None:
    received = over_the_wire(Group(0, 0, "sums", [trajectory([(0, 2)])])).trajectories[0]
    for array in (received.tokens, received.sampled, received.behaviour):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def message(group: Group | None = None) -> tuple[PutRequest, codec.Tensors]:
    both = [trajectory([(4, 2), (5, 1)]), trajectory([(5, 2)])]
    return codec.pack_group(group or Group(0, 0, "sums", both))


BREAKAGES = {
    "a token below 0": ("tokens", lambda a: a.__setitem__(0, -1), "column tokens: expected ids from 0"),
    "a sampled byte of 2": ("sampled", lambda a: a.view(np.uint8).__setitem__(0, 2), "expected bytes 0 or 1"),
    "an infinite log-prob": ("behaviour", lambda a: a.__setitem__(0, -np.inf), "expected finite log-probs"),
    "a reward that is not a number": ("rewards", lambda a: a.__setitem__(0, np.nan), "expected finite numbers"),
    "a version below 0": ("spans", lambda a: a.__setitem__((0, 0), -1), "expected versions from 0"),
    "an empty span": ("spans", lambda a: a.__setitem__((0, 1), 0), "expected counts from 1"),
    "spans of more tokens than were sampled": ("spans", lambda a: a.__setitem__((1, 1), 2), "sum to the sampled"),
    "a span that belongs to the other trajectory": (
        "rows",
        lambda a: a[:, 1].__setitem__(slice(None), [1, 2]),
        "sum to the sampled",
    ),
    "lengths over the columns": ("rows", lambda a: a.__setitem__((0, 0), 2**62), "lengths within the columns"),
    "lengths under the columns": ("rows", lambda a: a.__setitem__((0, 0), 5), "lengths that sum to 11 tokens"),
    "a length below 0": ("rows", lambda a: a.__setitem__((0, 0), -6), "expected numbers from 0"),
}


@pytest.mark.parametrize("what", BREAKAGES)
def test_columns_that_contradict_each_other_are_refused(what: str) -> None:
    column, damage, expected = BREAKAGES[what]
    body, tensors = message()
    damage(tensors[column])
    with pytest.raises(WireError, match=expected):
        codec.unpack_group(body, tensors)


@pytest.mark.parametrize(
    ("spec", "frame", "expected"),
    [
        (("tokens", "|O", [1]), b"12345678", "expected a dtype of"),
        (("tokens", "<i4", [2]), b"1234", r"expected <i4 \[2\] to fill its frame of 4 bytes"),
        (("tokens", "<i4", [-1]), b"", "sizes from 0"),
        (("tokens", "<i4", [2**40, 2**40]), b"", "to fill its frame"),
        (("tokens", "<i4", [1, 1, 1]), b"1234", "one or two sizes"),
    ],
)
def test_a_tensor_must_be_what_its_header_says(spec: tuple[str, str, list[int]], frame: bytes, expected: str) -> None:
    header = msgspec.msgpack.encode(Header(SCHEMA, 0, 0.0, Status("x"), [spec]))
    with pytest.raises(WireError, match=expected):
        codec.decode([header, frame])


def test_a_missing_column_is_named() -> None:
    body, tensors = message()
    del tensors["spans"]
    with pytest.raises(WireError, match="expected tokens <i4, .* spans <i8"):
        codec.unpack_group(body, tensors)


def test_a_column_of_the_wrong_type_is_refused() -> None:
    body, tensors = message()
    tensors["tokens"] = tensors["tokens"].astype(np.float32)
    with pytest.raises(WireError, match="expected tokens <i4"):
        codec.unpack_group(body, tensors)


def test_metrics_come_for_every_trajectory_or_none() -> None:
    body, tensors = message()
    body.metrics = [{"hops": 1.0}]
    with pytest.raises(WireError, match="expected none or 2"):
        codec.unpack_group(body, tensors)


def test_a_batch_must_account_for_every_trajectory() -> None:
    part = TrainGroup(0, "sums", [trajectory([(0, 2)])], np.ones(1), np.ones(1))
    body, tensors = codec.pack_batch(RankBatch(0, 0, 0, [[part]], {}))
    body.micro_batches = [[(0, "sums", 2)]]
    with pytest.raises(WireError, match="one per trajectory"):
        codec.unpack_batch(body, tensors)


def test_another_schema_version_is_named_even_if_its_header_looks_different() -> None:
    for header in ([SCHEMA + 1, 4], [SCHEMA + 1, 4, 0.0, {"type": "status", "status": "x"}, []]):
        frames = [msgspec.msgpack.encode(header)]
        with pytest.raises(WireError, match=f"expected schema {SCHEMA}, got {SCHEMA + 1}"):
            codec.decode(frames)
        assert codec.request_id(frames) == 4


def test_size_limits_hold_on_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    body, tensors = message()
    frames = codec.encode(body, 0, 0.0, tensors)
    for limit, expected in (
        ("MAX_FRAME_BYTES", "largest frame"),
        ("MAX_MESSAGE_BYTES", "message"),
        ("MAX_HEADER_BYTES", "header"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(codec, limit, 10)
            for attempt in (lambda: codec.encode(body, 0, 0.0, tensors), lambda: codec.decode(frames)):
                with pytest.raises(WireError, match=f"{expected}: expected at most 10 bytes"):
                    attempt()


def test_arrays_of_one_trajectory_must_have_one_length() -> None:
    bad = trajectory([(0, 2)])
    bad.tokens = bad.tokens[:-1]
    with pytest.raises(WireError, match="trajectory 0: tokens, sampled, behaviour differ in length"):
        codec.pack_group(Group(0, 0, "sums", [bad]))


def _try(frames: list[bytes]) -> None:
    codec.request_id(frames)
    header, tensors = codec.decode(frames)
    if isinstance(header.body, PutRequest):
        group = codec.unpack_group(header.body, tensors)
        assert all(math.isfinite(t.reward) for t in group.trajectories)


@settings(max_examples=300)
@given(st.data())
def test_damaged_frames_raise_nothing_but_wire_errors(data: st.DataObject) -> None:
    body, tensors = message()
    frames = [bytes(frame) for frame in codec.encode(body, 1, 2.0, copy.deepcopy(tensors))]
    for _ in range(data.draw(st.integers(1, 4))):
        if not frames:
            break
        at = data.draw(st.integers(0, len(frames) - 1))
        frame = bytearray(frames[at])
        match data.draw(st.sampled_from(["flip", "cut", "grow", "drop", "repeat", "replace"])):
            case "flip" if frame:
                frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
                frames[at] = bytes(frame)
            case "cut":
                frames[at] = bytes(frame[: data.draw(st.integers(0, len(frame)))])
            case "grow":
                frames[at] = bytes(frame) + data.draw(st.binary(max_size=9))
            case "drop":
                del frames[at]
            case "repeat":
                frames.insert(at, bytes(frame))
            case "replace":
                frames[at] = data.draw(st.binary(max_size=64))
    try:
        _try(frames)
    except WireError as error:
        assert "\n" not in str(error)


@settings(max_examples=200)
@given(st.lists(st.binary(max_size=80), max_size=4))
def test_arbitrary_bytes_raise_nothing_but_wire_errors(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        _try(frames)


def test_a_deeply_nested_header_is_refused() -> None:
    with pytest.raises(WireError):
        codec.decode([b"\x95\x01" + b"\x91" * 100_000])
