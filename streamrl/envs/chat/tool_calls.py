"""How models write tool calls, and how they are read: ``hermes``, ``llama_json``, ``pythonic`` and ``compact``.

Reading never raises: what looks like a call but cannot be read comes back as a ``ToolCall`` without arguments that says
what is wrong with it, so that an agent can tell the policy.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from streamrl.errors import ConfigError


@dataclass(frozen=True)
class ToolCall:
    """One call that the policy wrote."""

    id: str
    """Unique within its line of an episode; nine letters and digits, which is what the strictest templates ask for."""
    name: str
    """Empty where it could not be read."""
    arguments: dict[str, Any] | None
    """By parameter name; None where the call could not be read."""
    raw: str
    """The call as the policy wrote it, without the markers round it."""
    error: str = ""
    """What is wrong with a call that could not be read."""

    @property
    def written_arguments(self) -> str:
        """The arguments as JSON; of a call that could not be read the call itself."""
        return self.raw if self.arguments is None else json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True)
class RawCall:
    """A call without an id."""

    name: str
    arguments: dict[str, Any] | None
    raw: str
    error: str = ""


Read = Callable[[str], tuple[str, list[RawCall]]]
"""From a text to what is left of it without its calls, and the calls in order."""


@dataclass(frozen=True)
class ToolFormat:
    """One way of writing calls."""

    name: str
    read: Read
    sign: re.Pattern[str]
    """Matches chat templates of models that write calls this way."""
    markers: tuple[str, ...] = ()
    """Special tokens that are part of the format and must survive decoding."""


def number_calls(calls: list[RawCall], first: int) -> list[ToolCall]:
    """Give ``calls`` ids, counted from ``first``: ``call00000``, ``call00001``, …"""
    return [
        ToolCall(f"call{first + index:05d}", call.name, call.arguments, call.raw, call.error)
        for index, call in enumerate(calls)
    ]


def find_format(name: str, template: str) -> ToolFormat | None:
    """The format called ``name``; for ``auto`` the one that the chat template ``template`` shows, None where none.

    Raises ``ConfigError`` for a name that does not exist.
    """
    if name == "auto":
        return next((each for each in FORMATS.values() if each.sign.search(template)), None)
    if name not in FORMATS:
        raise ConfigError(f"tool_format={name!r}: expected 'auto' or one of {', '.join(FORMATS)}")
    return FORMATS[name]


# -- JSON objects ---------------------------------------------------------------------------------------------------


def _from_object(value: object, raw: str) -> RawCall:
    """A call from ``{"name": …, "arguments" or "parameters": {…}}``."""
    if not isinstance(value, dict):
        return RawCall("", None, raw, f"expected a JSON object, got {type(value).__name__}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return RawCall("", None, raw, 'the call has no "name"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models quote the object once more
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            return RawCall(name, None, raw, f"the arguments are not JSON: {error}")
    if not isinstance(arguments, dict):
        return RawCall(name, None, raw, f"the arguments must be a JSON object, got {type(arguments).__name__}")
    return RawCall(name, arguments, raw)


def _from_json(raw: str) -> RawCall:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        found = re.search(r'"name"\s*:\s*"([^"\\]+)"', raw)
        return RawCall(found[1] if found else "", None, raw, f"the call is not JSON: {error}")
    return _from_object(value, raw)


_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def _read_hermes(text: str) -> tuple[str, list[RawCall]]:
    calls = [_from_json(each.strip()) for each in _HERMES.findall(text)]
    return (_HERMES.sub("", text).strip() if calls else text), calls


_PYTHON_TAG = "<|python_tag|>"


def _read_llama(text: str) -> tuple[str, list[RawCall]]:
    """Objects separated by ``;`` after the tag; without the tag only a text that is nothing but such objects."""
    before, tag, after = text.partition(_PYTHON_TAG)
    body = (after if tag else text).strip()
    if not tag and not body.startswith("{"):
        return text, []
    calls: list[RawCall] = []
    decoder, at = json.JSONDecoder(), 0
    while at < len(body):
        try:
            value, end = decoder.raw_decode(body, at)
        except (ValueError, RecursionError):
            if not tag and '"name"' not in body[at:]:
                return text, []
            calls.append(_from_json(body[at:]))
            break
        if not tag and not (isinstance(value, dict) and {"parameters", "arguments"} & value.keys()):
            return text, []  # an answer in JSON is no call
        calls.append(_from_object(value, body[at:end]))
        at = end + len(body[end:]) - len(body[end:].lstrip(" \n;"))
    rest = before.strip() if tag else ""
    return (rest if calls else text), calls


# -- Python calls ---------------------------------------------------------------------------------------------------

_JSON_NAMES = {"true": True, "false": False, "null": None}


def _literal(node: ast.expr) -> Any:
    """A literal, with ``true``, ``false`` and ``null`` read as JSON does; ``ValueError`` for anything else."""
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    if isinstance(node, ast.List):
        return [_literal(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(key): _literal(value) for key, value in zip(node.keys, node.values, strict=True)}
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError(f"a value of type {type(value).__name__} has no JSON form")
    return value


def _key(node: ast.expr | None) -> str:
    key = None if node is None else _literal(node)
    if not isinstance(key, str):
        raise ValueError("the keys of an object must be strings")
    return key


def _from_node(node: ast.expr, raw: str) -> RawCall:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
        return RawCall("", None, raw, "expected name(parameter=value, …)")
    name = ast.unparse(node.func)
    if node.args or any(each.arg is None for each in node.keywords):
        return RawCall(name, None, raw, "arguments must be given by name, as in name(parameter=value)")
    try:
        return RawCall(name, {str(each.arg): _literal(each.value) for each in node.keywords}, raw)
    except (ValueError, TypeError) as error:
        return RawCall(name, None, raw, f"the arguments must be plain values: {error}")


def _expression(raw: str) -> ast.expr | str:
    """The parsed expression, or what is wrong with it."""
    try:
        return ast.parse(raw, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return str(error)


_BEGINS_CALL = re.compile(r"\s*\[\s*([A-Za-z_][\w.]*)\s*\(")


def _read_pythonic(text: str) -> tuple[str, list[RawCall]]:
    """``[first(a=1), second(b="x")]`` and nothing else."""
    begins = _BEGINS_CALL.match(text)
    if begins is None:
        return text, []
    raw = text.strip()
    parsed = _expression(raw)
    if isinstance(parsed, str):
        return "", [RawCall(begins[1], None, raw, f"the calls cannot be read: {parsed}")]
    if not isinstance(parsed, ast.List):
        return "", [RawCall(begins[1], None, raw, "expected [name(parameter=value, …), …] and nothing else")]
    return "", [_from_node(node, ast.get_source_segment(raw, node) or raw) for node in parsed.elts]


_CALL = "<|call|>"


def _read_compact(text: str) -> tuple[str, list[RawCall]]:
    """``<|call|>name(parameter=value)``, as often as there are calls, after the text if there is any."""
    content, *raws = text.split(_CALL)
    return (content.strip() if raws else text), [_from_text(raw.strip()) for raw in raws]


def _from_text(raw: str) -> RawCall:
    parsed = _expression(raw)
    if isinstance(parsed, str):
        name = re.match(r"[A-Za-z_][\w.]*", raw)
        return RawCall(name[0] if name else "", None, raw, f"the call cannot be read: {parsed}")
    return _from_node(parsed, raw)


FORMATS: Mapping[str, ToolFormat] = {
    each.name: each
    for each in (
        ToolFormat("compact", _read_compact, re.compile(re.escape(_CALL)), (_CALL,)),
        ToolFormat("hermes", _read_hermes, re.compile("<tool_call>"), ("<tool_call>", "</tool_call>")),
        ToolFormat("pythonic", _read_pythonic, re.compile(r"\[\w+\(\w+=")),
        ToolFormat("llama_json", _read_llama, re.compile(r'python_tag|"parameters"'), (_PYTHON_TAG,)),
    )
}
"""By name, in the order in which ``auto`` looks for them."""
