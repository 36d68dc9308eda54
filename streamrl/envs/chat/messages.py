"""Chat messages: checked, brought to one shape for templates, and compared.

Two messages are the same when their role, text, reasoning and tool calls are. What clients add, drop or rewrite without
a change of meaning does not count: a content of None, "" or of text parts; ids of tool calls and the order of keys in
their arguments (the order of calls and of their answers binds them); further keys. Reasoning that a client leaves out
*is* a change: the policy is not to see it any more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import xxhash

ROLES = ("system", "user", "assistant", "tool")
_ALIASES = {"developer": "system", "function": "tool"}
_THINKING = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)

Message = dict[str, Any]
Tools = Sequence[Mapping[str, Any]] | None


def normalised(messages: Iterable[Mapping[str, Any]]) -> list[Message]:
    """``messages`` in the shape that chat templates read: content a string, arguments of calls an object.

    Raises ``ValueError`` that names the first field that cannot be used, such as ``messages[2].content[0]``.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise ValueError(f"messages: expected a list of messages, got {type(messages).__name__}")
    result = [_normalised(message, f"messages[{place}]") for place, message in enumerate(messages)]
    if not result:
        raise ValueError("messages: expected at least one message, got an empty list")
    return result


def _normalised(message: Mapping[str, Any], where: str) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(f"{where}: expected an object with role and content, got {type(message).__name__}")
    role = message.get("role")
    role = _ALIASES.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        raise ValueError(f"{where}.role: expected one of {', '.join(ROLES)}, got {role!r:.40}")
    shaped: Message = {"role": role, "content": _text(message.get("content"), f"{where}.content")}
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        thought = _THINKING.match(shaped["content"])
        if thought and not reasoning:
            reasoning, shaped["content"] = thought[1], shaped["content"][thought.end() :]
        if reasoning:
            shaped["reasoning_content"] = _text(reasoning, f"{where}.reasoning_content").strip()
        if message.get("tool_calls"):
            shaped["tool_calls"] = _calls(message["tool_calls"], f"{where}.tool_calls")
    else:
        for key in ("name", "tool_call_id"):
            if message.get(key) is not None:
                shaped[key] = _text(message[key], f"{where}.{key}")
    return shaped


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ValueError(f"{where}: expected a text or a list of text parts, got {type(content).__name__}")
    return "".join(_part(part, f"{where}[{place}]") for place, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise ValueError(f"{where}: only text parts can be sampled from, got {kind!r:.40}")
    return text


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise ValueError(f"{where}: expected a list, got {type(calls).__name__}")
    return [_call(call, f"{where}[{place}]") for place, call in enumerate(calls)]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}: expected {{id, type: 'function', function: {{name, arguments}}}}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _object(arguments)
    elif not isinstance(arguments, Mapping):
        raise ValueError(f"{where}.function.arguments: expected JSON text, got {type(arguments).__name__}")
    given = call.get("id")
    return {
        "id": "" if given is None else str(given),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _object(text: str) -> dict[str, Any] | str:
    """The JSON object in ``text``; the text itself where it is none, as in a call that could not be read."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def checked_tools(tools: Tools) -> list[dict[str, Any]] | None:
    """``tools`` as OpenAI's list of functions, None for none. Raises ``ValueError`` naming what cannot be used."""
    if not tools:
        return None
    if isinstance(tools, str | Mapping):
        raise ValueError(f"tools: expected a list of functions, got {type(tools).__name__}")
    return [_tool(tool, f"tools[{place}]") for place, tool in enumerate(tools)]


def _tool(tool: Any, where: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}: expected {{type: 'function', function: {{name, description, parameters}}}}")
    return {"type": "function", "function": dict(function)}


def fingerprint(*values: object) -> int:
    """A hash of JSON values, 64 bits; keys in any order."""
    return xxhash.xxh3_64_intdigest(json.dumps(values, sort_keys=True, default=str).encode())


def meaning(message: Message) -> list[Any]:
    """What is compared of a normalised message."""
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    return [message["role"], message["content"], message.get("reasoning_content", ""), calls, message.get("name", "")]


def next_key(key: int, message: Message) -> int:
    """The key of a history that goes on with ``message``; equal for equal histories."""
    return fingerprint(key, meaning(message))


def prefix_keys(messages: Sequence[Message], tools: Tools) -> list[int]:
    """``[n + 1]``: the keys of all beginnings of normalised ``messages``, the empty one first.

    Other tools make other keys, since they stand at the start of what the policy reads.
    """
    return list(accumulate(messages, next_key, initial=fingerprint(tools or [])))
