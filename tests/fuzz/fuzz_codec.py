#!/usr/bin/env python3
"""Coverage-guided fuzzing of what a receiver does with frames (atheris on libFuzzer): ``make fuzz``.

    fuzz_codec.py -atheris_runs=1000000 FOUND tests/fuzz/corpus       look for failures; new inputs go to FOUND
    fuzz_codec.py -merge=1 -use_counters=0 -max_len=2048 tests/fuzz/corpus FOUND     keep those that reach new code

It stops at the first failure and leaves the input beside FOUND as ``crash-…``; put it into the corpus under a name that
says what it is, and ``test_fuzz_corpus.py`` replays it for ever. A process that grows by more than
``MAX_GROWTH_BYTES`` after the warm-up fails too.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["streamrl"]):
    from fuzz_target import from_bytes, receive, to_bytes

import psutil
from mutations import damage
from seeds import messages

WARM_UP_INPUTS = 50_000
MAX_GROWTH_BYTES = 64 << 20
"""After the warm-up, over the whole run; libFuzzer's own list of inputs lies in it."""
CHECK_EVERY = 10_000


class Watch:
    """Counts inputs and holds memory against the limit."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._began = time.monotonic()
        self._inputs = self._accepted = self._base = self._growth = 0

    def __call__(self, data: bytes) -> None:
        self._accepted += receive(data) > 0
        self._inputs += 1
        if self._inputs % CHECK_EVERY == 0:
            self._check()

    def _check(self) -> None:
        resident = self._process.memory_info().rss
        if self._inputs <= WARM_UP_INPUTS:
            self._base = resident
        self._growth = resident - self._base
        if self._growth > MAX_GROWTH_BYTES:
            raise MemoryError(f"grew by {self._growth >> 20} MiB in {self._inputs} inputs")
        if self._inputs % (10 * CHECK_EVERY) == 0:
            print(self, file=sys.stderr, flush=True)

    def __str__(self) -> str:
        seconds = time.monotonic() - self._began
        return (
            f"{self._inputs} inputs in {seconds:.0f} s, {self._accepted} with a message that was accepted, "
            f"{self._growth / 2**20:.1f} MiB of growth after the first {WARM_UP_INPUTS}"
        )


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """libFuzzer's own mutations of the raw input in one of ten cases, else damage that knows frames."""
    rng = random.Random(seed)
    if rng.random() < 0.1:
        return atheris.Mutate(data, max_size)
    frames = damage([bytes(frame) for frame in from_bytes(data)], rng, lambda one: atheris.Mutate(one, len(one) + 16))
    return to_bytes(frames)[:max_size]


def main() -> None:
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        for number, frames in enumerate(messages()):
            Path(folder, f"seed-{number}").write_bytes(to_bytes(frames))
        atheris.Setup([*sys.argv, folder], watch, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
