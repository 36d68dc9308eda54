"""Messages are compared by what they mean, and refused by the name of their first bad field."""

from __future__ import annotations

from typing import Any

import pytest
from chat_templates import assistant, result, system, tool, user

from streamrl.envs.chat.messages import checked_tools, normalised, prefix_keys

Messages = list[dict[str, Any]]


def key(*messages: dict[str, Any]) -> int:
    return prefix_keys(normalised(messages), None)[-1]


CALLING = assistant("", ("add", '{"a": 3, "b": 4}'))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (user("a b"), {"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}),
        (CALLING, CALLING | {"content": None}),
        (CALLING, assistant("", ("add", '{"b":4,"a":3}'))),
        (CALLING, CALLING | {"tool_calls": [CALLING["tool_calls"][0] | {"id": "other"}]}),  # type: ignore[index]
        (CALLING, CALLING | {"refusal": None, "name": "Bob"}),
        (result("7"), result("7", call="other")),
        (assistant("7", reasoning="3+4"), assistant("<think>\n3+4\n</think>\n\n7")),
        (assistant("7", reasoning="3+4"), {"role": "assistant", "content": "7", "reasoning": "3+4"}),
        (system("a"), {"role": "developer", "content": "a"}),
    ],
)
def test_messages_that_mean_the_same_are_the_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert key(one) == key(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (user("a"), user("a ")),
        (user("a"), system("a")),
        (CALLING, assistant("", ("add", '{"a": 3, "b": 5}'))),
        (CALLING, assistant("", ("add", "not json"))),
        (CALLING, assistant("add")),
        (assistant("7", reasoning="3+4"), assistant("7")),
        (result("7"), result("8")),
        (user("a"), user("a") | {"name": "Bob"}),
    ],
)
def test_messages_that_differ_in_meaning_differ(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert key(one) != key(other)


def test_each_beginning_has_its_key_and_other_tools_change_all_of_them() -> None:
    messages = normalised([user("a"), assistant("b"), user("c")])
    keys = prefix_keys(messages, None)
    assert len(set(keys)) == 4
    assert prefix_keys(messages[:2], None) == keys[:3]
    assert not set(prefix_keys(messages, [tool("add")])) & set(keys)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "messages: expected a list of messages, got str"),
        ([], "at least one message"),
        (["hi"], r"messages\[0\]: expected an object with role and content, got str"),
        ([user("a"), {"role": "bot", "content": ""}], r"messages\[1\]\.role: expected one of system, user.*'bot'"),
        ([{"content": "a"}], r"messages\[0\]\.role: .*None"),
        ([user("a") | {"content": 3}], r"messages\[0\]\.content: expected a text or a list of text parts, got int"),
        ([user("a") | {"content": [{"type": "image_url"}]}], r"content\[0\]: only text parts.*'image_url'"),
        ([assistant("a") | {"tool_calls": "x"}], r"messages\[0\]\.tool_calls: expected a list, got str"),
        ([assistant("a") | {"tool_calls": [{"id": "x"}]}], r"tool_calls\[0\]: expected \{id, type: 'function'"),
        (
            [assistant("a") | {"tool_calls": [{"function": {"name": "f", "arguments": 3}}]}],
            r"tool_calls\[0\]\.function\.arguments: expected JSON text, got int",
        ),
    ],
)
def test_messages_that_cannot_be_used_name_the_field(messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        normalised(messages)


@pytest.mark.parametrize(
    ("tools", "message"),
    [("add", "tools: expected a list of functions, got str"), ([{"name": "add"}], r"tools\[0\]: expected \{type")],
)
def test_tools_that_cannot_be_used_name_the_field(tools: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked_tools(tools)


def test_no_tools_and_an_empty_list_are_the_same() -> None:
    assert checked_tools([]) is checked_tools(None) is None
