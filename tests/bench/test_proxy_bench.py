"""The proxy's benchmark measures the same conversations on both sides."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from streamrl.bench.proxy import SESSIONS, TURNS, Bench, serving
from streamrl.cli import main
from streamrl.envs.codec import Codec
from streamrl.policy.tokenizer import EOS, character_tokenizer
from streamrl.types import Generation, SamplingParams

TOKENIZER = character_tokenizer()


class Counting:
    """An engine that answers ``a`` as often as ``length`` says and remembers what it was asked."""

    def __init__(self) -> None:
        self.length = 3
        self.requests: list[tuple[tuple[int, ...], int]] = []

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        self.requests.append((tuple(prompt_ids), params.seed))
        ids = np.array(TOKENIZER.convert_tokens_to_ids([*"a" * (self.length - 1), EOS]), dtype=np.int32)
        return Generation(ids, np.zeros(self.length, dtype=np.float32), [(0, self.length)], "stop")


def with_bench(scene: Any) -> None:
    async def run() -> None:
        engine: Any = Counting()
        async with asyncio.timeout(60), serving(engine, Codec(TOKENIZER)) as bench:
            await scene(engine, bench)

    asyncio.run(run())


def test_both_sides_ask_the_engine_for_the_same_tokens_with_the_same_seeds():
    async def scene(engine: Counting, bench: Bench) -> None:
        await bench.run(bench.native)
        native, engine.requests = engine.requests, []
        await bench.run(bench.proxied)
        assert sorted(engine.requests) == sorted(native)
        assert len(native) == SESSIONS * TURNS
        assert bench.sampled == SESSIONS * TURNS * engine.length

    with_bench(scene)


def test_a_side_that_samples_other_tokens_is_refused():
    async def scene(engine: Counting, bench: Bench) -> None:
        await bench.run(bench.native)
        engine.length = 4
        with pytest.raises(AssertionError, match="same tokens"):
            await bench.run(bench.proxied)

    with_bench(scene)


def test_the_command_refuses_no_runs(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "proxy", "--runs", "0"])
    assert ended.value.code == 2
    assert "--runs 0" in capsys.readouterr().err
