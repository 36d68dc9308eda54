"""Reading JSON that a client sent: each reader raises ``ApiError`` 400 with the path of the field that is wrong."""

from __future__ import annotations

import re
from typing import Any

from streamrl.envs.proxy.errors import bad_request

Message = dict[str, Any]
"""A chat message of the OpenAI shape."""

_TOOL_NAME = re.compile(r"[\w.-]{1,128}", re.ASCII)


def string(value: object, at: str) -> str:
    if not isinstance(value, str):
        raise bad_request(at, f"expected a string, got {_kind(value)}")
    return value


def mapping(value: object, at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad_request(at, f"expected an object, got {_kind(value)}")
    return value


def sequence(value: object, at: str) -> list[Any]:
    if not isinstance(value, list):
        raise bad_request(at, f"expected a list, got {_kind(value)}")
    return value


def text(content: object, at: str, kinds: tuple[str, ...]) -> str:
    """A content, a string or a list of parts of ``kinds``, as one string."""
    if isinstance(content, str):
        return content
    return "".join(_part(each, f"{at}[{index}]", kinds) for index, each in enumerate(sequence(content, at)))


def tool_call(call_id: object, name: object, arguments: object, at: str) -> dict[str, Any]:
    """One call of an assistant message, as the policy wrote it: ``arguments`` is a text that need not even be JSON."""
    return {
        "id": string(call_id, f"{at}.call_id"),
        "type": "function",
        "function": {"name": string(name, f"{at}.name"), "arguments": string(arguments, f"{at}.arguments")},
    }


def tool(fields: dict[str, Any], schema: str, at: str) -> dict[str, Any]:
    """One function tool; ``schema`` is the key of its parameters."""
    name = string(fields.get("name"), f"{at}.name")
    if not _TOOL_NAME.fullmatch(name):
        raise bad_request(f"{at}.name", f"expected letters, digits, '_', '-' or '.', at most 128, got {name!r:.80}")
    function: dict[str, Any] = {"name": name}
    if fields.get("description") is not None:
        function["description"] = string(fields["description"], f"{at}.description")
    if fields.get(schema) is not None:
        function["parameters"] = mapping(fields[schema], f"{at}.{schema}")
    return {"type": "function", "function": function}


def _part(raw: object, at: str, kinds: tuple[str, ...]) -> str:
    fields = mapping(raw, at)
    kind = fields.get("type")
    if kind not in kinds:
        raise bad_request(f"{at}.type", f"only text is supported ({', '.join(kinds)}), got {kind!r:.80}")
    key = "refusal" if kind == "refusal" else "text"
    return string(fields.get(key), f"{at}.{key}")


def _kind(value: object) -> str:
    return "nothing" if value is None else type(value).__name__
