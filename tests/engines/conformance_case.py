"""One engine on trial: how it is started, what it honestly lacks, and one event loop for its whole life."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import pytest
from conformance_model import ConformanceModel

from streamrl.ports import Engine
from streamrl.types import Generation, SamplingParams

T = TypeVar("T")
SLOTS = 16
"""Sequences at once; an engine under test is built with it."""


@dataclass
class EngineCase:
    """A context manager: the engine starts when it is entered and is closed when it is left.

    Whatever an engine lacks is said here; the suite then checks that it is refused, never skips it.
    """

    name: str
    """What ``facts().engine`` begins with."""
    model: ConformanceModel
    start: Callable[[], Coroutine[Any, Any, Engine]]
    """A running engine over ``model.folder``, with ``SLOTS`` slots, of ``MAX_LENGTH`` tokens, at version −1."""
    kv: str
    tolerance: float = 1e-4
    """Log-probs may differ from the reference by so much at most."""
    rms: float | None = None
    """None where the engine computes in float32. Coarser dtypes move what truncation keeps: then all log-probs count,
    with so much root mean square difference in a test."""
    draws: int = 2000
    """Tokens drawn to compare frequencies."""
    seeded: bool = True
    """The same seed gives the same tokens."""
    refused: frozenset[str] = frozenset()
    """Names in ``SHAPES`` that ``generate`` refuses, greedy or not, with a ``ValueError`` about ``sampling``."""
    score_temperatures: tuple[float, ...] = (0.5, 1.0, 1.3)
    """``score`` refuses others with ``ValueError``."""
    kill: Callable[[Engine], None] | None = None
    """Ends the process that holds the model, as the kernel would; None where that is this process."""
    deadline_s: float = 120.0
    sets: dict[int, str] = field(default_factory=dict)
    """Which weight set each version is."""

    def __enter__(self) -> EngineCase:
        self._runner = asyncio.Runner()
        self.restart()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.run(self.engine.close())
        finally:
            self._runner.close()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """On the engine's own event loop; ``TimeoutError`` after ``deadline_s``."""

        async def bounded() -> T:
            return await asyncio.wait_for(coroutine, self.deadline_s)

        return self._runner.run(bounded())

    def restart(self) -> None:
        """Start a new engine in the place of one that was closed."""
        self.engine = self.run(self.start())

    def refuses(self, shape: str, prompt: list[int], params: SamplingParams) -> bool:
        """Whether the engine declares that it does not serve ``shape``; that it says so in words is checked."""
        if shape in self.refused:
            with pytest.raises(ValueError, match="sampling"):
                self.run(self.engine.generate(prompt, params))
        return shape in self.refused

    async def install(self, which: str, version: int | None = None) -> int:
        """Serve the weight set ``which`` as ``version``; None: the next one."""
        await self.engine.pause()
        version = self.engine.version + 1 if version is None else version
        await self.engine.load(version, self.model.weights[which])
        self.sets[version] = which
        await self.engine.resume()
        return version

    def check(self, prompt: list[int], params: SamplingParams, answer: Generation) -> np.ndarray:
        """``answer`` is well formed, and each log-prob is the reference's under the weights of its label.

        Returns the differences, of the tokens whose kept set is not too close to call.
        """
        said = answer.token_ids.tolist()
        counts = [count for _, count in answer.versions]
        assert 1 <= len(said) <= params.max_tokens
        assert (answer.token_ids.dtype, answer.logprobs.dtype) == (np.int32, np.float32)
        assert len(answer.logprobs) == len(said)
        assert min(counts) > 0, answer.versions
        assert sum(counts) == len(said), answer.versions
        versions = [version for version, _ in answer.versions]
        assert versions == sorted(set(versions)), "spans are in order and each version has one"
        spans = [(self.sets[version], count) for version, count in answer.versions]
        expected = self.model.expected(prompt, said, spans, params, self.kv)
        decided = expected.distance > 2 * self.tolerance
        outside = np.flatnonzero(decided & np.isneginf(expected.logprobs))
        assert outside.tolist() == [], f"tokens that {params} removes, at these positions of the answer"
        difference = (answer.logprobs - expected.logprobs)[decided if self.rms is None else expected.logprobs > -np.inf]
        assert len(difference) >= len(said) // 2, "most kept sets must be clear enough to be judged"
        np.testing.assert_array_less(np.abs(difference), self.tolerance, err_msg=f"log-probs of {params}")
        return difference


SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_k": {"top_k": 6},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "top_k and top_p": {"top_k": 12, "top_p": 0.7},
    "min_p, top_k and top_p": {"min_p": 0.02, "top_k": 12, "top_p": 0.9},
    "repetition penalty": {"repetition_penalty": 1.4},
    "presence penalty": {"presence_penalty": 0.8},
    "frequency penalty": {"frequency_penalty": 0.6},
    "all penalties and top_k": {
        "repetition_penalty": 0.8,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.4,
        "top_k": 20,
    },
}
TEMPERATURES = (0.5, 1.0, 1.3)
GREEDY = SamplingParams(temperature=0, max_tokens=24)


def prompts(count: int, longest: int = 40, seed: int = 0) -> list[list[int]]:
    """Token ids of printable characters, of 1 … ``longest`` tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(8, 104, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


async def generate_all(case: EngineCase, asked: list[tuple[list[int], SamplingParams]]) -> list[Generation]:
    """All at once, each answer checked against the reference."""
    answers = await asyncio.gather(*(case.engine.generate(prompt, params) for prompt, params in asked))
    check_all(case, asked, answers)
    return list(answers)


def check_all(case: EngineCase, asked: list[tuple[list[int], SamplingParams]], answers: list[Generation]) -> None:
    pairs = zip(asked, answers, strict=True)
    differences = np.concatenate([case.check(prompt, params, answer) for (prompt, params), answer in pairs])
    assert case.rms is None or np.sqrt(np.mean(differences**2)) < case.rms


async def check_64_in_flight_across_5_updates(case: EngineCase) -> None:
    """More requests than slots, begun under ``A``: all end whole, and each token is scored again under its label."""
    asked = [
        (prompt, SamplingParams(max_tokens=20 + 2 * index, seed=index))
        for index, prompt in enumerate(prompts(64, seed=30))
    ]
    first = await case.install("A")
    tasks = [asyncio.ensure_future(case.engine.generate(*each)) for each in asked]
    for index, which in enumerate(("B", "A", "late", "B", "A")):
        await asyncio.wait(tasks[8 * index : 8 * index + 4])
        await case.install(which)
    answers = await asyncio.gather(*tasks)
    assert [len(answer.token_ids) for answer in answers] == [params.max_tokens for _, params in asked]
    check_all(case, asked, answers)
    assert {version for answer in answers for version, _ in answer.versions} == set(range(first, first + 6))


class Serving:
    """Each test starts with the weights ``A``."""

    @pytest.fixture(autouse=True)
    def serving_a(self, engine_case: EngineCase) -> None:
        engine_case.run(engine_case.install("A"))
