"""The bucket plan."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.errors import ConfigError, WeightSyncError
from streamrl.sync.manifest import ALIGNMENT, ITEM_BYTES, Manifest, TensorSpec, plan_manifest


def layout(manifest: Manifest) -> list[list[tuple[str, int, int, int]]]:
    """Per bucket: (tensor, byte of the tensor, byte of the bucket, bytes)."""
    return [
        [(manifest.tensors[p.tensor].name, p.tensor_offset, p.offset, p.nbytes) for p in bucket.pieces]
        for bucket in manifest.buckets
    ]


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        pytest.param([("a", (4,), "float32")], [[("a", 0, 0, 16)]], id="one small tensor"),
        pytest.param(
            [("a", (3,), "float32"), ("b", (5,), "bfloat16"), ("c", (1,), "bool")],
            [[("a", 0, 0, 12), ("b", 0, 256, 10)], [("c", 0, 0, 1)]],
            id="mixed dtypes are aligned and a full bucket is closed",
        ),
        pytest.param(
            [("a", (64,), "float32"), ("b", (65,), "float32")],
            [[("a", 0, 0, 256)], [("b", 0, 0, 260)]],
            id="what does not fit into the rest opens the next bucket",
        ),
        pytest.param(
            [("a", (1,), "float32"), ("big", (1100,), "uint8"), ("c", (1,), "uint8")],
            [[("a", 0, 0, 4)], [("big", 0, 0, 512)], [("big", 512, 0, 512)], [("big", 1024, 0, 76), ("c", 0, 256, 1)]],
            id="a tensor over the bucket size is cut and shares its last bucket",
        ),
        pytest.param(
            [("a", (0, 7), "float32"), ("b", (), "float64"), ("c", (3, 0), "int8")],
            [[("b", 0, 0, 8)]],
            id="zero-element tensors take no bytes",
        ),
        pytest.param([("a", (0,), "float32")], [], id="only zero-element tensors need no bucket"),
    ],
)
def test_tensors_are_placed_in_order(specs: list[TensorSpec], expected: list[list[tuple[str, int, int, int]]]) -> None:
    assert layout(plan_manifest(specs, 512)) == expected


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 40), max_size=3).map(tuple), st.sampled_from(sorted(ITEM_BYTES))),
        min_size=1,
        max_size=12,
    ),
    st.integers(ALIGNMENT, 5000),
)
@settings(max_examples=150, deadline=None)
def test_every_byte_lies_in_exactly_one_place(shapes: list[tuple[tuple[int, ...], str]], bucket_bytes: int) -> None:
    specs = [(f"t{index}", shape, dtype) for index, (shape, dtype) in enumerate(shapes)]
    manifest = plan_manifest(specs, bucket_bytes)

    end = 0
    placed: dict[int, list[tuple[int, int, int]]] = {index: [] for index in range(len(specs))}
    order: list[tuple[int, int]] = []
    for bucket in manifest.buckets:
        assert bucket.offset == end
        assert bucket.offset % ALIGNMENT == bucket.nbytes % ALIGNMENT == 0
        assert 0 < bucket.nbytes <= bucket_bytes
        end = bucket.offset + bucket.nbytes
        used = 0
        for piece in bucket.pieces:
            assert piece.offset >= used
            assert piece.nbytes > 0
            used = piece.offset + piece.nbytes
            placed[piece.tensor].append((piece.tensor_offset, bucket.offset + piece.offset, piece.nbytes))
            order.append((piece.tensor, piece.tensor_offset))
        assert used <= bucket.nbytes
    assert end == manifest.slot_bytes
    assert order == sorted(order)

    for index, (name, shape, dtype) in enumerate(specs):
        tensor = manifest.tensors[index]
        assert (tensor.name, tensor.shape, tensor.dtype) == (name, shape, dtype)
        assert tensor.offset % ALIGNMENT == 0
        assert tensor.nbytes == math.prod(shape) * ITEM_BYTES[dtype]
        covered = 0
        for tensor_offset, slot_offset, nbytes in placed[index]:
            assert tensor_offset == covered
            assert slot_offset == tensor.offset + covered  # contiguous over buckets
            covered += nbytes
        assert covered == tensor.nbytes


def test_equal_input_gives_an_equal_plan_that_survives_the_wire() -> None:
    specs = [("a", (3, 5), "float32"), ("b", (), "bfloat16")]
    manifest = plan_manifest(specs, 1024)
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=Manifest)
    received.check()
    assert received == manifest == plan_manifest(iter(specs), 1024)


@pytest.mark.parametrize(
    ("specs", "bucket_bytes"),
    [
        ([("a", (5, 3), "float32"), ("b", (), "bfloat16")], 1024),
        ([("a", (3, 5), "int32"), ("b", (), "bfloat16")], 1024),
        ([("a", (3, 5), "float32"), ("c", (), "bfloat16")], 1024),
        ([("b", (), "bfloat16"), ("a", (3, 5), "float32")], 1024),
        ([("a", (3, 5), "float32"), ("b", (), "bfloat16")], 256),
    ],
)
def test_the_fingerprint_tells_every_other_plan(specs: list[TensorSpec], bucket_bytes: int) -> None:
    own = plan_manifest([("a", (3, 5), "float32"), ("b", (), "bfloat16")], 1024)
    assert plan_manifest(specs, bucket_bytes).fingerprint != own.fingerprint


def test_a_received_plan_that_does_not_follow_from_its_tensors_is_refused() -> None:
    manifest = plan_manifest([("a", (300,), "float32"), ("b", (300,), "float32")], 1024)
    outside = msgspec.structs.replace(manifest.tensors[0], offset=1 << 40)
    with pytest.raises(WeightSyncError, match="does not follow from its own tensors"):
        msgspec.structs.replace(manifest, tensors=(outside, manifest.tensors[1])).check()


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([], "at least one tensor"),
        ([("a", (1,), "float32"), ("a", (1,), "float32")], "'a' is given twice; give tied weights once"),
        ([("a", (1,), "float31")], "'a': dtype 'float31' is unknown"),
        ([("a", (2, -1), "float32")], r"'a': expected sizes of 0 or more, got shape \(2, -1\)"),
    ],
)
def test_bad_tensors_are_refused_by_name(specs: list[TensorSpec], message: str) -> None:
    with pytest.raises(WeightSyncError, match=message):
        plan_manifest(specs, 1024)


def test_a_bucket_under_one_alignment_unit_is_refused() -> None:
    with pytest.raises(ConfigError, match="sync.bucket_bytes: expected at least 256 bytes, got 255"):
        plan_manifest([("a", (1,), "float32")], 255)
