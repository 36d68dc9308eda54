"""Text completions, asked for by the OpenAI SDK."""

from __future__ import annotations

from typing import Any

import pytest
from proxy_server import PROMPT, ScriptedSession, Served, play, says, script

pytest.importorskip("openai", reason="the OpenAI SDK is not installed")


@pytest.mark.parametrize("prompt", ["1+2=", [1, 2, 3]])
def test_a_text_and_token_ids_reach_the_session_as_they_are(prompt: Any):
    async def scene(session: ScriptedSession, served: Served) -> None:
        answer = await served.openai.completions.create(model="any", prompt=prompt, max_tokens=4, stop="x")
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("3", "stop")
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 2)
        asked = session.requests[0]
        assert (asked.messages, asked.max_tokens, asked.stop) == (prompt, 4, ["x"])

    play(script(says("3")), scene)


def test_several_prompts_have_n_choices_each():
    async def scene(session: ScriptedSession, served: Served) -> None:
        answer = await served.openai.completions.create(model="any", prompt=["a", "b"], n=2)
        assert [each.index for each in answer.choices] == [0, 1, 2, 3]
        assert [each.messages for each in session.requests] == ["a", "a", "b", "b"]

    play(script(says("3")), scene)


def test_a_stream_adds_up_to_the_text():
    async def scene(_: ScriptedSession, served: Served) -> None:
        stream = await served.openai.completions.create(model="any", prompt="a", stream=True)
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks) == "a" * 100
        assert chunks[-1].choices[0].finish_reason == "stop"

    play(script(says("a" * 100)), scene)


def test_log_probs_and_token_ids_are_those_of_the_sampled_tokens():
    async def scene(_: ScriptedSession, served: Served) -> None:
        answer = await served.openai.completions.create(
            model="any", prompt="a", logprobs=1, extra_body={"return_token_ids": True}
        )
        told = answer.choices[0].logprobs
        assert (told.tokens, told.token_logprobs, told.text_offset) == (["1", "2", "$"], [-0.5, -1.0, -1.5], [0, 1, 2])
        assert answer.choices[0].token_ids == list(says("12").token_ids)
        assert answer.choices[0].prompt_token_ids == list(PROMPT)

    play(script(says("12")), scene)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": None}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 2}, "logprobs"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"prompt": ["a"] * 129}, "n"),
    ],
)
def test_a_bad_request_names_the_field(change: dict[str, Any], param: str):
    async def scene(_: ScriptedSession, served: Served) -> None:
        status, body, _headers = await served.post("completions", {"prompt": "a", **change})
        assert (status, body["error"]["param"]) == (400, param)

    play(script(says("3")), scene)
