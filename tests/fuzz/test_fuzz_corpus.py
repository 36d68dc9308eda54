"""The corpus of the fuzzer and its own damage, replayed without it: nothing crashes, nothing is kept."""

from __future__ import annotations

import gc
import random
import tracemalloc
from pathlib import Path

import pytest
from fuzz_target import from_bytes, receive, to_bytes
from mutations import damage
from seeds import messages

from streamrl.buffers.wire import codec

CORPUS = sorted(path for path in Path(__file__).with_name("corpus").iterdir() if path.is_file())


def flip(frame: bytes, rng: random.Random) -> bytes:
    """One byte changed, where there is one."""
    if not frame:
        return b"\xc1"
    at = rng.randrange(len(frame))
    return frame[:at] + bytes([rng.randrange(256)]) + frame[at + 1 :]


def test_inputs_are_frames_at_any_address() -> None:
    frames = [b"abc", b"", b"de"]
    assert from_bytes(to_bytes(frames)) == frames
    assert from_bytes(to_bytes(frames)[:-1]) == [b"abc", b"", b"d"]
    assert from_bytes(b"\xff\xff") == [b""]


@pytest.mark.parametrize("number", range(len(messages())))
def test_every_message_that_fuzzing_starts_from_is_accepted(number: int) -> None:
    frames = messages()[number]
    assert receive(to_bytes(frames)) == len(list(codec.split(frames)))


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_every_input_of_the_corpus_is_taken_or_refused(path: Path) -> None:
    receive(path.read_bytes())


def test_the_corpus_speaks_the_schema_of_today() -> None:
    accepted = [path for path in CORPUS if receive(path.read_bytes())]
    assert len(accepted) > len(CORPUS) // 10, "the schema changed: make fuzz, then merge what it found (fuzz_codec.py)"


def test_damage_that_knows_frames_is_taken_or_refused() -> None:
    rng = random.Random(0)
    seeds = [[bytes(frame) for frame in frames] for frames in messages()]
    outcomes = {
        bool(receive(to_bytes(damage(rng.choice(seeds), rng, lambda one: flip(one, rng))))) for _ in range(2000)
    }
    assert outcomes == {True, False}


def test_what_was_received_leaves_no_memory_behind() -> None:
    whole = [to_bytes(frames) for frames in messages()]
    inputs = [*whole, *(data[: len(data) * 2 // 3] for data in whole)]
    rounds = 20

    def replay() -> int:
        for _ in range(rounds):
            for data in inputs:
                receive(data)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = replay()  # caches fill
        grown = replay() - before
    finally:
        tracemalloc.stop()
    assert grown < 40 * rounds  # less than one object per round
