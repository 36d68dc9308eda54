"""Items of the Responses API from and to chat messages.

One sampled turn is several items (reasoning, message, calls), which come back one by one: they are joined again into
the assistant message that they were.
"""

from __future__ import annotations

from typing import Any

from streamrl.envs.proxy import fields
from streamrl.envs.proxy.desk import SampledTurn
from streamrl.envs.proxy.errors import bad_request
from streamrl.envs.proxy.exchange import json_text, new_id, tool_calls

_SAID = ("output_text", "refusal", "text", "input_text")
_ASKED = ("input_text", "text")


def read(raw: str | list[Any]) -> list[fields.Message]:
    """``input`` as messages. Raises ``ApiError`` 400 with the path of the first field that is wrong."""
    if isinstance(raw, str):
        return [{"role": "user", "content": raw}]
    if not raw:
        raise bad_request("input", "expected at least one item")
    found: list[fields.Message] = []
    for index, each in enumerate(raw):
        at = f"input[{index}]"
        _read_item(fields.mapping(each, at), at, found)
    return found


def tool(raw: object, at: str) -> dict[str, Any]:
    """A function tool of the Responses shape as one of the chat shape."""
    given = fields.mapping(raw, at)
    if given.get("type") != "function":
        raise bad_request(f"{at}.type", f"only function tools are supported, got {given.get('type')!r:.80}")
    return fields.tool(given, "parameters", at)


def write(turn: SampledTurn, logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Output items of a turn; ``logprobs`` go with its text."""
    items: list[dict[str, Any]] = []
    status = "incomplete" if turn.finish_reason == "length" else "completed"
    if turn.reasoning:
        content = [{"type": "reasoning_text", "text": turn.reasoning}]
        items.append({"type": "reasoning", "id": new_id("rs_"), "summary": [], "content": content, "status": status})
    calls = list(tool_calls(turn))
    if turn.text or not calls:
        said = {"type": "output_text", "text": turn.text, "annotations": [], "logprobs": logprobs}
        items.append(
            {"type": "message", "id": new_id("msg_"), "role": "assistant", "status": status, "content": [said]}
        )
    for call_id, name, arguments in calls:
        call = {"name": name, "arguments": json_text(arguments), "status": "completed"}
        items.append({"type": "function_call", "id": new_id("fc_"), "call_id": call_id, **call})
    return items


def _read_item(item: dict[str, Any], at: str, found: list[fields.Message]) -> None:
    kind = item.get("type", "message")
    match kind:
        case "message":
            _read_message(item, at, found)
        case "reasoning":
            if text := _reasoning(item, at):
                _assistant(found, "content", "tool_calls", "reasoning_content")["reasoning_content"] = text
        case "function_call":
            call = fields.tool_call(item.get("call_id"), item.get("name"), item.get("arguments"), at)
            _assistant(found).setdefault("tool_calls", []).append(call)
        case "function_call_output":
            call_id = fields.string(item.get("call_id"), f"{at}.call_id")
            content = fields.text(item.get("output"), f"{at}.output", _ASKED)
            found.append({"role": "tool", "tool_call_id": call_id, "content": content})
        case _:
            known = "message, reasoning, function_call or function_call_output"
            raise bad_request(f"{at}.type", f"expected {known}, got {kind!r:.80}")


def _read_message(item: dict[str, Any], at: str, found: list[fields.Message]) -> None:
    role = item.get("role")
    if item.get("content") is None:
        raise bad_request(f"{at}.content", "this field is required")
    if role == "assistant":
        text = fields.text(item["content"], f"{at}.content", _SAID)
        _assistant(found, "content", "tool_calls")["content"] = text
    elif role in ("user", "system", "developer"):
        text = fields.text(item["content"], f"{at}.content", _ASKED)
        found.append({"role": "user" if role == "user" else "system", "content": text})
    else:
        raise bad_request(f"{at}.role", f"expected user, assistant, system or developer, got {role!r:.80}")


def _assistant(found: list[fields.Message], *begins_another: str) -> fields.Message:
    """The assistant message at the end of ``found``: the last one, unless it has one of ``begins_another`` already."""
    if not found or found[-1]["role"] != "assistant" or any(found[-1].get(key) for key in begins_another):
        found.append({"role": "assistant", "content": ""})
    return found[-1]


def _reasoning(item: dict[str, Any], at: str) -> str:
    content = item.get("content") or item.get("summary") or ""
    return fields.text(content, f"{at}.content", ("reasoning_text", "summary_text"))
