"""``POST /v1/completions``: a text or token ids in, what follows out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from streamrl.envs.proxy import requests
from streamrl.envs.proxy.desk import SampledText, Seat
from streamrl.envs.proxy.errors import bad_request
from streamrl.envs.proxy.exchange import Exchange, event, new_id, pieces, together, token_texts
from streamrl.envs.proxy.openai_errors import OpenAIErrors

Prompt = str | list[int]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class CompletionRequest(msgspec.Struct):
    prompt: str | list[Any]
    model: str = "policy"
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: int | None = None
    return_token_ids: bool | None = None


class TextCompletion(Exchange):
    """``prompt`` is the whole text so far, one or several; ``n`` choices of each."""

    dialect = OpenAIErrors()

    def __init__(self, seat: Seat, body: bytes) -> None:
        super().__init__(seat)
        self._request, raw = requests.decode(body, CompletionRequest)
        request = self._request
        requests.refuse(raw, "echo", "suffix")
        requests.refuse_top_logprobs(request.logprobs, 1, "logprobs")
        prompts = _prompts(request.prompt)
        self._prompts = [prompt for prompt in prompts for _ in range(requests.choices(request.n))]
        self.turns = requests.choices(len(self._prompts))
        self._max_tokens = requests.positive(request.max_tokens, "max_tokens")
        self._stop = requests.stop_strings(request.stop, "stop")
        self.stream = bool(request.stream)
        self.ignored = requests.not_followed(raw, CompletionRequest, seat)
        self._id = new_id("cmpl-")
        self._sampled: list[SampledText] = []

    async def sample(self) -> None:
        resume = self.seat.session.resume
        self._sampled = await together([resume(prompt, self._max_tokens, self._stop) for prompt in self._prompts])

    def body(self) -> dict[str, Any]:
        choices = [
            {"index": index, "text": turn.text, "finish_reason": turn.finish_reason, **self._extras(turn)}
            for index, turn in enumerate(self._sampled)
        ]
        return {**self._head(), "choices": choices, "usage": self._usage()}

    def events(self) -> Iterator[bytes]:
        head = self._head()
        for index, turn in enumerate(self._sampled):
            choice: dict[str, Any] = {"index": index, "finish_reason": None, "logprobs": None}
            for piece in pieces(turn.text):
                yield event({**head, "choices": [{**choice, "text": piece}]})
            last = {"index": index, "text": "", "finish_reason": turn.finish_reason, **self._extras(turn)}
            yield event({**head, "choices": [last]})
        options = self._request.stream_options
        if options is not None and options.include_usage:
            yield event({**head, "choices": [], "usage": self._usage()})
        yield b"data: [DONE]\n\n"

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "object": "text_completion", "created": self.created, "model": self._request.model}

    def _extras(self, turn: SampledText) -> dict[str, Any]:
        extras: dict[str, Any] = {"logprobs": None}
        if self._request.logprobs is not None:
            extras["logprobs"] = _logprobs(token_texts(self.seat, turn), list(turn.logprobs))
        if self._request.return_token_ids:
            extras |= {"token_ids": turn.token_ids, "prompt_token_ids": turn.prompt_token_ids}
        return extras

    def _usage(self) -> dict[str, int]:
        prompt = sum(len(turn.prompt_token_ids) for turn in self._sampled)
        sampled = sum(len(turn.token_ids) for turn in self._sampled)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _prompts(raw: str | list[Any]) -> list[Prompt]:
    """The prompts of a request: one text, token ids, or a list of either."""
    if isinstance(raw, str):
        return [raw]
    if raw and all(type(each) is int for each in raw):
        return [raw]
    if not raw:
        raise bad_request("prompt", "expected a text or token ids, got an empty list")
    for index, each in enumerate(raw):
        ids = isinstance(each, list) and each and all(type(token_id) is int for token_id in each)
        if not isinstance(each, str) and not ids:
            raise bad_request(f"prompt[{index}]", "expected a text, or a list of token ids")
    return raw


def _logprobs(tokens: list[str], logprobs: list[float]) -> dict[str, Any]:
    offsets, end = [], 0
    for token in tokens:
        offsets.append(end)
        end += len(token)
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}
