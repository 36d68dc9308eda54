"""The code of what changed: lossless for any bits, the shortest of its kinds, and nonsense is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.errors import WeightSyncError
from streamrl.sync.delta import CHUNK_WORDS, FAR, Code, Header, decode, encode, word_bytes
from streamrl.sync.manifest import plan_manifest

HEADER = 32


def changed_at(base: np.ndarray, positions: list[int]) -> np.ndarray:
    new = base.copy()
    new[positions] ^= 1
    return new


def raw(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1).data


def round_trip(base: np.ndarray, new: np.ndarray, width: int) -> Header | None:
    """What the payload says of itself, once it came back both ways; None where there is none."""
    payload = encode(raw(base), raw(new), width)
    if payload is None:
        return None
    assert payload.nbytes < raw(new).nbytes
    for out, old in ((memoryview(bytearray(b"x" * len(raw(new)))), raw(base)), (memoryview(bytearray(raw(base))),) * 2):
        decode(payload, old, out)
        assert out == raw(new)
    return Header.of(payload)


@settings(deadline=None, max_examples=200)
@given(
    width=st.sampled_from((1, 2, 4, 8)),
    base=st.binary(max_size=3000),
    share=st.sampled_from((0.0, 0.003, 0.05, 0.2, 0.6, 1.0)),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_bytes_come_back_whatever_changed(width: int, base: bytes, share: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    old = np.frombuffer(base, np.uint8)
    new = np.where(rng.random(len(old)) < share, rng.integers(0, 256, len(old)), old).astype(np.uint8)
    round_trip(old, new, width)


@settings(deadline=None, max_examples=60)
@given(positions=st.sets(st.integers(0, 2 * CHUNK_WORDS + 4), max_size=40), width=st.sampled_from((1, 2, 4)))
def test_few_changes_anywhere_across_chunks_come_back(positions: set[int], width: int) -> None:
    base = np.zeros(2 * CHUNK_WORDS + 5, f"<u{width}")
    header = round_trip(base, changed_at(base, sorted(positions)), width)
    assert header is not None
    assert (header.code, header.changed) == (Code.GAPS, len(positions))


def test_nan_payloads_and_signed_zeros_are_bits_like_any_other() -> None:
    base = np.array([0x7FC00000, 0x7FC00001, 0x00000000, 0x3F800000, *[0] * 60], "<u4").view("<f4")
    new = np.array([0x7FC00000, 0xFFC0BEEF, 0x80000000, 0x3F800000, *[0] * 60], "<u4").view("<f4")
    assert np.isnan(new[:2]).all()
    assert new[2] == base[2] == 0
    header = round_trip(base, new, 4)
    assert header is not None
    assert header.changed == 2


def test_a_bucket_of_no_bytes_has_nothing_shorter() -> None:
    assert encode(memoryview(b""), memoryview(b""), 2) is None


def test_memory_at_odd_addresses_is_compared_all_the_same() -> None:
    memory = np.zeros(2049, np.uint8)
    new = np.zeros(2050, np.uint8)[2:]
    new[100] = 7
    payload = encode(memory[1:].data, new.data, 2)
    assert payload is not None
    place = np.empty(2051, np.uint8)[3:]
    decode(payload, memory[1:].data, place.data)
    assert place.tobytes() == new.tobytes()


@pytest.mark.parametrize(
    ("changed", "code", "nbytes"),
    [
        (0, Code.GAPS, 0),
        (1, Code.GAPS, 1 + 2),
        (128, Code.GAPS, 128 * (1 + 2)),  # one in eight: a byte each is as short as a bit for all
        (129, Code.BITMAP, 1024 // 8 + 129 * 2),
        (943, Code.BITMAP, 1024 // 8 + 943 * 2),
    ],
)
def test_the_shorter_code_is_taken(changed: int, code: Code, nbytes: int) -> None:
    base = np.zeros(1024, "<u2")
    payload = encode(raw(base), raw(changed_at(base, list(range(changed)))), 2)
    assert payload is not None
    assert (Header.of(payload).code, payload.nbytes) == (code, HEADER + nbytes)


@pytest.mark.parametrize("changed", [944, 1024])  # 32 + 128 + 1888 bytes: no shorter than the bucket
def test_a_bucket_that_is_shorter_itself_gets_no_code(changed: int) -> None:
    base = np.zeros(1024, "<u2")
    assert encode(raw(base), raw(changed_at(base, list(range(changed)))), 2) is None


def test_a_gap_of_255_and_more_takes_four_bytes_more() -> None:
    base = np.zeros(1 << 16, "<u2")
    near = encode(raw(base), raw(changed_at(base, [FAR - 1])), 2)
    far = encode(raw(base), raw(changed_at(base, [FAR, 2 * FAR, (1 << 16) - 1])), 2)
    assert near is not None
    assert far is not None
    assert (near.nbytes, far.nbytes) == (HEADER + 3, HEADER + 3 * (1 + 4 + 2))


def test_a_width_that_does_not_divide_the_length_falls_back_to_bytes() -> None:
    base = np.zeros(1001, np.uint8)
    header = round_trip(base, changed_at(base, [1000]), 4)
    assert header is not None
    assert header.width == 1


def test_words_are_as_wide_as_the_smallest_element_of_the_bucket() -> None:
    manifest = plan_manifest(
        [("a", (8,), "float32"), ("b", (8,), "bfloat16"), ("c", (64,), "float32"), ("d", (256,), "uint8")], 512
    )
    assert [word_bytes(manifest, bucket) for bucket in manifest.buckets] == [2, 1]


def damaged(positions: list[int]) -> tuple[np.ndarray, memoryview]:
    """A payload to be damaged, and its base of 4096 words of two bytes."""
    base = np.zeros(4096, "<u2")
    payload = encode(raw(base), raw(changed_at(base, positions)), 2)
    assert payload is not None
    return np.frombuffer(payload, np.uint8).copy(), raw(base)


THREE, MANY = [0, 1000, 4095], list(range(2000))


def refuse(payload: np.ndarray, base: memoryview, message: str) -> None:
    with pytest.raises(WeightSyncError, match=message):
        decode(payload.data, base, memoryview(bytearray(base)))


@pytest.mark.parametrize("positions", [THREE, MANY])
def test_a_payload_that_was_cut_is_refused(positions: list[int]) -> None:
    payload, base = damaged(positions)
    refuse(payload[:-1], base, "expected a payload of")
    refuse(payload[: HEADER - 1], base, "expected a header of 32 bytes, got 31 in all")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nbytes": 8190}, "one of a bucket of 8192 bytes, got one of 8190"),
        ({"nbytes": 8191}, "makes no sense"),
        ({"width": 3}, "makes no sense"),
        ({"code": 2}, "makes no sense"),
        ({"changed": 4}, "expected a payload of"),
        ({"changed": 2**63}, "expected a payload of"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(change: dict, message: str) -> None:
    payload, base = damaged(THREE)
    header = replace(Header.of(payload.data), **change)
    payload[:HEADER] = np.frombuffer(header.pack(), np.uint8)
    refuse(payload, base, message)


def test_gaps_that_lead_out_of_the_bucket_are_refused() -> None:
    payload, base = damaged(THREE)
    payload[HEADER + 3 : HEADER + 7].view("<u4")[:] = 4095  # the first far gap; the second goes on from there
    refuse(payload, base, "lead to word 7190 of 4096")


def test_far_gaps_that_are_not_used_are_refused() -> None:
    payload, base = damaged(THREE)
    payload[HEADER + 1] = 3
    refuse(payload, base, "2 far gaps are listed, 1 are used")


@pytest.mark.parametrize("bits", [0x00, 0xFF])
def test_a_bitmap_with_other_than_one_bit_per_value_is_refused(bits: int) -> None:
    payload, base = damaged(MANY)
    payload[HEADER : HEADER + 4096 // 8] = bits
    refuse(payload, base, "as many bits as values, which are 2000")
