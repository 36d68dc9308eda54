"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from streamrl.envs.proxy import requests
from streamrl.envs.proxy.desk import SampledTurn, Seat
from streamrl.envs.proxy.exchange import (
    Exchange,
    event,
    json_text,
    new_id,
    pieces,
    together,
    token_logprobs,
    tool_calls,
)
from streamrl.envs.proxy.openai_errors import OpenAIErrors


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class ChatRequest(msgspec.Struct):
    messages: list[dict[str, Any]]
    model: str = "policy"
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    return_token_ids: bool | None = None


class ChatCompletion(Exchange):
    """A whole history in, one assistant message per choice out."""

    dialect = OpenAIErrors()

    def __init__(self, seat: Seat, body: bytes) -> None:
        super().__init__(seat)
        self._request, raw = requests.decode(body, ChatRequest)
        request = self._request
        requests.refuse(raw, "functions", "audio", "modalities", "web_search_options")
        requests.refuse_top_logprobs(request.top_logprobs, 0, "top_logprobs")
        limits = [
            requests.positive(request.max_tokens, "max_tokens"),
            requests.positive(request.max_completion_tokens, "max_completion_tokens"),
        ]
        self._max_tokens = min((each for each in limits if each is not None), default=None)
        self._stop = requests.stop_strings(request.stop, "stop")
        self.turns = requests.choices(request.n)
        self.stream = bool(request.stream)
        self.ignored = requests.not_followed(raw, ChatRequest, seat)
        self._id = new_id("chatcmpl-")
        self._sampled: list[SampledTurn] = []

    async def sample(self) -> None:
        chat, request = self.seat.session.chat, self._request
        self._sampled = await together(
            [chat(request.messages, request.tools, self._max_tokens, self._stop) for _ in range(self.turns)]
        )

    def body(self) -> dict[str, Any]:
        return {
            **self._head("chat.completion"),
            "choices": [
                {
                    "index": index,
                    "message": _message(turn),
                    "finish_reason": turn.finish_reason,
                    **self._extras(turn),
                }
                for index, turn in enumerate(self._sampled)
            ],
            "usage": usage(self._sampled),
        }

    def events(self) -> Iterator[bytes]:
        head = self._head("chat.completion.chunk")
        for index, turn in enumerate(self._sampled):
            choice: dict[str, Any] = {"index": index, "finish_reason": None}
            first = {"role": "assistant", "content": ""}
            yield event({**head, "choices": [{**choice, "delta": first, **self._extras(turn)}]})
            for delta in _deltas(_message(turn)):
                yield event({**head, "choices": [{**choice, "delta": delta}]})
            yield event({**head, "choices": [{"index": index, "delta": {}, "finish_reason": turn.finish_reason}]})
        options = self._request.stream_options
        if options is not None and options.include_usage:
            yield event({**head, "choices": [], "usage": usage(self._sampled)})
        yield b"data: [DONE]\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self.created, "model": self._request.model}

    def _extras(self, turn: SampledTurn) -> dict[str, Any]:
        extras: dict[str, Any] = {"logprobs": None}
        if self._request.logprobs:
            extras["logprobs"] = {"content": token_logprobs(self.seat, turn), "refusal": None}
        if self._request.return_token_ids:
            extras |= {"token_ids": turn.token_ids, "prompt_token_ids": turn.prompt_token_ids}
        return extras


def usage(turns: list[SampledTurn]) -> dict[str, Any]:
    """Tokens of a request; the choices share their prompt."""
    prompt = len(turns[0].prompt_token_ids)
    sampled = sum(len(turn.token_ids) for turn in turns)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _message(turn: SampledTurn) -> dict[str, Any]:
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": json_text(arguments)}}
        for call_id, name, arguments in tool_calls(turn)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": turn.text if turn.text or not calls else None}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if calls:
        message["tool_calls"] = calls
    return {**message, "refusal": None}


def _deltas(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for key in ("reasoning_content", "content"):
        for piece in pieces(message.get(key) or ""):
            yield {key: piece}
    for index, call in enumerate(message.get("tool_calls", ())):
        function = {**call["function"], "arguments": ""}
        yield {"tool_calls": [{**call, "index": index, "function": function}]}
        for piece in pieces(call["function"]["arguments"]):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
