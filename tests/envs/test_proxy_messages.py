"""The Anthropic dialect, asked for by the Anthropic SDK."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from proxy_server import PROMPT, USER, ScriptedSession, Served, calls, play, says, script

from streamrl.envs.chat.tool_calls import ToolCall

pytest.importorskip("anthropic", reason="the Anthropic SDK is not installed")

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
ASK: dict[str, Any] = {"model": "any", "max_tokens": 20, "messages": USER}


def test_a_turn_comes_back_with_its_usage():
    async def scene(session: ScriptedSession, served: Served) -> None:
        answer = await served.anthropic.messages.create(**ASK, system="Be brief.", stop_sequences=["x"])
        assert [(block.type, block.text) for block in answer.content] == [("text", "3")]
        assert answer.stop_reason == "end_turn"
        assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(PROMPT), 2)
        asked = session.requests[0]
        assert asked.messages == [{"role": "system", "content": "Be brief."}, *USER]
        assert (asked.max_tokens, asked.stop) == (20, ["x"])

    play(script(says("3")), scene)


def test_a_tool_loop_comes_back_as_the_policy_wrote_it():
    async def scene(session: ScriptedSession, served: Served) -> None:
        create = served.anthropic.messages.create
        answer = await create(**ASK, tools=[TOOL])
        assert answer.stop_reason == "tool_use"
        assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
        assert answer.content[2].input == {"a": 1}
        results = [
            {"type": "tool_result", "tool_use_id": answer.content[2].id, "content": [{"type": "text", "text": "3"}]},
            {"type": "text", "text": "go on"},
        ]
        history = [*USER, {"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
        await create(**{**ASK, "messages": history}, tools=[TOOL])
        call = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
        assert session.requests[1].messages == [
            *USER,
            {"role": "assistant", "content": "so", "reasoning_content": "think", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call00000", "content": "3"},
            {"role": "user", "content": "go on"},
        ]
        function = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
        assert session.requests[1].tools == [{"type": "function", "function": function}]

    play(script(says("so", calls("add", a=1), reasoning="think"), says("3")), scene)


def test_a_call_that_cannot_be_read_survives_the_way_there_and_back():
    unreadable = ToolCall("call00000", "add", None, "add(1,", "cannot be read")

    async def scene(session: ScriptedSession, served: Served) -> None:
        create = served.anthropic.messages.create
        answer = await create(**ASK, tools=[TOOL])
        assert answer.content[0].input == {"unreadable_call": "add(1,"}
        await create(**{**ASK, "messages": [*USER, {"role": "assistant", "content": answer.content}]}, tools=[TOOL])
        assert session.requests[1].messages[1]["tool_calls"][0]["function"]["arguments"] == "add(1,"

    play(script(says("", unreadable), says("3")), scene)


def test_a_stream_adds_up_to_the_turn():
    turn = says("a" * 100, calls("add", a=1), calls("add", "call00001", a=2), reasoning="think")

    async def scene(_: ScriptedSession, served: Served) -> None:
        async with served.anthropic.messages.stream(**ASK) as stream:
            said = "".join([text async for text in stream.text_stream])
            final = await stream.get_final_message()
        assert said == "a" * 100
        assert [block.type for block in final.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert [block.input for block in final.content[2:]] == [{"a": 1}, {"a": 2}]
        assert final.content[0].thinking == "think"
        assert final.stop_reason == "tool_use"
        assert (final.usage.input_tokens, final.usage.output_tokens) == (3, 101)

    play(script(turn), scene)


def test_a_turn_that_was_cut_says_max_tokens():
    async def scene(_: ScriptedSession, served: Served) -> None:
        assert (await served.anthropic.messages.create(**ASK)).stop_reason == "max_tokens"

    play(script(says("3", finish="length")), scene)


def test_the_stop_sequence_that_ended_a_turn_is_told():
    turn = replace(says("3x"), text="3")

    async def scene(_: ScriptedSession, served: Served) -> None:
        answer = await served.anthropic.messages.create(**ASK, stop_sequences=["y", "x"])
        assert (answer.stop_reason, answer.stop_sequence, answer.content[0].text) == ("stop_sequence", "x", "3")

    play(script(turn), scene)


def test_an_answer_without_text_has_one_empty_block():
    async def scene(_: ScriptedSession, served: Served) -> None:
        answer = await served.anthropic.messages.create(**ASK)
        assert [(block.type, block.text) for block in answer.content] == [("text", "")]

    play(script(says("")), scene)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"messages": []}, "messages:"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role:"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type:"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f"}]}]},
         "messages[0].content[0].input:"),
        ({"tools": [{"name": "bad name"}]}, "tools[0].name:"),
        ({"tools": [{"type": "web_search", "name": "w"}]}, "tools[0].type:"),
        ({"max_tokens": 0}, "max_tokens:"),
        ({"max_tokens": "many"}, "max_tokens:"),
        ({"stop_sequences": [""]}, "stop_sequences[0]:"),
        ({"system": [{"type": "image"}]}, "system[0].type:"),
    ],
)  # fmt: skip
def test_a_bad_request_names_the_field(change: dict[str, Any], path: str):
    async def scene(_: ScriptedSession, served: Served) -> None:
        status, body, _headers = await served.post("messages", {**ASK, **change})
        assert status == 400
        assert body["type"] == "error"
        assert body["error"]["type"] == "invalid_request_error"
        assert body["error"]["message"].startswith(path)

    play(script(says("3")), scene)


def test_the_first_path_works_as_well_as_the_one_of_the_sdk():
    async def scene(_: ScriptedSession, served: Served) -> None:
        for path in ("messages", "v1/messages"):
            status, body, _headers = await served.post(path, ASK, **{"x-api-key": served.key, "Authorization": ""})
            assert (status, body["content"][0]["text"]) == (200, "3")

    play(script(says("3")), scene)
