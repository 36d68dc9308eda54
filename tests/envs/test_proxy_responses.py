"""The Responses API, asked for by the OpenAI SDK."""

from __future__ import annotations

from typing import Any

import pytest
from proxy_server import USER, ScriptedSession, Served, calls, play, says, script

from streamrl.envs.proxy import responses

pytest.importorskip("openai", reason="the OpenAI SDK is not installed")

TOOL = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": True}
CALL = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}


def test_a_turn_comes_back_with_its_usage():
    async def scene(session: ScriptedSession, served: Served) -> None:
        answer = await served.openai.responses.create(
            model="any", input="1+2?", instructions="Be brief.", max_output_tokens=9
        )
        assert answer.output_text == "3"
        assert answer.status == "completed"
        assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (3, 2, 5)
        asked = session.requests[0]
        assert asked.messages == [{"role": "system", "content": "Be brief."}, *USER]
        assert asked.max_tokens == 9

    play(script(says("3")), scene)


def test_output_items_given_back_are_one_assistant_message_again():
    async def scene(session: ScriptedSession, served: Served) -> None:
        create = served.openai.responses.create
        answer = await create(model="any", input=USER, tools=[TOOL])
        assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
        assert (answer.output[2].name, answer.output[2].arguments) == ("add", '{"a":1}')
        result = {"type": "function_call_output", "call_id": answer.output[2].call_id, "output": "3"}
        await create(model="any", input=[*USER, *answer.output, result], tools=[TOOL])
        assert session.requests[1].messages == [
            *USER,
            {"role": "assistant", "content": "so", "reasoning_content": "think", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call00000", "content": "3"},
        ]
        function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
        assert session.requests[1].tools == [{"type": "function", "function": function}]

    play(script(says("so", calls("add", a=1), reasoning="think"), says("3")), scene)


def test_two_assistant_messages_in_a_row_stay_two():
    said = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]

    async def scene(session: ScriptedSession, served: Served) -> None:
        await served.openai.responses.create(model="any", input=[*USER, *said])
        assert session.requests[0].messages == [*USER, *said]

    play(script(says("3")), scene)


def test_a_response_is_gone_on_with_by_its_id():
    async def scene(session: ScriptedSession, served: Served) -> None:
        create = served.openai.responses.create
        first = await create(model="any", input="a", instructions="only now")
        second = await create(model="any", input="b", previous_response_id=first.id)
        await create(model="any", input="c", previous_response_id=second.id)
        assert [each["content"] for each in session.requests[2].messages] == ["a", "1", "b", "2", "c"]

    play(script(says("1"), says("2"), says("3")), scene)


def test_a_response_that_was_not_stored_or_is_too_old_is_not_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(responses, "CONVERSATIONS", 1)

    async def scene(_: ScriptedSession, served: Served) -> None:
        from openai import NotFoundError

        create = served.openai.responses.create
        unstored = await create(model="any", input="a", store=False)
        old = await create(model="any", input="a")
        await create(model="any", input="a")
        for each in (unstored, old):
            with pytest.raises(NotFoundError) as caught:
                await create(model="any", input="b", previous_response_id=each.id)
            assert caught.value.code == "previous_response_not_found"

    play(script(says("3")), scene)


def test_a_stream_adds_up_to_the_response():
    turn = says("a" * 100, calls("add", a=1), calls("add", "call00001", a=2), reasoning="think")

    async def scene(_: ScriptedSession, served: Served) -> None:
        said, numbers = "", []
        async with served.openai.responses.stream(model="any", input="1+2?") as stream:
            async for each in stream:
                numbers.append(each.sequence_number)
                said += each.delta if each.type == "response.output_text.delta" else ""
            final = await stream.get_final_response()
        assert said == final.output_text == "a" * 100
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
        assert [item.arguments for item in final.output[2:]] == ['{"a":1}', '{"a":2}']
        assert numbers == list(range(len(numbers)))
        assert final.usage.output_tokens == 101

    play(script(turn), scene)


def test_a_turn_that_was_cut_is_incomplete():
    async def scene(_: ScriptedSession, served: Served) -> None:
        answer = await served.openai.responses.create(model="any", input="a")
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        stream = await served.openai.responses.create(model="any", input="a", stream=True)
        assert [each.type async for each in stream][-1] == "response.incomplete"

    play(script(says("3", finish="length")), scene)


def test_log_probs_come_on_request():
    async def scene(_: ScriptedSession, served: Served) -> None:
        answer = await served.openai.responses.create(model="any", input="a", include=["message.output_text.logprobs"])
        told = answer.output[0].content[0].logprobs
        assert [(each.token, each.logprob) for each in told] == [("3", -0.5), ("$", -1.0)]

    play(script(says("3")), scene)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
    ],
)
def test_a_bad_request_names_the_field(change: dict[str, Any], param: str):
    async def scene(_: ScriptedSession, served: Served) -> None:
        status, body, _headers = await served.post("responses", {"model": "any", "input": "a", **change})
        assert (status, body["error"]["param"]) == (400, param)

    play(script(says("3")), scene)
