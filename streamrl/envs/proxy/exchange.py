"""One request and its answer, whatever the dialect: sample first, then say it as one body or as a stream of events."""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import msgspec

from streamrl.envs.proxy.desk import SampledText, SampledTurn, Seat
from streamrl.envs.proxy.errors import ApiError

_T = TypeVar("_T")

PIECE = 48
"""Characters of one event of a stream: a finished turn is told in pieces."""


class Dialect(ABC):
    """How one kind of client spells errors."""

    @abstractmethod
    def error(self, error: ApiError) -> dict[str, Any]:
        """The body of an error."""

    @abstractmethod
    def error_event(self, error: ApiError) -> bytes:
        """An error in a stream that has begun."""


class Exchange(ABC):
    """One request. Made from its body; raises ``ApiError`` where the body cannot be used."""

    dialect: ClassVar[Dialect]

    stream: bool
    turns: int = 1
    """How many are to be sampled."""
    ignored: tuple[str, ...] = ()
    """Parameters that were not followed."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.created = int(time.time())

    @abstractmethod
    async def sample(self) -> None:
        """Sample the turns; called inside ``Seat.call``."""

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """The answer as one JSON object."""

    @abstractmethod
    def events(self) -> Iterator[bytes]:
        """The answer as server-sent events."""


async def together(coroutines: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Results in order; the first exception ends all and is raised as it is, not in a group."""
    if len(coroutines) == 1:
        return [await coroutines[0]]
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(each) for each in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [each.result() for each in running]


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


def pieces(text: str) -> Iterator[str]:
    return (text[start : start + PIECE] for start in range(0, len(text), PIECE))


def event(data: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if name is None else b"event: %s\n" % name.encode()
    return b"%sdata: %s\n\n" % (head, msgspec.json.encode(data))


def tool_calls(turn: SampledTurn) -> Iterator[tuple[str, str, dict[str, Any] | str]]:
    """Id, name and arguments of every call; the arguments are text where the policy wrote no object."""
    for call in turn.message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            try:
                read = msgspec.json.decode(arguments)
            except msgspec.DecodeError:
                read = None
            arguments = read if isinstance(read, dict) else arguments
        yield call["id"], call["function"]["name"], arguments


def json_text(arguments: dict[str, Any] | str) -> str:
    """Arguments as the OpenAI dialects tell them."""
    return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()


def token_texts(seat: Seat, turn: SampledTurn | SampledText) -> list[str]:
    """The text of every sampled token, special ones included."""
    decode = seat.session.episode.codec.tokenizer.decode
    return [str(decode([token_id], skip_special_tokens=False)) for token_id in turn.token_ids]


def token_logprobs(seat: Seat, turn: SampledTurn) -> list[dict[str, Any]]:
    """``{token, logprob, bytes, top_logprobs}`` of every sampled token, the end token included."""
    return [
        {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
        for token, logprob in zip(token_texts(seat, turn), turn.logprobs, strict=True)
    ]
