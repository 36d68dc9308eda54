"""What is sampled, and what is said of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from conformance_case import GREEDY, SHAPES, SLOTS, TEMPERATURES, EngineCase, Serving, generate_all, prompts
from conformance_model import distribution

from streamrl.types import SamplingParams


def clearest(case: EngineCase, params: SamplingParams) -> tuple[list[int], np.ndarray]:
    """A prompt after which several tokens are kept, and clearly so, and the probabilities ``[V]`` of the next token."""
    found = []
    for prompt in prompts(30, seed=2):
        logprobs, distance = distribution(case.model.logits("A", prompt)[-1], prompt, [], params)
        if np.count_nonzero(logprobs > -4) >= 3:
            found.append((distance, prompt, np.exp(logprobs)))
    return max(found, key=lambda each: each[0])[1:]


class SamplingConformance(Serving):
    """Log-probs, frequencies, greedy, seeds, mixed batches."""

    @pytest.mark.parametrize("temperature", TEMPERATURES)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_logprobs_are_those_of_the_processed_distribution_and_no_removed_token_is_sampled(
        self, engine_case: EngineCase, shape: str, temperature: float
    ) -> None:
        params = SamplingParams(temperature=temperature, max_tokens=16, **SHAPES[shape])
        asked = [(prompt, replace(params, seed=index)) for index, prompt in enumerate(prompts(6, seed=1))]
        if not engine_case.refuses(shape, *asked[0]):
            answers = engine_case.run(generate_all(engine_case, asked))
            assert [len(answer.token_ids) for answer in answers] == [16] * 6

    @pytest.mark.parametrize(
        ("shape", "temperature"),
        [("plain", 1.0), ("top_k", 1.3), ("top_p", 0.5), ("min_p", 1.3), ("min_p, top_k and top_p", 1.0)],
    )
    def test_first_tokens_are_as_frequent_as_the_reference_says(
        self, engine_case: EngineCase, shape: str, temperature: float
    ) -> None:
        params = SamplingParams(temperature=temperature, max_tokens=1, **SHAPES[shape])
        prompt, probabilities = clearest(engine_case, params)
        if engine_case.refuses(shape, prompt, params):
            return
        expected = probabilities * engine_case.draws

        async def run() -> list[int]:
            drawn: list[int] = []
            while len(drawn) < engine_case.draws:
                wave = [replace(params, seed=len(drawn) + index) for index in range(250)]
                answers = await asyncio.gather(*(engine_case.engine.generate(prompt, each) for each in wave))
                drawn += [int(answer.token_ids[0]) for answer in answers]
            return drawn[: engine_case.draws]

        observed = np.bincount(engine_case.run(run()), minlength=len(expected))
        rare = expected < 5  # too few for chi-square: they count as one cell
        cells = [(observed[~rare], expected[~rare])]
        if expected[rare].sum() > 0:
            cells.append((observed[rare].sum(keepdims=True), expected[rare].sum(keepdims=True)))
        else:
            assert observed[rare].sum() == 0, "a removed token was sampled"
        chi_square = sum(float(((seen - due) ** 2 / due).sum()) for seen, due in cells)
        degrees = sum(len(due) for _, due in cells) - 1
        assert degrees > 0
        tail = torch.special.gammaincc(torch.tensor(degrees / 2.0), torch.tensor(chi_square / 2))
        assert tail > 1e-6, f"chi-square {chi_square:.1f} with {degrees} degrees of freedom"

    @pytest.mark.parametrize("shape", ["plain", "min_p, top_k and top_p", "repetition penalty", "frequency penalty"])
    def test_greedy_takes_the_likeliest_token_after_penalties_and_no_truncation_touches_its_logprob(
        self, engine_case: EngineCase, shape: str
    ) -> None:
        params = replace(GREEDY, **SHAPES[shape])
        asked = [(prompt, params) for prompt in prompts(4, seed=4)]
        if engine_case.refuses(shape, *asked[0]):
            return
        for (prompt, _), answer in zip(asked, engine_case.run(generate_all(engine_case, asked)), strict=True):
            said = answer.token_ids.tolist()
            rows = engine_case.model.logits("A", [*prompt, *said])[len(prompt) - 1 : -1]
            for index, (row, token) in enumerate(zip(rows, said, strict=True)):
                logprobs = distribution(row, prompt, said[:index], params)[0]
                assert logprobs[token] >= logprobs.max() - engine_case.tolerance

    def test_the_same_seed_gives_the_same_tokens_where_the_engine_says_so(self, engine_case: EngineCase) -> None:
        params = SamplingParams(max_tokens=30, seed=11)

        async def run() -> bool:
            prompt = prompts(1, seed=5)[0]
            first, again = [await engine_case.engine.generate(prompt, params) for _ in range(2)]
            return first.token_ids.tolist() == again.token_ids.tolist()

        assert engine_case.run(run()) == engine_case.seeded

    def test_many_requests_of_different_lengths_and_parameters_share_the_engine(self, engine_case: EngineCase) -> None:
        shapes = [name for name in SHAPES if name not in engine_case.refused]
        asked = [
            (
                prompt,
                SamplingParams(
                    temperature=(0.0, *TEMPERATURES)[index % 4],
                    max_tokens=1 + (7 * index) % 60,
                    seed=index,
                    **SHAPES[shapes[index % len(shapes)]],
                ),
            )
            for index, prompt in enumerate(prompts(4 * SLOTS, longest=80, seed=6))
        ]
        answers = engine_case.run(generate_all(engine_case, asked))
        assert [len(answer.token_ids) for answer in answers] == [params.max_tokens for _, params in asked]
