"""Where an answer ends, and which requests are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from conformance_case import GREEDY, SLOTS, EngineCase, Serving, generate_all, prompts
from conformance_model import MAX_LENGTH

from streamrl.policy.tokenizer import EOS, character_tokenizer
from streamrl.types import SamplingParams


async def varied_greedy(case: EngineCase) -> tuple[list[int], list[int]]:
    """A prompt and its greedy answer, of as many different tokens as can be had."""
    asked = prompts(SLOTS, seed=3)
    answers = await generate_all(case, [(prompt, GREEDY) for prompt in asked])
    said = [answer.token_ids.tolist() for answer in answers]
    best = max(range(len(said)), key=lambda index: len(set(said[index])))
    assert len(set(said[best])) >= 4, "the model is too monotonous to test where an answer ends"
    return asked[best], said[best]


class EndingConformance(Serving):
    """Stop tokens and strings, lengths, requests that mean nothing."""

    def test_a_stop_token_ends_the_answer_and_belongs_to_it(self, engine_case: EngineCase) -> None:
        async def run() -> None:
            prompt, said = await varied_greedy(engine_case)
            token = list(dict.fromkeys(said))[3]
            params = replace(GREEDY, stop_token_ids=(token, 2))
            (answer,) = await generate_all(engine_case, [(prompt, params)])
            assert answer.token_ids.tolist() == said[: said.index(token) + 1]
            assert answer.finish_reason == "stop"

        engine_case.run(run())

    def test_the_token_that_completes_a_stop_string_ends_the_answer_and_belongs_to_it(
        self, engine_case: EngineCase
    ) -> None:
        tokenizer = character_tokenizer()

        async def run() -> None:
            prompt, said = await varied_greedy(engine_case)
            fourth = said.index(list(dict.fromkeys(said))[3])
            pair = tokenizer.decode(said[fourth - 1 : fourth + 1], skip_special_tokens=False)
            params = replace(GREEDY, stop_strings=("never said", pair))
            (answer,) = await generate_all(engine_case, [(prompt, params)])
            assert answer.token_ids.tolist() == said[: fourth + 1]
            assert answer.finish_reason == "stop"

        engine_case.run(run())

    def test_an_answer_that_nothing_stops_ends_by_length_even_past_the_end_token(self, engine_case: EngineCase) -> None:
        end = character_tokenizer().convert_tokens_to_ids(EOS)
        asked = [(prompt, SamplingParams(temperature=1.3, max_tokens=80, seed=index))
                 for index, prompt in enumerate(prompts(SLOTS, seed=7))]  # fmt: skip
        answers = engine_case.run(generate_all(engine_case, asked))
        assert any(end in answer.token_ids[:-1] for answer in answers), "no answer had a chance to end early"
        assert [(len(answer.token_ids), answer.finish_reason) for answer in answers] == [(80, "length")] * SLOTS

    def test_the_context_ends_an_answer_by_length(self, engine_case: EngineCase) -> None:
        prompt = [9] * (MAX_LENGTH - 3)
        (answer,) = engine_case.run(generate_all(engine_case, [(prompt, replace(GREEDY, max_tokens=10))]))
        assert (len(answer.token_ids), answer.finish_reason) == (3, "length")

    @pytest.mark.parametrize(
        ("prompt", "changes"),
        [
            ([], {}),
            ([9] * MAX_LENGTH, {}),
            ([9, 104], {}),
            ([-1], {}),
            ([9], {"temperature": -1.0}),
            ([9], {"temperature": float("nan")}),
            ([9], {"top_k": -1}),
            ([9], {"top_p": 0.0}),
            ([9], {"top_p": 1.1}),
            ([9], {"min_p": -0.1}),
            ([9], {"min_p": 1.1}),
            ([9], {"repetition_penalty": 0.0}),
            ([9], {"presence_penalty": float("inf")}),
            ([9], {"frequency_penalty": float("nan")}),
            ([9], {"max_tokens": 0}),
            ([9], {"stop_strings": ("a", "")}),
        ],
    )
    def test_a_request_that_cannot_be_served_is_refused_and_the_engine_goes_on(
        self, engine_case: EngineCase, prompt: list[int], changes: dict[str, Any]
    ) -> None:
        async def run() -> None:
            with pytest.raises(ValueError, match=r"\w"):
                await engine_case.engine.generate(prompt, replace(GREEDY, **changes))
            await generate_all(engine_case, [([9, 10], GREEDY)])

        engine_case.run(run())
