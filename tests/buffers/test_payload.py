"""Columns in one run of bytes: any arrays survive, nothing large is copied, and any choice of columns is a payload."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from codec_support import rows, same_array, same_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.buffers.wire import payload as module
from streamrl.buffers.wire.dtypes import DTYPES
from streamrl.buffers.wire.messages import Column
from streamrl.buffers.wire.payload import (
    ALIGNMENT,
    OWN_FRAME_BYTES,
    Payload,
    narrow,
    pack_columns,
    ranges,
    rebase,
    unpack_columns,
    write_into,
)
from streamrl.errors import WireError

Rows = list[dict[str, np.ndarray]]

LARGE = OWN_FRAME_BYTES // 4 + 3
"""int32 values of an array that is a frame of its own, and no multiple of 64 bytes."""


def packed(arrays: Rows, own_frame_bytes: int = OWN_FRAME_BYTES) -> tuple[list[Column], Payload]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "OWN_FRAME_BYTES", own_frame_bytes)
        return pack_columns(arrays)


def joined(payload: Payload) -> bytes:
    return b"".join(payload.frames)


own_frames_from = st.sampled_from([1, 7, 24, OWN_FRAME_BYTES])
"""Few bytes, so that small arrays exercise what is meant for large ones."""


@given(rows(), own_frames_from)
def test_any_columns_survive(arrays: Rows, own_frame_bytes: int) -> None:
    columns, payload = packed(arrays, own_frame_bytes)
    assert all(column.offset % ALIGNMENT == 0 for column in columns)
    assert payload.nbytes == len(joined(payload)) and payload.nbytes % ALIGNMENT == 0
    expected = arrays if columns else []  # without any column nobody knows how many trajectories there are
    assert same_rows(unpack_columns(columns, payload), expected)
    assert same_rows(unpack_columns(columns, Payload([joined(payload)])), expected)


@given(rows(), own_frames_from, st.data())
def test_a_choice_of_columns_is_a_payload_of_its_own(arrays: Rows, own_frame_bytes: int, data: st.DataObject) -> None:
    columns, payload = packed(arrays, own_frame_bytes)
    names = data.draw(st.sets(st.sampled_from([column.name for column in columns]))) if columns else set()
    chosen, part = narrow(columns, payload, names)
    assert [column.name for column in chosen] == [column.name for column in columns if column.name in names]
    expected = [{name: array for name, array in row.items() if name in names} for row in arrays]
    assert same_rows(unpack_columns(chosen, part), expected if names else [])
    assert same_rows(unpack_columns(columns, payload, names), expected if columns else [])


@given(rows(), own_frames_from, st.data())
def test_the_ranges_of_a_choice_read_from_plain_memory_are_its_payload(
    arrays: Rows, own_frame_bytes: int, data: st.DataObject
) -> None:
    columns, payload = packed(arrays, own_frame_bytes)
    names = data.draw(st.sets(st.sampled_from([column.name for column in columns]))) if columns else set()
    memory = bytearray(payload.nbytes + 5)
    write_into(payload, memoryview(memory))
    read = b"".join(memory[offset : offset + nbytes] for offset, nbytes in ranges(columns, names))
    assert read == joined(narrow(columns, payload, names)[1])
    assert rebase(columns, names) == narrow(columns, payload, names)[0]
    assert memory[payload.nbytes :] == bytes(5)


@given(rows(), st.data())
def test_rows_come_in_the_order_in_which_they_are_asked_for(arrays: Rows, data: st.DataObject) -> None:
    columns, payload = packed(arrays)
    wanted = data.draw(st.lists(st.integers(0, len(arrays) - 1), max_size=5)) if columns else []
    assert same_rows(unpack_columns(columns, payload, rows=wanted), [arrays[row] for row in wanted])


def test_a_row_that_is_not_there_is_refused() -> None:
    columns, payload = packed([{"x": np.zeros(1)}])
    for row in (1, -1):
        with pytest.raises(WireError, match="expected numbers of 1 trajectories, from 0, got"):
            unpack_columns(columns, payload, rows=[row])


def test_columns_that_the_group_does_not_have_are_left_out() -> None:
    columns, payload = packed([{"x": np.zeros(1)}])
    assert unpack_columns(columns, payload, ["y"]) == [{}]
    assert narrow(columns, payload, ["y"])[0] == ranges(columns, ["y"]) == []


def test_small_arrays_share_one_frame_and_large_ones_are_frames_without_a_copy() -> None:
    small, large = np.arange(5, dtype=np.int16), np.arange(LARGE, dtype=np.int32)
    columns, payload = packed([{"a": small, "large": large, "z": small}, {"a": small, "large": large, "z": small}])
    fill = -2 * large.nbytes % ALIGNMENT
    assert [len(frame) for frame in payload.frames] == [64, large.nbytes, large.nbytes, fill, 64]
    assert all(np.shares_memory(np.frombuffer(frame, np.int32), large) for frame in payload.frames[1:3])


def test_a_column_after_large_arrays_of_odd_size_still_lies_at_an_aligned_address() -> None:
    odd = np.ones(OWN_FRAME_BYTES + 1, dtype=np.int8)
    columns, payload = packed([{"a": odd, "b": np.arange(3.0)}, {"a": odd[:2], "b": np.arange(3.0)}])
    assert [len(frame) for frame in payload.frames] == [len(odd), ALIGNMENT - 1, ALIGNMENT]
    second = unpack_columns(columns, payload)[0]["b"]
    assert np.shares_memory(second, np.frombuffer(payload.frames[-1], np.uint8))


def test_a_large_array_that_is_not_contiguous_is_copied_once_into_its_frame() -> None:
    array = np.arange(2 * LARGE, dtype=np.int32).reshape(2, LARGE).T
    columns, payload = packed([{"x": array}])
    assert same_array(unpack_columns(columns, payload)[0]["x"], array)
    assert not np.shares_memory(np.frombuffer(payload.frames[0], np.int32), array)


def test_received_arrays_are_read_only_views_of_their_frames() -> None:
    columns, sent = packed([{"x": np.arange(3), "y": np.zeros((2, 2))}, {"x": np.arange(LARGE)}])
    frames = [bytearray(frame) for frame in sent.frames]
    for row in unpack_columns(columns, Payload([memoryview(frame) for frame in frames])):
        for array in row.values():
            assert any(np.shares_memory(array, np.frombuffer(frame, np.uint8)) for frame in frames)
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 1


def test_an_array_keeps_its_frame_alive_and_nothing_does_after_it() -> None:
    columns, sent = packed([{"x": np.arange(3), "y": np.zeros(2)}])
    memory = np.frombuffer(joined(sent), np.uint8).copy()
    frame_alive = weakref.ref(memory)
    kept = unpack_columns(columns, Payload([memoryview(memory)]))[0]["x"]
    del memory
    assert frame_alive() is not None and kept.tolist() == [0, 1, 2]
    del kept
    assert frame_alive() is None


def test_a_large_tensor_is_a_frame_without_a_copy() -> None:
    tensor = torch.zeros(OWN_FRAME_BYTES, dtype=torch.bfloat16)
    _, payload = pack_columns([{"x": tensor}])
    assert np.frombuffer(payload.frames[0], np.uint8).ctypes.data == tensor.data_ptr()


def test_a_choice_of_columns_shares_the_frames_memory() -> None:
    columns, payload = packed([{"a": np.arange(9), "b": np.arange(9), "large": np.arange(LARGE)}])
    _, part = narrow(columns, payload, {"b", "large"})
    assert [len(frame) for frame in part.frames] == [128, 8 * LARGE, -8 * LARGE % ALIGNMENT]
    for frame in part.frames:
        assert any(np.shares_memory(np.frombuffer(frame, np.uint8), np.frombuffer(f, np.uint8)) for f in payload.frames)


def test_neighbouring_columns_are_cut_out_in_one_piece() -> None:
    columns, payload = packed([{name: np.arange(9) for name in "abcd"}])
    assert [len(frame) for frame in narrow(columns, payload, "bc")[1].frames] == [2 * 128]
    assert [len(frame) for frame in narrow(columns, payload, "ac")[1].frames] == [128, 128]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_misaligned_frame_gives_the_same_arrays(dtype: str) -> None:
    array = np.ones(5, np.uint8).astype(bool) if dtype == "bool" else np.arange(80, dtype=np.uint8).view(DTYPES[dtype])
    columns, payload = packed([{"x": array}])
    shifted = memoryview(b"x" + joined(payload))[1:]
    received = unpack_columns(columns, Payload([shifted]))[0]["x"]
    assert same_array(received, array) and received.flags.aligned and not received.flags.writeable


def test_frames_may_be_cut_anew_between_arrays_but_not_within_one() -> None:
    arrays = [{"x": np.arange(8, dtype=np.int32)}, {"x": np.arange(8, 16, dtype=np.int32)}]
    columns, payload = packed(arrays)
    data = joined(payload)
    assert same_rows(unpack_columns(columns, Payload([data[:32], b"", data[32:]])), arrays)
    with pytest.raises(WireError, match="column 'x': expected each array in one frame, but a frame cuts one"):
        unpack_columns(columns, Payload([data[:20], data[20:]]))


def test_a_view_lies_in_one_frame_and_within_the_payload() -> None:
    payload = Payload([b"abc", b"", b"defg"])
    assert payload.nbytes == 7
    assert [bytes(payload.view(*at)) for at in ((0, 3), (1, 2), (3, 4), (6, 1), (2, 0), (7, 0))] == [
        b"abc", b"bc", b"defg", b"g", b"", b"",
    ]  # fmt: skip
    assert b"".join(payload.slices(1, 5)) == b"bcdef"
    with pytest.raises(WireError, match="expected 2 bytes from 2 in one frame"):
        payload.view(2, 2)
    for at in ((5, 3), (-1, 1), (0, -1), (8, 0)):
        for read in (payload.view, payload.slices):
            with pytest.raises(WireError, match="expected a range within 7 bytes"):
                read(*at)


def test_tensors_numbers_and_arrays_mix() -> None:
    columns, payload = pack_columns([{"x": torch.tensor([1.5], dtype=torch.bfloat16), "turn": 3, "y": np.int8(1)}])
    assert [column.dtype for column in columns] == ["bfloat16", "int64", "int8"]
    row = unpack_columns(columns, payload)[0]
    assert (float(row["x"][0]), int(row["turn"]), int(row["y"])) == (1.5, 3, 1)
    assert row["turn"].shape == ()


def test_a_column_has_one_dtype_and_the_trajectories_that_differ_are_named() -> None:
    arrays = [{"x": np.zeros(1, np.int32)}, {"x": np.zeros(1, np.int64)}, {}, {"x": np.zeros(1, np.int32)}]
    with pytest.raises(WireError, match=r"'x'.* int32 in trajectories \[0, 3\], int64 in trajectories \[1\]"):
        pack_columns(arrays)


@pytest.mark.parametrize("name", ["", "x" * 513, 5])
def test_a_column_has_a_name_of_bounded_length(name: str) -> None:
    with pytest.raises(WireError, match="expected a name of 1 to 512 characters"):
        pack_columns([{name: np.zeros(1)}])


def x(**changes: object) -> Column:
    return Column(**({"name": "x", "dtype": "int32", "offset": 0, "shapes": [[2], None]} | changes))  # type: ignore


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ([x(dtype="object")], "expected a dtype of bool"),
        ([x(offset=64)], "expected offset 0, got 64"),
        ([x(), x(name="y")], "expected offset 64, got 0"),
        ([x(), x(offset=64)], "expected names that differ, got 'x'"),
        ([x(name="")], "expected names that differ"),
        ([x(), x(name="y", offset=64, shapes=[None])], "'y': expected shapes of 2 trajectories, .* got 1"),
        ([x(shapes=[[17], None])], "expected 128 bytes, as its columns say, got 64"),
        ([x(shapes=[])], "expected 0 bytes, as its columns say, got 64"),
        ([], "expected 0 bytes"),
        ([x(shapes=[[1 << 52, 1 << 52], None])], "expected a shape that an array can have"),
        ([x(shapes=[[1 << 52, 0, 1 << 52], None])], "expected a shape that an array can have"),
        ([x(shapes=[[1] * 33, None])], "expected a shape that an array can have"),
        ([x(dtype="bool", shapes=[[64], None])], "expected bytes 0 or 1 as bool"),
    ],
)
def test_columns_that_do_not_fit_their_payload_are_refused(columns: list[Column], expected: str) -> None:
    with pytest.raises(WireError, match=expected):
        unpack_columns(columns, Payload([b"\2" * 64]))


def change_offset(column: Column, by: int) -> Column:
    return Column(column.name, column.dtype, max(0, column.offset + by), column.shapes)


def change_shapes(column: Column, by: int) -> Column:
    return Column(column.name, column.dtype, column.offset, [*column.shapes[:-1], [abs(by), 2]])


def change_dtype(column: Column, by: int) -> Column:
    return Column(column.name, list(DTYPES)[by % len(DTYPES)], column.offset, column.shapes)


@settings(max_examples=300)
@given(rows(), st.sampled_from([change_offset, change_shapes, change_dtype]), st.integers(-70, 70), st.data())
def test_wrong_columns_give_a_wire_error_or_arrays_within_the_payload(
    arrays: Rows, change: Callable[[Column, int], Column], by: int, data: st.DataObject
) -> None:
    columns, payload = packed(arrays)
    if columns:
        at = data.draw(st.integers(0, len(columns) - 1))
        columns[at] = change(columns[at], by)
    try:
        received = unpack_columns(columns, payload)
        narrow(columns, payload, [column.name for column in columns[::2]])
    except WireError as error:
        assert "\n" not in str(error)
    else:
        assert sum(array.nbytes for row in received for array in row.values()) <= payload.nbytes
