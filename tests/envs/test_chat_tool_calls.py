"""Every way of writing a call is read, and what cannot be read says why."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.envs.chat.tool_calls import FORMATS, RawCall, find_format, number_calls
from streamrl.errors import ConfigError
from streamrl.validation import CHOICES

Call = tuple[str, dict[str, Any] | None]


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", "just text", "just text", []),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", {"a": 1})]),
        ("hermes", 'So.\n<tool_call>{"name": "f"}</tool_call>\n', "So.", [("f", {})]),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "g", "arguments": {}}',
            "",
            [("f", {}), ("g", {})],
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})]),
        ("llama_json", '{"name": "f", "parameters": {"a": "x"}}', "", [("f", {"a": "x"})]),
        (
            "llama_json",
            '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
            "",
            [("f", {}), ("g", {})],
        ),
        ("llama_json", '<|python_tag|>{"name": "f", "arguments": {"a": null}}', "", [("f", {"a": None})]),
        ("llama_json", '{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),
        ("llama_json", "{not json", "{not json", []),
        ("llama_json", "7", "7", []),
        ("pythonic", "[f(a=1, b='x'), g()]", "", [("f", {"a": 1, "b": "x"}), ("g", {})]),
        (
            "pythonic",
            "[f(a=[1, true], b={'c': null, 'd': -2.5})]",
            "",
            [("f", {"a": [1, True], "b": {"c": None, "d": -2.5}})],
        ),
        ("pythonic", "[1, 2]", "[1, 2]", []),
        ("compact", "<|call|>add(a=3,b=4)", "", [("add", {"a": 3, "b": 4})]),
        ("compact", 'Both<|call|>f(x="a b")<|call|>g()', "Both", [("f", {"x": "a b"}), ("g", {})]),
        ("compact", "f(x=1)", "f(x=1)", []),
    ],
)
def test_calls_are_read(name: str, text: str, content: str, calls: list[Call]) -> None:
    left, found = FORMATS[name].read(text)
    assert left == content
    assert [(call.name, call.arguments) for call in found] == calls
    assert not any(call.error for call in found)


@pytest.mark.parametrize(
    ("name", "text", "called", "raw", "error"),
    [
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {</tool_call>',
            "f",
            '{"name": "f", "arguments": {',
            "not JSON",
        ),
        ("hermes", "<tool_call>f(1)</tool_call>", "", "f(1)", "not JSON"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "", '{"arguments": {}}', 'no "name"'),
        ("hermes", "<tool_call>[1]</tool_call>", "", "[1]", "a JSON object, got list"),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "f", None, "JSON object, got list"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "f", None, "arguments are not JSON"),
        ("hermes", "<tool_call>" + "[" * 100_000, "", None, "not JSON"),
        ("llama_json", '{"name": "f", "parameters": {"a": }', "f", None, "not JSON"),
        ("llama_json", "<|python_tag|>print(1)", "", "print(1)", "not JSON"),
        ("pythonic", "[f(a=1]", "f", None, "cannot be read"),
        ("pythonic", "[f(a=1)] done", "f", None, "cannot be read"),
        ("pythonic", "[f(1)]", "f", "f(1)", "given by name"),
        ("pythonic", "[f(a=g())]", "f", "f(a=g())", "plain values"),
        ("pythonic", "[f(a=b'x')]", "f", None, "no JSON form"),
        ("pythonic", "[f(a={1: 2})]", "f", None, "keys of an object must be strings"),
        ("compact", "<|call|>add(3,4)", "add", "add(3,4)", "given by name"),
        ("compact", "<|call|>add(a=3", "add", "add(a=3", "cannot be read"),
        ("compact", "<|call|>", "", "", "cannot be read"),
        ("compact", "<|call|>7", "", "7", r"expected name\(parameter=value"),
        ("compact", "<|call|>" + "(" * 10_000, "", None, "cannot be read"),
    ],
)
def test_a_call_that_cannot_be_read_says_what_is_wrong(
    name: str, text: str, called: str, raw: str | None, error: str
) -> None:
    _, (call,) = FORMATS[name].read(text)
    assert (call.name, call.arguments) == (called, None)
    assert raw is None or call.raw == raw
    assert re.search(error, call.error)


@given(st.sampled_from(sorted(FORMATS)), st.text(alphabet="[]{}()<>|=\"':,;ab1 \n\\callto_pyhng/", max_size=60))
def test_no_text_makes_a_format_raise(name: str, text: str) -> None:
    for each in (text, "<tool_call>" + text, "<|python_tag|>" + text, "<|call|>" + text, "[f(" + text):
        _, calls = FORMATS[name].read(each)
        assert all((call.arguments is None) == bool(call.error) for call in calls)


def test_calls_are_numbered_through_an_episode() -> None:
    calls = number_calls([RawCall("f", {}, "f()"), RawCall("", None, "?", "what")], 7)
    assert [call.id for call in calls] == ["call00007", "call00008"]
    assert [call.written_arguments for call in calls] == ["{}", "?"]


def test_the_format_is_told_from_the_template_or_named() -> None:
    assert find_format("auto", "… <tool_call> …") is FORMATS["hermes"]
    assert find_format("auto", "no tools here") is None
    assert find_format("pythonic", "… <tool_call> …") is FORMATS["pythonic"]
    with pytest.raises(ConfigError, match="tool_format='xml': expected 'auto' or one of compact, hermes"):
        find_format("xml", "")


def test_every_format_can_be_set() -> None:
    assert CHOICES["model.tool_format"] == ("auto", *FORMATS)
