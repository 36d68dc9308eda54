"""Chat completions, asked for by the OpenAI SDK."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from proxy_server import ADD, PROMPT, USER, ScriptedSession, Served, calls, play, says, script

from streamrl.envs.chat.tool_calls import ToolCall

pytest.importorskip("openai", reason="the OpenAI SDK is not installed")


def test_a_turn_comes_back_with_its_usage():
    async def scene(session: ScriptedSession, served: Served) -> None:
        answer = await served.openai.chat.completions.create(model="any", messages=USER)
        assert answer.choices[0].message.content == "3"
        assert answer.choices[0].finish_reason == "stop"
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 2, 5)
        assert answer.model == "any"
        assert session.requests[0].messages == USER
        assert session.requests[0].tools is None

    play(script(says("3")), scene)


def test_tools_and_calls_pass_both_ways():
    async def scene(session: ScriptedSession, served: Served) -> None:
        create = served.openai.chat.completions.create
        answer = await create(model="any", messages=USER, tools=[ADD])
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert choice.message.tool_calls[0].function.name == "add"
        assert choice.message.tool_calls[0].function.arguments == '{"a":1,"b":2}'
        assert session.requests[0].tools == [ADD]
        result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "3"}
        await create(model="any", messages=[*USER, choice.message, result], tools=[ADD])
        sent = session.requests[1].messages
        assert sent[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a":1,"b":2}'}
        assert sent[2] == result

    play(script(says("", calls("add", a=1, b=2)), says("3")), scene)


def test_a_call_that_cannot_be_read_is_told_as_the_policy_wrote_it():
    unreadable = ToolCall("call00000", "add", None, "add(1,", "cannot be read")

    async def scene(_: ScriptedSession, served: Served) -> None:
        answer = await served.openai.chat.completions.create(model="any", messages=USER, tools=[ADD])
        assert answer.choices[0].message.tool_calls[0].function.arguments == "add(1,"

    play(script(says("", unreadable)), scene)


def test_a_stream_adds_up_to_the_turn():
    turn = says("a" * 100, calls("add", a=1, b=2), calls("add", "call00001", a=3, b=4), reasoning="think")

    async def scene(_: ScriptedSession, served: Served) -> None:
        stream = await served.openai.chat.completions.create(
            model="any", messages=USER, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert "".join(delta.content or "" for delta in deltas) == "a" * 100
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "think"
        assert joined_calls(deltas) == {
            0: ["call00000", "add", '{"a":1,"b":2}'],
            1: ["call00001", "add", '{"a":3,"b":4}'],
        }
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
        assert chunks[-1].usage.completion_tokens == 101

    play(script(turn), scene)


def joined_calls(deltas: list[Any]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for part in (part for delta in deltas for part in delta.tool_calls or ()):
        if part.id:
            found[part.index] = [part.id, part.function.name, ""]
        found[part.index][2] += part.function.arguments
    return found


def test_the_streaming_helper_of_the_sdk_understands_the_stream():
    async def scene(_: ScriptedSession, served: Served) -> None:
        async with served.openai.chat.completions.stream(model="any", messages=USER) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.tool_calls[0].function.arguments == '{"a":1}'

    play(script(says("so", calls("add", a=1))), scene)


def test_every_choice_of_n_is_a_turn_of_its_own():
    async def scene(session: ScriptedSession, served: Served) -> None:
        answer = await served.openai.chat.completions.create(model="any", messages=USER, n=3)
        assert sorted(choice.message.content for choice in answer.choices) == ["1", "2", "3"]
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage.completion_tokens == 6
        assert len(session.requests) == 3

    play(script(says("1"), says("2"), says("3")), scene)


def test_choices_of_a_stream_keep_their_index():
    async def scene(_: ScriptedSession, served: Served) -> None:
        stream = await served.openai.chat.completions.create(model="any", messages=USER, n=2, stream=True)
        said = ["", ""]
        async for chunk in stream:
            said[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert sorted(said) == ["1", "2"]

    play(script(says("1"), says("2")), scene)


@pytest.mark.parametrize("stop", ["x", ["x", "yz"]])
def test_stop_strings_reach_the_session(stop: str | list[str]):
    async def scene(session: ScriptedSession, served: Served) -> None:
        await served.openai.chat.completions.create(model="any", messages=USER, stop=stop)
        assert session.requests[0].stop == ([stop] if isinstance(stop, str) else stop)

    play(script(says("3")), scene)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 4}, 4),
    ],
)
def test_the_lower_of_both_token_limits_holds(given: dict[str, int], wanted: int | None):
    async def scene(session: ScriptedSession, served: Served) -> None:
        await served.openai.chat.completions.create(model="any", messages=USER, **given)
        assert session.requests[0].max_tokens == wanted

    play(script(says("3")), scene)


def test_a_turn_that_was_cut_says_length():
    async def scene(_: ScriptedSession, served: Served) -> None:
        answer = await served.openai.chat.completions.create(model="any", messages=USER)
        assert answer.choices[0].finish_reason == "length"

    play(script(says("3", finish="length")), scene)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probs_are_those_of_the_sampled_tokens(stream: bool):
    async def scene(_: ScriptedSession, served: Served) -> None:
        answer = await served.openai.chat.completions.create(model="any", messages=USER, logprobs=True, stream=stream)
        first = [chunk async for chunk in answer][0] if stream else answer
        told = first.choices[0].logprobs.content
        assert [(each.token, each.logprob) for each in told] == [("1", -0.5), ("2", -1.0), ("$", -1.5)]
        assert told[0].bytes == [ord("1")]
        assert told[0].top_logprobs == []

    play(script(says("12")), scene)


def test_token_ids_are_told_on_request():
    async def scene(_: ScriptedSession, served: Served) -> None:
        create = served.openai.chat.completions.create
        answer = await create(model="any", messages=USER, extra_body={"return_token_ids": True})
        assert answer.choices[0].token_ids == list(says("12").token_ids)
        assert answer.choices[0].prompt_token_ids == list(PROMPT)

    play(script(says("12")), scene)


def test_sampling_of_its_own_is_named_counted_and_not_followed(caplog: pytest.LogCaptureFixture):
    async def scene(session: ScriptedSession, served: Served) -> None:
        create = served.openai.chat.completions.with_raw_response.create
        answer = await create(
            model="any", messages=USER, temperature=0.2, top_p=1.0, seed=3, extra_body={"guided": "x"}
        )
        assert answer.headers["x-streamrl-ignored"] == "guided, seed, temperature"
        assert served.desk.counts["ignored/temperature"] == 1
        assert served.desk.counts["ignored/other"] == 1
        assert len(session.requests) == 1
        assert "'temperature'" in caplog.text

    play(script(says("3")), scene)


def test_parameters_that_ask_for_what_the_run_does_are_no_override():
    async def scene(_: ScriptedSession, served: Served) -> None:
        create = served.openai.chat.completions.with_raw_response.create
        answer = await create(
            model="any", messages=USER, temperature=1, presence_penalty=0, tool_choice="auto", user="me", logit_bias={}
        )
        assert "x-streamrl-ignored" not in answer.headers

    play(script(says("3")), scene)


def test_the_runs_own_min_p_is_no_override_and_another_is():
    async def scene(session: ScriptedSession, served: Served) -> None:
        session.episode.limits = replace(session.episode.limits, min_p=0.05)
        for asked, status in ((0.05, 200), (0, 400)):
            answer, body, _ = await served.post("chat/completions", {"messages": USER, "min_p": asked})
            assert answer == status
        assert body["error"]["param"] == "min_p"

    play(script(says("3")), scene, strict=True)


def test_a_strict_desk_refuses_sampling_of_its_own():
    async def scene(session: ScriptedSession, served: Served) -> None:
        status, body, _ = await served.post("chat/completions", {"messages": USER, "temperature": 0})
        assert status == 400
        assert body["error"]["param"] == "temperature"
        assert session.requests == []

    play(script(says("3")), scene, strict=True)
