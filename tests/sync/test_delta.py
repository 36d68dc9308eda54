"""The code of what changed: lossless for any bits, the shortest of its kinds, and nonsense is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.errors import WeightSyncError
from streamrl.sync.delta import CHUNK_BYTES, ENTRY, FAR, HEADER, Code, Entry, decode, encode, word_bytes
from streamrl.sync.manifest import plan_manifest

START = HEADER.size + ENTRY.size
"""Where the one chunk of a small bucket begins."""


def changed_at(base: np.ndarray, positions: list[int], step: int = 1) -> np.ndarray:
    new = base.copy()
    new[positions] += new.dtype.type(step)
    return new


def raw(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1).data


def entries_of(payload: memoryview) -> list[Entry]:
    """How each chunk is coded."""
    _, nbytes = HEADER.unpack_from(payload)
    table = payload[HEADER.size : HEADER.size + -(-nbytes // CHUNK_BYTES) * ENTRY.size]
    return [Entry(*fields) for fields in ENTRY.iter_unpack(table)]


def round_trip(base: np.ndarray, new: np.ndarray, width: int) -> list[Entry]:
    """How the chunks of the payload are coded, once it came back with the right digest; none where there is none."""
    payload = encode(raw(base), raw(new), width)
    if payload is None:
        return []
    assert payload.nbytes < raw(new).nbytes
    out = memoryview(bytearray(b"x" * len(raw(new))))
    assert decode(payload, raw(base), out) == xxhash.xxh3_64_intdigest(raw(new))
    assert out == raw(new)
    return entries_of(payload)


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
@given(positions=st.sets(st.integers(0, (3 * CHUNK_BYTES - 16) // 4), max_size=40), width=st.sampled_from((1, 2, 4)))
def test_few_changes_anywhere_across_chunks_come_back(positions: set[int], width: int) -> None:
    base = np.zeros((3 * CHUNK_BYTES - 12) // width, f"<u{width}")
    entries = round_trip(base, changed_at(base, sorted(positions)), width)
    assert [entry.code for entry in entries] == [Code.GAPS] * 3
    assert sum(entry.listed for entry in entries) == len(positions)


@settings(deadline=None, max_examples=60)
@given(
    width=st.sampled_from((2, 4, 8)),
    size=st.integers(9, 700),
    reach=st.sampled_from((1, 2, 7, 100, 30_000)),
    outliers=st.integers(0, 5),
    seed=st.integers(0, 2**32 - 1),
)
def test_steps_of_any_reach_come_back_with_values_that_are_further_off(
    width: int, size: int, reach: int, outliers: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 256, size * width, np.uint8).view(f"<u{width}")
    new = base + rng.integers(-reach, reach + 1, size).astype(base.dtype)
    new[rng.integers(0, size, outliers)] ^= base.dtype.type(1 << (8 * width - 1))
    round_trip(base, new, width)


def test_each_chunk_has_the_code_that_is_shortest_for_it() -> None:
    rng = np.random.default_rng(0)
    words = CHUNK_BYTES // 2
    base = rng.integers(0, 1 << 16, 6 * words, np.uint16)
    new, every = base.copy(), np.arange(words)
    new[every[::50] + words] += 1  # chunk 0 stays as it is
    new[every[::7] + 2 * words] -= 1
    new[every + 3 * words] += rng.integers(0, 8, words, np.uint16) - 4
    new[every[::4] + 4 * words] = rng.integers(0, 1 << 16, words // 4, np.uint16)
    new[every + 5 * words] = rng.integers(0, 1 << 16, words, np.uint16)
    entries = round_trip(base, new, 2)
    assert [(entry.code, entry.bits) for entry in entries] == [
        (Code.GAPS, 0),
        (Code.GAPS, 0),
        (Code.STEPS, 2),
        (Code.STEPS, 4),
        (Code.BITMAP, 0),
        (Code.WHOLE, 0),
    ]


@pytest.mark.parametrize(("width", "bits"), [(1, 2), (1, 4), (2, 2), (2, 4), (2, 8), (4, 8), (4, 16), (8, 16), (8, 32)])
def test_steps_from_minus_half_to_half_less_one_take_so_many_bits(width: int, bits: int) -> None:
    half, words = 1 << (bits - 1), 4096
    rng = np.random.default_rng(0)
    base = rng.integers(0, 256, words * width, np.uint8).view(f"<u{width}")
    steps = rng.integers(-half, half, words)
    steps[:2] = -half, half - 1
    payload = encode(raw(base), raw(base + steps.astype(base.dtype)), width)
    assert payload is not None
    assert entries_of(payload) == [Entry(Code.STEPS, bits, 0, 0)]
    assert payload.nbytes == START + words * bits // 8
    assert round_trip(base, base + steps.astype(base.dtype), width)
    further = encode(raw(base), raw(changed_at(base + steps.astype(base.dtype), [1])), width)
    assert further is not None
    assert entries_of(further) == [Entry(Code.STEPS, bits, 1, 0)]


def test_nan_payloads_and_signed_zeros_are_bits_like_any_other() -> None:
    base = np.array([0x7FC00000, 0x7FC00001, 0x00000000, 0x3F800000, *[0] * 60], "<u4").view("<f4")
    new = np.array([0x7FC00000, 0xFFC0BEEF, 0x80000000, 0x3F800000, *[0] * 60], "<u4").view("<f4")
    assert np.isnan(new[:2]).all()
    assert new[2] == base[2] == 0
    assert [entry.listed for entry in round_trip(base, new, 4)] == [2]


@pytest.mark.parametrize("pattern", [0x7FC1, 0xFF81, 0x8000, 0x0000, 0xFFFF, 0x7FFF])
def test_a_step_over_any_pattern_of_bits_comes_back(pattern: int) -> None:
    base = np.full(4096, pattern, "<u2")
    for step in (1, 0xFFFF):
        assert [entry.code for entry in round_trip(base, changed_at(base, list(range(4096)), step), 2)] == [Code.STEPS]


def test_a_bucket_of_no_bytes_has_nothing_shorter() -> None:
    assert encode(memoryview(b""), memoryview(b""), 2) is None


def test_memory_at_odd_addresses_is_compared_all_the_same() -> None:
    memory = np.zeros(2049, np.uint8)
    new = np.zeros(2050, np.uint8)[2:]
    for which in (slice(100, 101), slice(None, None, 2)):  # some words are listed, all take a step
        new[which] = 7
        payload = encode(memory[1:].data, new.data, 2)
        assert payload is not None
        place = np.empty(2051, np.uint8)[3:]
        decode(payload, memory[1:].data, place.data)
        assert place.tobytes() == new.tobytes()


def padded(nbytes: int) -> int:
    return START + -(-nbytes // 8) * 8


@pytest.mark.parametrize(
    ("changed", "step", "code", "nbytes"),
    [
        (0, 1, Code.GAPS, 0),
        (1, 1, Code.GAPS, 1 + 2),
        (85, 1, Code.GAPS, 85 * (1 + 2)),  # one in twelve: two bits for all are as short
        (86, 1, Code.STEPS, 1024 // 4),
        (1024, 0xFFFE, Code.STEPS, 1024 // 4),
        (1024, 2, Code.STEPS, 1024 // 2),
        (127, 5000, Code.GAPS, 127 * (1 + 2)),  # up to one in eight a byte each is shorter than a bit for all
        (129, 5000, Code.BITMAP, 1024 // 8 + 129 * 2),
        (900, 5000, Code.BITMAP, 1024 // 8 + 900 * 2),
    ],
)
def test_the_shortest_code_is_taken(changed: int, step: int, code: Code, nbytes: int) -> None:
    base = np.zeros(1024, "<u2")
    payload = encode(raw(base), raw(changed_at(base, list(range(changed)), step)), 2)
    assert payload is not None
    assert ([entry.code for entry in entries_of(payload)], payload.nbytes) == ([code], padded(nbytes))


@pytest.mark.parametrize("changed", [944, 1024])  # 128 + 1888 bytes and more: no shorter than the bucket
def test_a_bucket_that_is_shorter_itself_gets_no_code(changed: int) -> None:
    base = np.zeros(1024, "<u2")
    assert encode(raw(base), raw(changed_at(base, list(range(changed)), 5000)), 2) is None


def test_a_gap_of_255_and_more_takes_four_bytes_more() -> None:
    base = np.zeros(1 << 16, "<u2")
    near = encode(raw(base), raw(changed_at(base, [FAR - 1])), 2)
    far = encode(raw(base), raw(changed_at(base, [FAR, 2 * FAR, (1 << 16) - 1])), 2)
    assert near is not None
    assert far is not None
    assert (near.nbytes, far.nbytes) == (padded(3), padded(3 * (1 + 4 + 2)))


def test_a_width_that_does_not_divide_the_length_falls_back_to_bytes() -> None:
    base = np.zeros(1001, np.uint8)
    payload = encode(raw(base), raw(changed_at(base, [1000])), 4)
    assert payload is not None
    assert HEADER.unpack_from(payload) == (1, 1001)


def test_words_are_as_wide_as_the_smallest_element_of_the_bucket() -> None:
    manifest = plan_manifest(
        [("a", (8,), "float32"), ("b", (8,), "bfloat16"), ("c", (64,), "float32"), ("d", (256,), "uint8")], 512
    )
    assert [word_bytes(manifest, bucket) for bucket in manifest.buckets] == [2, 1]


def damaged(positions: list[int], step: int = 1) -> tuple[np.ndarray, memoryview]:
    """A payload to be damaged, and its base of 4096 words of two bytes."""
    base = np.zeros(4096, "<u2")
    payload = encode(raw(base), raw(changed_at(base, positions, step)), 2)
    assert payload is not None
    return np.frombuffer(payload, np.uint8).copy(), raw(base)


THREE, MANY = [0, 1000, 4095], list(range(2000))


def refuse(payload: np.ndarray, base: memoryview, message: str) -> None:
    with pytest.raises(WeightSyncError, match=message):
        decode(payload.data, base, memoryview(bytearray(base)))


@pytest.mark.parametrize(("positions", "step"), [(THREE, 1), (MANY, 1), (MANY, 5000)], ids=["gaps", "steps", "bitmap"])
def test_a_payload_that_was_cut_or_is_too_long_is_refused(positions: list[int], step: int) -> None:
    payload, base = damaged(positions, step)
    for nbytes in itertools.chain(range(40), range(40, len(payload), 97), [len(payload) - 1]):
        refuse(payload[:nbytes], base, "expected a payload of at least")
    longer = np.concatenate([payload, np.zeros(8, np.uint8)])
    refuse(longer, base, f"expected a payload of {len(payload)} bytes, got {len(longer)}")


@pytest.mark.parametrize("header", [(2, 8190), (2, 8191), (3, 8192), (0, 8192), (2, 2**63)])
def test_a_header_that_does_not_fit_is_refused(header: tuple[int, int]) -> None:
    payload, base = damaged(THREE)
    HEADER.pack_into(payload.data, 0, *header)
    refuse(payload, base, f"one of a bucket of 8192 bytes, got one of {header[1]} bytes in words of {header[0]}")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (Entry(4, 0, 3, 2), "makes no sense"),
        (Entry(Code.GAPS, 2, 3, 2), "makes no sense"),
        (Entry(Code.STEPS, 0, 3, 2), "makes no sense"),
        (Entry(Code.STEPS, 3, 3, 2), "makes no sense"),
        (Entry(Code.STEPS, 16, 3, 2), "makes no sense"),
        (Entry(Code.GAPS, 0, 4097, 2), "makes no sense"),
        (Entry(Code.GAPS, 0, 2, 2**32 - 1), "expected a payload of at least"),
        (Entry(Code.GAPS, 0, 3, 1), "1 far gaps are listed, .* are used"),
        (Entry(Code.GAPS, 0, 0, 2), "2 far gaps are listed, 0 are used"),
    ],
)
def test_a_chunk_that_makes_no_sense_is_refused(entry: Entry, message: str) -> None:
    payload, base = damaged(THREE)
    ENTRY.pack_into(payload.data, HEADER.size, *entry)
    refuse(payload, base, message)


def test_gaps_that_lead_out_of_the_bucket_are_refused() -> None:
    payload, base = damaged(THREE)
    payload[START : START + 4].view("<u4")[:] = 4095  # the first far gap; the second goes on from there
    refuse(payload, base, "lead to word 7190 of 4096")


@pytest.mark.parametrize("bits", [0x00, 0xFF])
def test_a_bitmap_with_other_than_one_bit_per_value_is_refused(bits: int) -> None:
    payload, base = damaged(MANY, 5000)
    payload[START : START + 4096 // 8] = bits
    refuse(payload, base, "expected 2000 bits, as many as values")
