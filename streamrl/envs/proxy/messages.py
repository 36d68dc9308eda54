"""``POST /v1/messages``, the Anthropic dialect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from streamrl.envs.proxy import fields, requests
from streamrl.envs.proxy.desk import SampledTurn, Seat
from streamrl.envs.proxy.errors import ApiError, bad_request
from streamrl.envs.proxy.exchange import Dialect, Exchange, event, new_id, pieces, tool_calls

_ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

_TEXT = ("text",)

_UNREADABLE = "unreadable_call"
"""Key of the input of a call that the policy wrote so badly that it has no arguments; the value is what it wrote."""


class AnthropicErrors(Dialect):
    """``{"type": "error", "error": {type, message}}``."""

    def error(self, error: ApiError) -> dict[str, Any]:
        kind = _ERROR_TYPES.get(error.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": error.message, "code": error.code}}

    def error_event(self, error: ApiError) -> bytes:
        return event(self.error(error), "error")


class MessagesRequest(msgspec.Struct):
    messages: list[Any]
    max_tokens: int
    model: str = "policy"
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None


class Messages(Exchange):
    """A whole history in, one assistant message out."""

    dialect = AnthropicErrors()

    def __init__(self, seat: Seat, body: bytes) -> None:
        super().__init__(seat)
        self._request, raw = requests.decode(body, MessagesRequest)
        request = self._request
        requests.refuse(raw, "mcp_servers", "container")
        self._messages = read_history(request)
        self._tools = [_tool(each, f"tools[{index}]") for index, each in enumerate(request.tools or ())] or None
        self._max_tokens = requests.positive(request.max_tokens, "max_tokens")
        self._stop = requests.stop_strings(request.stop_sequences, "stop_sequences")
        self.stream = bool(request.stream)
        self.ignored = requests.not_followed(raw, MessagesRequest, seat)
        self._id = new_id("msg_")

    async def sample(self) -> None:
        self._turn = await self.seat.session.chat(self._messages, self._tools, self._max_tokens, self._stop)

    def body(self) -> dict[str, Any]:
        return {
            **self._head(),
            "content": list(self._blocks()),
            **self._stopped(),
            "usage": {**self._usage_before(), "output_tokens": len(self._turn.token_ids)},
        }

    def events(self) -> Iterator[bytes]:
        begun = {**self._head(), "content": [], "usage": {**self._usage_before(), "output_tokens": 0}}
        yield _event("message_start", message=begun)
        for index, block in enumerate(self._blocks()):
            yield from _block_events(index, block)
        yield _event("message_delta", delta=self._stopped(), usage={"output_tokens": len(self._turn.token_ids)})
        yield _event("message_stop")

    def _head(self) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._request.model}
        return {**head, "stop_reason": None, "stop_sequence": None}

    def _stopped(self) -> dict[str, str | None]:
        """Why the turn ended; a stop string that was sampled is in its tokens, though not in its text."""
        turn = self._turn
        if turn.finish_reason == "stop" and self._stop:
            said = str(self.seat.session.episode.codec.tokenizer.decode(turn.token_ids, skip_special_tokens=True))
            found = next((each for each in self._stop if each in said), None)
            if found is not None:
                return {"stop_reason": "stop_sequence", "stop_sequence": found}
        return {"stop_reason": _STOP_REASONS[turn.finish_reason], "stop_sequence": None}

    def _usage_before(self) -> dict[str, int]:
        cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        return {"input_tokens": len(self._turn.prompt_token_ids), **cached}

    def _blocks(self) -> Iterator[dict[str, Any]]:
        turn: SampledTurn = self._turn
        if turn.reasoning:
            yield {"type": "thinking", "thinking": turn.reasoning, "signature": ""}
        calls = list(tool_calls(turn))
        if turn.text or not calls:
            yield {"type": "text", "text": turn.text}
        for call_id, name, arguments in calls:
            given = {_UNREADABLE: arguments} if isinstance(arguments, str) else arguments
            yield {"type": "tool_use", "id": call_id, "name": name, "input": given}


def read_history(request: MessagesRequest) -> list[fields.Message]:
    """System and messages as OpenAI messages. Raises ``ApiError`` 400 with the path of what is wrong."""
    if not request.messages:
        raise bad_request("messages", "expected at least one message")
    found: list[fields.Message] = []
    if request.system:
        found.append({"role": "system", "content": fields.text(request.system, "system", _TEXT)})
    for index, raw in enumerate(request.messages):
        at = f"messages[{index}]"
        message = fields.mapping(raw, at)
        role, content = message.get("role"), message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        blocks = fields.sequence(blocks, f"{at}.content")
        if role == "assistant":
            found.append(_assistant(blocks, at))
        elif role == "user":
            found.extend(_user(blocks, at))
        elif role == "system":
            found.append({"role": "system", "content": fields.text(blocks, f"{at}.content", _TEXT)})
        else:
            raise bad_request(f"{at}.role", f"expected user, assistant or system, got {role!r:.80}")
    return found


def _assistant(blocks: list[Any], at: str) -> fields.Message:
    message: fields.Message = {"role": "assistant", "content": ""}
    for index, raw in enumerate(blocks):
        where = f"{at}.content[{index}]"
        block = fields.mapping(raw, where)
        match block.get("type"):
            case "text":
                message["content"] += fields.string(block.get("text"), f"{where}.text")
            case "thinking":
                reasoning = fields.string(block.get("thinking"), f"{where}.thinking")
                message["reasoning_content"] = message.get("reasoning_content", "") + reasoning
            case "tool_use":
                message.setdefault("tool_calls", []).append(_tool_use(block, where))
            case kind:
                raise bad_request(f"{where}.type", f"expected text, thinking or tool_use, got {kind!r:.80}")
    return message


def _tool_use(block: dict[str, Any], at: str) -> dict[str, Any]:
    given = fields.mapping(block.get("input"), f"{at}.input")
    unreadable = given.get(_UNREADABLE)
    written = unreadable if isinstance(unreadable, str) else msgspec.json.encode(given).decode()
    return fields.tool_call(block.get("id"), block.get("name"), written, at)


def _user(blocks: list[Any], at: str) -> Iterator[fields.Message]:
    """Results of tools come first, as the API asks; the texts become one message."""
    texts: list[str] = []
    for index, raw in enumerate(blocks):
        where = f"{at}.content[{index}]"
        block = fields.mapping(raw, where)
        match block.get("type"):
            case "text":
                texts.append(fields.string(block.get("text"), f"{where}.text"))
            case "tool_result":
                if texts:
                    raise bad_request(f"{where}.type", "results of tools must come before texts")
                call_id = fields.string(block.get("tool_use_id"), f"{where}.tool_use_id")
                content = fields.text(block.get("content") or "", f"{where}.content", _TEXT)
                yield {"role": "tool", "tool_call_id": call_id, "content": content}
            case kind:
                raise bad_request(f"{where}.type", f"only text and tool_result are supported, got {kind!r:.80}")
    if texts or not blocks:
        yield {"role": "user", "content": "".join(texts)}


def _tool(raw: object, at: str) -> dict[str, Any]:
    tool = fields.mapping(raw, at)
    if tool.get("type") not in ("custom", None):
        raise bad_request(f"{at}.type", f"only tools of the client are supported, got {tool['type']!r:.80}")
    return fields.tool(tool, "input_schema", at)


def _block_events(index: int, block: dict[str, Any]) -> Iterator[bytes]:
    """Start, deltas and stop of one content block."""
    match block["type"]:
        case "text":
            begun, deltas = {**block, "text": ""}, [("text_delta", "text", each) for each in pieces(block["text"])]
        case "thinking":
            begun = {**block, "thinking": ""}
            deltas = [("thinking_delta", "thinking", each) for each in pieces(block["thinking"])]
        case _:
            begun, written = {**block, "input": {}}, msgspec.json.encode(block["input"]).decode()
            deltas = [("input_json_delta", "partial_json", each) for each in pieces(written)]
    yield _event("content_block_start", index=index, content_block=begun)
    for kind, key, piece in deltas:
        yield _event("content_block_delta", index=index, delta={"type": kind, key: piece})
    yield _event("content_block_stop", index=index)


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)
