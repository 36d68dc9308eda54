"""Messages as frames: bundles, checksums, limits, and ``WireError`` for everything malformed."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from codec_support import groups, same_group, trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.buffers.wire import codec
from streamrl.buffers.wire.groups import check_group, pack_group, unpack_group
from streamrl.buffers.wire.messages import SCHEMA, FailRequest, Header, LeaseRequest, PutRequest, Status
from streamrl.buffers.wire.payload import Frame, Payload
from streamrl.errors import WireError
from streamrl.types import Group


def message(group: Group | None = None, request: int = 5, *, checksum: bool = False) -> list[Frame]:
    both = [trajectory([(4, 2), (5, 1)]), trajectory([(5, 2)], columns={"router": np.arange(6).reshape(3, 2)})]
    meta, payload = pack_group(group or Group(0, 0, "sums", both))
    return codec.encode(PutRequest(meta), request, 1.5, payload.frames, checksum=checksum)


def received(frames: list[Frame]) -> Group | None:
    """What a buffer does with a put: decode, check, unpack."""
    header, payload = codec.decode(frames)
    if not isinstance(header.body, PutRequest):
        return None
    check_group(header.body.group, Payload(payload))
    return unpack_group(header.body.group, Payload(payload))


@given(groups(), st.booleans())
def test_any_group_survives_the_wire(group: Group, checksum: bool) -> None:
    frames = message(group, checksum=checksum)
    header, _ = codec.decode(frames)
    assert (header.request, header.sent_s) == (5, 1.5)
    assert (header.checksum is not None) == checksum
    got = received(frames)
    assert got is not None and same_group(got, group)


def test_payload_frames_pass_both_ways_as_they_are() -> None:
    payload: list[Frame] = [b"abc", memoryview(b"defg"), b""]
    frames = codec.encode(Status("x"), 0, 0.0, payload)
    assert all(sent is given for sent, given in zip(frames[1:], payload, strict=True))
    assert all(came is sent for came, sent in zip(codec.decode(frames)[1], payload, strict=True))


def test_a_group_of_small_arrays_is_two_frames_whatever_its_size() -> None:
    for count in (1, 50):
        assert len(message(Group(0, 0, "sums", [trajectory([(0, 2)])] * count))) == 2


# Bundles ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.binary(max_size=5), max_size=4), max_size=5))
def test_a_bundle_comes_apart_into_its_messages(payloads: list[list[bytes]]) -> None:
    messages = [codec.encode(Status("x"), number, 0.0, payload) for number, payload in enumerate(payloads)]
    apart = [codec.decode(frames) for frames in codec.split(sum(messages, []))]
    assert [(header.request, payload) for header, payload in apart] == list(enumerate(payloads))


def outcomes(frames: list[Frame]) -> list[int | str]:
    """Per message of a bundle, its request id, or the id and why it was refused."""
    results: list[int | str] = []
    for one in codec.split(frames):
        try:
            results.append(codec.decode(one)[0].request)
        except WireError as error:
            results.append(f"{codec.request_id(one)}: {error}")
    return results


def test_a_malformed_message_harms_no_other_of_its_bundle() -> None:
    bad_body = [msgspec.msgpack.encode([SCHEMA, 7, 0.0, {"type": "nonsense"}, [2]]), b"ab"]
    bad_sum = message(request=8, checksum=True)
    bad_sum[1] = bytes(len(bad_sum[1]))
    bad_size = [msgspec.msgpack.encode([SCHEMA, 9, 0.0, {"type": "status", "status": "x"}, [2]]), b"abc"]
    good = message(request=5)
    got = outcomes([*good, *bad_body, *good, *bad_sum, *good, *bad_size, *good])
    assert got[::2] == [5, 5, 5, 5]
    assert [str(one).split(":")[0] for one in got[1::2]] == ["7", "8", "9"]
    for one, expected in zip(got[1::2], ("Invalid value 'nonsense'", "the checksum", "expected 2 bytes"), strict=True):
        assert expected in str(one)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b"\xc1", "-1: header: "),
        (msgspec.msgpack.encode([SCHEMA + 1, 7]), f"7: header: expected schema {SCHEMA}"),
        (
            msgspec.msgpack.encode([SCHEMA, 7, 0.0, {"type": "status", "status": "x"}, [1] * 9]),
            "7: message: expected 9",
        ),
    ],
)
def test_what_follows_a_header_that_cannot_be_trusted_is_refused_as_one_message(header: bytes, expected: str) -> None:
    got = outcomes([*message(), header, b"a", *message()])
    assert got[0] == 5 and len(got) == 2
    assert str(got[1]).startswith(expected)


# Checksums and sizes ------------------------------------------------------------------------------------------------


def test_a_checksum_catches_every_changed_byte_of_the_payload() -> None:
    frames = message(checksum=True)
    for at in range(1, len(frames)):
        for index in range(len(frames[at])):
            damaged = bytearray(frames[at])
            damaged[index] ^= 1 << index % 8
            with pytest.raises(WireError, match="expected the checksum of its header"):
                codec.decode([*frames[:at], bytes(damaged), *frames[at + 1 :]])


@given(st.binary(min_size=1, max_size=40), st.data())
def test_a_checksum_catches_any_other_bytes_of_the_same_sizes(payload: bytes, data: st.DataObject) -> None:
    other = data.draw(st.binary(min_size=len(payload), max_size=len(payload)).filter(lambda other: other != payload))
    header, _ = codec.encode(Status("x"), 0, 0.0, [payload], checksum=True)
    with pytest.raises(WireError, match="expected the checksum"):
        codec.decode([header, other])


def test_a_checksum_covers_the_frames_in_their_order() -> None:
    header, *_ = codec.encode(Status("x"), 0, 0.0, [b"ab", b"cd"], checksum=True)
    assert codec.decode([header, b"ab", b"cd"])[1] == [b"ab", b"cd"]
    with pytest.raises(WireError, match="expected the checksum"):
        codec.decode([header, b"cd", b"ab"])


def test_frames_are_counted_and_measured() -> None:
    header, *_ = codec.encode(Status("x"), 0, 0.0, [b"ab", b"cde"])
    for payload, expected in (
        ([b"ab"], "expected 2 payload frames as its header says, got 1"),
        ([b"ab", b"cde", b""], "expected 2 payload frames as its header says, got 3"),
        ([b"ab", b"cd"], "payload frame 1: expected 3 bytes as the header says, got 2"),
        ([b"cde", b"ab"], "payload frame 0: expected 2 bytes as the header says, got 3"),
    ):
        with pytest.raises(WireError, match=expected):
            codec.decode([header, *payload])
    with pytest.raises(WireError, match="expected 1 to 16385 frames, got 0"):
        codec.decode([])


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("MAX_FRAME_BYTES", "largest frame: expected at most 10 bytes"),
        ("MAX_MESSAGE_BYTES", "message: expected at most 10 bytes"),
        ("MAX_HEADER_BYTES", "header: expected at most 10 bytes"),
        ("MAX_FRAMES", "message: expected 1 to 11 frames, got 12"),
    ],
)
def test_limits_hold_on_both_ends(monkeypatch: pytest.MonkeyPatch, limit: str, expected: str) -> None:
    frames = codec.encode(Status("x"), 0, 0.0, [b"", bytes(500), *[b""] * 9])
    monkeypatch.setattr(codec, limit, 10)
    with pytest.raises(WireError, match=expected):
        codec.encode(Status("x"), 0, 0.0, frames[1:])
    with pytest.raises(WireError, match=expected):
        codec.decode(frames)


def test_a_header_over_its_limit_is_not_read_for_splitting_either(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = [*message(), *message()]
    monkeypatch.setattr(codec, "MAX_HEADER_BYTES", 10)
    assert [len(one) for one in codec.split(frames)] == [4]


# Headers ------------------------------------------------------------------------------------------------------------


def test_another_schema_version_is_named_even_if_its_header_looks_different() -> None:
    for header in ([SCHEMA + 1, 4], [SCHEMA + 1, 4, 0.0, {"type": "status", "status": "x"}, []]):
        frames = [msgspec.msgpack.encode(header)]
        with pytest.raises(WireError, match=f"expected schema {SCHEMA}, got {SCHEMA + 1}"):
            codec.decode(frames)
        assert codec.request_id(frames) == 4


def test_text_that_is_not_unicode_and_huge_numbers_are_refused_by_the_sender() -> None:
    for body in (Status("\ud800"), FailRequest(1 << 70, "", "")):
        with pytest.raises(WireError, match="header: expected Unicode text and 64-bit numbers"):
            codec.encode(body, 0, 0.0)


def test_a_header_out_of_range_says_where() -> None:
    header = msgspec.msgpack.encode(Header(SCHEMA, 0, 0.0, LeaseRequest(0)))
    with pytest.raises(WireError, match=r"header: Expected `int` >= 1 - at `\$\[3\]\.count`"):
        codec.decode([header])


@pytest.mark.parametrize(
    "header", [b"\x95\x01" + b"\x91" * 100_000, b"\x95\x02\x01\xcb" + bytes(8) + b"\x81\xa1a" * 100_000]
)
def test_a_deeply_nested_header_is_refused(header: bytes) -> None:
    assert len(list(codec.split([header, b""]))) == 1
    with pytest.raises(WireError):
        codec.decode([header])


# Damage -------------------------------------------------------------------------------------------------------------


def damaged(frames: list[Frame], data: st.DataObject, first: int) -> list[Frame]:
    """Up to four accidents that befall the frames from ``first`` on."""
    frames = list(frames)
    for _ in range(data.draw(st.integers(1, 4))):
        if len(frames) <= first:
            break
        at = data.draw(st.integers(first, len(frames) - 1))
        frame = bytearray(frames[at])
        match data.draw(st.sampled_from(["flip", "cut", "grow", "drop", "repeat", "replace", "swap"])):
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
            case "swap":
                other = data.draw(st.integers(first, len(frames) - 1))
                frames[at], frames[other] = frames[other], frames[at]
    return frames


@settings(max_examples=300)
@given(st.data())
def test_damaged_frames_raise_nothing_but_wire_errors(data: st.DataObject) -> None:
    for one in codec.split(damaged([*message(), *message()], data, 0)):
        codec.request_id(one)
        try:
            received(one)
        except WireError as error:
            assert "\n" not in str(error)


@settings(max_examples=200)
@given(groups(), st.data())
def test_a_damaged_payload_with_a_checksum_is_refused_or_unchanged(group: Group, data: st.DataObject) -> None:
    frames = message(group, checksum=True)
    try:
        got = received(damaged(frames, data, 1))
    except WireError as error:
        assert "\n" not in str(error)
    else:
        assert got is not None and same_group(got, group)


@settings(max_examples=200)
@given(st.lists(st.binary(max_size=80), min_size=1, max_size=4))
def test_arbitrary_bytes_raise_nothing_but_wire_errors(frames: list[bytes]) -> None:
    for one in codec.split(frames):
        with pytest.raises(WireError):
            received(one)
