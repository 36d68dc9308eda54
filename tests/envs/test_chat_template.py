"""Rendering only appends: what is added after a sampled turn equals what the whole conversation has there."""

from __future__ import annotations

from typing import Any

import pytest
from chat_templates import (
    CHATML,
    ENDS,
    FORGETFUL,
    HEADERS,
    INSTRUCTION,
    PLAIN,
    THINKS,
    assistant,
    result,
    system,
    tokenizer,
    tool,
    user,
)
from transformers import PreTrainedTokenizerFast

from streamrl.envs.chat.template import ChatTemplate
from streamrl.errors import ConfigError
from streamrl.policy.tokenizer import CHAT_TEMPLATE, character_tokenizer

Messages = list[dict[str, Any]]
ADD = tool("add", "a", "b")
CALLS = [
    system("Be brief."),
    user("3+4?"),
    assistant(None, ("add", '{"a": 3, "b": 4}')),
    result("7"),
    assistant("It is 7."),
    user("Sure?"),
    assistant("Yes"),
]
TWO_CALLS = [
    user("3+4, 5+6?"),
    assistant("Both.", ("add", '{"a": 3, "b": 4}'), ("add", '{"a": 5, "b": 6}')),
    result("7"),
    result("11", "call00001"),
    assistant("7 and 11"),
]
PLAINLY = [user("3+4?"), assistant("7"), user("Sure?"), assistant("Yes"), user("Really?"), assistant("Yes!")]


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    return character_tokenizer() if template == CHAT_TEMPLATE else tokenizer(template)


def whole(template: str, messages: Messages, tools: list[Any] | None, *, ask: bool) -> str:
    return str(
        tokenizer_of(template).apply_chat_template(
            [message | {"content": message["content"] or ""} | parsed(message) for message in messages],
            tools=tools,
            tokenize=False,
            add_generation_prompt=ask,
        )
    )


def parsed(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return {}
    import json

    calls = [call["function"] for call in message["tool_calls"]]
    arguments = [{"name": each["name"], "arguments": json.loads(each["arguments"])} for each in calls]
    return {"tool_calls": [{"id": "x", "type": "function", "function": each} for each in arguments]}


@pytest.mark.parametrize(
    ("template", "messages", "tools"),
    [
        (CHATML, CALLS, [ADD]),
        (CHATML, TWO_CALLS, [ADD]),
        (CHATML, PLAINLY, None),
        (HEADERS, CALLS, [ADD]),
        (HEADERS, PLAINLY, None),
        (INSTRUCTION, PLAINLY, None),
        (CHAT_TEMPLATE, CALLS, [ADD]),
        (CHAT_TEMPLATE, TWO_CALLS, [ADD]),
    ],
    ids=lambda value: None if isinstance(value, list | None) else str(value)[:12],
)
def test_a_demonstration_reads_as_the_whole_conversation_rendered_at_once(
    template: str, messages: Messages, tools: list[Any] | None
) -> None:
    reader = tokenizer_of(template)
    ids, mask = ChatTemplate(reader).demonstration(messages, tools)
    assert reader.decode(ids) == whole(template, messages, tools, ask=False).rstrip("\n")
    end = ENDS.get(template, "<eos>")
    says = "".join(reader.decode([each]) for each, said in zip(ids, mask, strict=True) if said).split(end)
    assert [each.strip() for each in says[:-1]] == [
        whole(template, [user("Q"), message], None, ask=False)
        .removeprefix(whole(template, [user("Q")], None, ask=True))
        .rpartition(end)[0]
        .strip()
        for message in messages
        if message["role"] == "assistant"
    ]


def test_a_start_is_the_tokens_of_the_rendered_conversation() -> None:
    reader = tokenizer(CHATML)
    text = whole(CHATML, CALLS[:2], [ADD], ask=True)
    assert ChatTemplate(reader).start(CALLS[:2], [ADD]) == reader.encode(text, add_special_tokens=False)


def test_after_a_turn_without_its_end_token_the_template_closes_it() -> None:
    reader = tokenizer(CHATML)
    template = ChatTemplate(reader)
    history, new = [user("Hi"), assistant("hello")], [user("More")]
    ended = template.extend(history, new, None, reader.encode("hello<|im_end|>"))
    cut_short = template.extend(history, new, None, reader.encode("hello"))
    assert reader.decode(ended) == "\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
    assert cut_short == [*template.end_tokens, *ended]


def test_reasoning_that_the_template_drops_later_stays_in_what_was_sampled() -> None:
    reader = tokenizer(CHATML)
    history = [user("3+4?"), assistant("7", reasoning="3 and 4 make 7")]
    assert "3 and 4" not in whole(CHATML, [*history, user("Sure?")], None, ask=True)
    context = ChatTemplate(reader).extend(history, [user("Sure?")], None, reader.encode("x<|im_end|>"))
    assert reader.decode(context) == "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"


def test_neighbouring_tool_results_are_rendered_together() -> None:
    reader = tokenizer(CHATML)
    context = ChatTemplate(reader).extend(TWO_CALLS[:2], TWO_CALLS[2:4], [ADD], reader.encode("x<|im_end|>"))
    assert reader.decode(context) == (
        "\n<|im_start|>user\n<tool_response>\n7\n</tool_response>\n<tool_response>\n11\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_template_without_any_special_token_is_extended_by_its_text() -> None:
    reader = tokenizer(PLAIN)
    template = ChatTemplate(reader)
    assert template.end_tokens == ()
    assert reader.decode(template.extend([user("a"), assistant("b")], [user("c")], None, reader.encode("b"))) == (
        "\nuser: c\nassistant: "
    )
    ids, mask = template.demonstration([user("a"), assistant("b")])
    assert reader.decode(ids) == "user: a\nassistant: b<|end|>"
    assert sum(mask) == 2


@pytest.mark.parametrize("template", [CHATML, CHAT_TEMPLATE])
def test_text_that_spells_a_special_token_is_text(template: str) -> None:
    reader = tokenizer_of(template)
    end = ENDS.get(template, "<eos>")
    ids = ChatTemplate(reader).start([user(f"a{end}b")])
    assert reader.decode(ids) == whole(template, [user(f"a{end}b")], None, ask=True)
    assert ids.count(reader.convert_tokens_to_ids(end)) == 1


def test_a_conversation_can_go_on_after_an_answer_without_a_new_message() -> None:
    reader = tokenizer(CHATML)
    context = ChatTemplate(reader).extend([user("a"), assistant("b")], [], None, reader.encode("b<|im_end|>"))
    assert reader.decode(context) == "\n<|im_start|>assistant\n"


def test_a_tokenizer_without_a_chat_template_is_refused_in_one_line() -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer(PLAIN).backend_tokenizer)
    with pytest.raises(ConfigError, match="has no chat template; use policy.complete"):
        ChatTemplate(bare)


def test_a_template_that_writes_only_the_last_message_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be extended turn by turn"):
        ChatTemplate(tokenizer(FORGETFUL))


def test_messages_that_the_template_refuses_are_a_value_error_with_its_reason() -> None:
    template = ChatTemplate(tokenizer(INSTRUCTION))
    with pytest.raises(ValueError, match="refuses them: roles must alternate user/assistant"):
        template.start([user("a"), user("b")])
    with pytest.raises(ValueError, match="cannot go on with them.*roles must alternate"):
        template.extend([user("a"), assistant("b")], [user("c"), user("d")], None, [])


def test_tools_for_a_template_that_shows_no_way_to_call_them_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"set model\.tool_format"):
        ChatTemplate(tokenizer(INSTRUCTION)).start([user("a")], [ADD])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([user("a")], "ends with one of the assistant's"),
        ([assistant("a")], "begins with another message"),
        ([user("a"), assistant("b"), user("c")], "ends with one of the assistant's"),
    ],
)
def test_a_demonstration_is_a_question_and_ends_with_an_answer(messages: Messages, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatTemplate(tokenizer(CHATML)).demonstration(messages)


@pytest.mark.parametrize(
    ("template", "text", "reasoning", "content"),
    [
        (CHATML, "7<|im_end|>", "", "7"),
        (CHATML, "<think>\n3 and 4\n</think>\n\n7<|im_end|>", "3 and 4", "7"),
        (CHATML, "<think>never ends", "never ends", ""),
        (CHATML, "a </think> b", "", "a </think> b"),
        (THINKS, "3 and 4\n</think>\n\n7<|im_end|>", "3 and 4", "7"),
        (THINKS, "never ends", "never ends", ""),
        (CHATML, "7 \n<|im_end|>", "", "7 \n"),
        (CHATML, "<|im_start|>7", "", "7"),
    ],
)
def test_reasoning_and_content_are_told_apart(template: str, text: str, reasoning: str, content: str) -> None:
    reader = tokenizer(template)
    found = ChatTemplate(reader).parse(reader.encode(text, add_special_tokens=False))
    assert (found.reasoning, found.content, found.calls) == (reasoning, content, [])


def test_content_ends_before_a_stop_string() -> None:
    reader = tokenizer(CHATML)
    assert ChatTemplate(reader).parse(reader.encode("So:\nObservation: 7"), ["\nObservation:", "zzz"]).content == "So:"


def test_without_tools_what_looks_like_a_call_is_text() -> None:
    reader = tokenizer(CHATML)
    ids = reader.encode('<tool_call>{"name": "add", "arguments": {}}</tool_call>')
    template = ChatTemplate(reader)
    assert template.parse(ids, calls=False).content == '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert [call.name for call in template.parse(ids).calls] == ["add"]
