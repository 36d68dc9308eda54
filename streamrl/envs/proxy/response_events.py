"""A finished response told as the events of the Responses API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from streamrl.envs.proxy.exchange import event, pieces

Event = tuple[str, dict[str, Any]]


def events(begun: dict[str, Any], output: list[dict[str, Any]], finished: dict[str, Any]) -> Iterator[bytes]:
    """All events in order; ``begun`` and ``finished`` are the response before and after."""
    numbers = count()
    for name, fields in _events(begun, output, finished):
        kind = f"response.{name}"
        yield event({"type": kind, "sequence_number": next(numbers), **fields}, kind)


def _events(begun: dict[str, Any], output: list[dict[str, Any]], finished: dict[str, Any]) -> Iterator[Event]:
    yield "created", {"response": begun}
    yield "in_progress", {"response": begun}
    for index, item in enumerate(output):
        begin, tell = _ITEMS[item["type"]]
        yield "output_item.added", {"output_index": index, "item": {**item, **begin}}
        for name, fields in tell(item):
            yield name, {"item_id": item["id"], "output_index": index, **fields}
        yield "output_item.done", {"output_index": index, "item": item}
    yield finished["status"], {"response": finished}


def _message(item: dict[str, Any]) -> Iterator[Event]:
    part = item["content"][0]
    at = {"content_index": 0}
    yield "content_part.added", {**at, "part": {**part, "text": "", "logprobs": []}}
    logprobs = part["logprobs"]
    for piece in pieces(part["text"]):
        yield "output_text.delta", {**at, "delta": piece, "logprobs": logprobs}
        logprobs = []
    yield "output_text.done", {**at, "text": part["text"], "logprobs": part["logprobs"]}
    yield "content_part.done", {**at, "part": part}


def _reasoning(item: dict[str, Any]) -> Iterator[Event]:
    text = item["content"][0]["text"]
    for piece in pieces(text):
        yield "reasoning_text.delta", {"content_index": 0, "delta": piece}
    yield "reasoning_text.done", {"content_index": 0, "text": text}


def _function_call(item: dict[str, Any]) -> Iterator[Event]:
    for piece in pieces(item["arguments"]):
        yield "function_call_arguments.delta", {"delta": piece}
    yield "function_call_arguments.done", {"arguments": item["arguments"], "name": item["name"]}


_ITEMS: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], Iterator[Event]]]] = {
    "message": ({"status": "in_progress", "content": []}, _message),
    "reasoning": ({"status": "in_progress", "content": []}, _reasoning),
    "function_call": ({"status": "in_progress", "arguments": ""}, _function_call),
}
