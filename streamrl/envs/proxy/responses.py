"""``POST /v1/responses``: items in, items out; earlier responses of the episode may be gone on with by their id."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from streamrl.envs.proxy import fields, requests, response_events, response_items
from streamrl.envs.proxy.desk import Seat
from streamrl.envs.proxy.errors import ApiError
from streamrl.envs.proxy.exchange import Exchange, new_id, token_logprobs
from streamrl.envs.proxy.openai_errors import ResponsesErrors

CONVERSATIONS = 256
"""Responses per session that can be gone on with by id."""


@dataclass(frozen=True)
class Conversation:
    """What one response added to another one; the parent's messages come before these."""

    parent: Conversation | None
    messages: list[fields.Message]

    def history(self) -> list[fields.Message]:
        """All messages from the start."""
        chain: list[Conversation] = []
        at: Conversation | None = self
        while at is not None:
            chain.append(at)
            at = at.parent
        return [message for each in reversed(chain) for message in each.messages]


class ResponsesRequest(msgspec.Struct):
    input: str | list[Any]
    model: str = "policy"
    instructions: str | None = None
    tools: list[Any] | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    store: bool | None = None
    stream: bool | None = None
    stop: str | list[str] | None = None
    return_token_ids: bool | None = None


class Responses(Exchange):
    """Input items in, output items of one turn out."""

    dialect = ResponsesErrors()

    def __init__(self, seat: Seat, body: bytes) -> None:
        super().__init__(seat)
        self._request, self._raw = requests.decode(body, ResponsesRequest)
        request = self._request
        requests.refuse(self._raw, "background", "conversation", "prompt", "moderation")
        requests.refuse_top_logprobs(request.top_logprobs, 0, "top_logprobs")
        self._parent = _parent(seat, request.previous_response_id)
        self._given = response_items.read(request.input)
        self._tools = [
            response_items.tool(each, f"tools[{index}]") for index, each in enumerate(request.tools or ())
        ] or None
        self._max_tokens = requests.positive(request.max_output_tokens, "max_output_tokens")
        self._stop = requests.stop_strings(request.stop, "stop")
        self.stream = bool(request.stream)
        self.ignored = requests.not_followed(self._raw, ResponsesRequest, seat)
        self._id = new_id("resp_")

    async def sample(self) -> None:
        before = self._parent.history() if self._parent else []
        instructions = self._request.instructions
        system = [{"role": "system", "content": instructions}] if instructions else []
        session = self.seat.session
        self._turn = await session.chat([*system, *before, *self._given], self._tools, self._max_tokens, self._stop)
        wanted = "message.output_text.logprobs" in (self._request.include or ())
        self._output = response_items.write(self._turn, token_logprobs(self.seat, self._turn) if wanted else [])
        if self._request.store is not False:
            conversations = self.seat.conversations
            conversations[self._id] = Conversation(self._parent, [*self._given, self._turn.message])
            if len(conversations) > CONVERSATIONS:
                conversations.popitem(last=False)

    def body(self) -> dict[str, Any]:
        cut = self._turn.finish_reason == "length"
        told = {
            **self._head("incomplete" if cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._output,
            "usage": self._usage(),
        }
        if self._request.return_token_ids:
            told |= {"token_ids": self._turn.token_ids, "prompt_token_ids": self._turn.prompt_token_ids}
        return told

    def events(self) -> Iterator[bytes]:
        return response_events.events(self._head("in_progress"), self._output, self.body())

    def _head(self, status: str) -> dict[str, Any]:
        request, limits = self._request, self.seat.session.episode.limits
        return {
            "id": self._id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": self._raw.get("metadata") or {},
            "model": request.model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": request.previous_response_id,
            "store": request.store is not False,
            "temperature": limits.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": request.tools or [],
            "top_p": limits.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def _usage(self) -> dict[str, Any]:
        given, sampled = len(self._turn.prompt_token_ids), len(self._turn.token_ids)
        return {
            "input_tokens": given,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": given + sampled,
        }


def _parent(seat: Seat, response_id: str | None) -> Conversation | None:
    if response_id is None:
        return None
    conversation: Conversation | None = seat.conversations.get(response_id)
    if conversation is None:
        raise ApiError(
            404,
            "previous_response_not_found",
            f"previous_response_id: this episode remembers no response {response_id!r:.80}; send the whole input",
            "previous_response_id",
        )
    return conversation
