"""The ``policy`` of an episode that runs in an attached process: the API of ``session.Session``, over the connection.

The rollouter samples and records; what comes back is what it has recorded, token for token.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import msgspec

from streamrl.envs.attach.protocol import (
    Answer,
    Call,
    Cancel,
    Done,
    Failed,
    Finish,
    Fork,
    FromProcess,
    Refused,
    TurnReward,
    call_args,
    worth,
)
from streamrl.envs.chat.capture import ChatTurn
from streamrl.envs.clipping import is_short
from streamrl.envs.environment import Completion, Reward
from streamrl.envs.episode import ContextFull
from streamrl.envs.returned import checked_reward
from streamrl.errors import EnvironmentFailed, StreamRLError


class EngineGone(StreamRLError):
    """The rollouter's engine could not sample; the lease ends with it."""


class Line:
    """The calls of one connection: each waits for the answer of its number."""

    def __init__(self, post: Callable[[FromProcess], None]) -> None:
        """``post`` sends, in order, without waiting."""
        self.post = post
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def call(self, lease: int, episode: int, branch: int, method: str, args: dict[str, Any]) -> dict[str, Any]:
        """The result's fields. Raises what the session raised there. Cancelled, it ends the sampling too."""
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self.post(Call(number, lease, episode, method, args, branch))
            return await answer
        except asyncio.CancelledError:
            self.post(Cancel(number))
            raise
        finally:
            del self._waiting[number]

    def answered(self, answer: Answer | Refused) -> None:
        """Wake whoever waits for it; nobody does where the call was cancelled."""
        waiting = self._waiting.get(answer.id)
        if waiting is None or waiting.done():
            return
        if isinstance(answer, Answer):
            waiting.set_result(answer.result)
        else:
            waiting.set_exception(_error(answer))


def _error(refused: Refused) -> Exception:
    kinds: dict[str, type[Exception]] = {"value": ValueError, "context_full": ContextFull, "ended": RuntimeError}
    return kinds.get(refused.kind, EngineGone)(refused.message)


@dataclass
class Seat:
    """The episode that the branches of a policy belong to."""

    line: Line
    lease: int
    episode: int
    base_url: str
    api_key: str
    branches: Iterator[int]
    """Numbers of the branches to come."""

    def done(self, reward: Reward, env: str) -> Done:
        return Done(self.lease, self.episode, env=env, **worth(reward))

    def failed(self, reason: str, traceback: str = "", context_full: bool = False) -> Failed:
        return Failed(self.lease, self.episode, reason[-8_192:], traceback[-8_192:], context_full)


class RemotePolicy:
    """What user code calls ``policy``: one line of an episode. Calls of one run one after the other."""

    def __init__(self, seat: Seat, branch: int = 0) -> None:
        self._seat = seat
        self._branch = branch
        self._may_have_sampled = False
        """Here, or by a client that was given the key."""

    async def complete(
        self, prompt: str | Sequence[int], max_tokens: int | None = None, stop: str | Iterable[str] | None = None
    ) -> Completion:
        """As ``Session.complete``."""
        text = prompt if isinstance(prompt, str) else [int(each) for each in prompt]
        result = await self._call("complete", _given(text, max_tokens, stop, "prompt"))
        self._may_have_sampled = True
        return msgspec.convert(result, Completion)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        stop: str | Iterable[str] | None = None,
    ) -> ChatTurn:
        """As ``Session.chat``."""
        args = _given(messages, max_tokens, stop, "messages") | call_args({"tools": tools})
        result = await self._call("chat", args)
        self._may_have_sampled = True
        return msgspec.convert(result, ChatTurn)

    async def clip(self, text: str, tokens: int) -> str:
        """As ``Session.clip``."""
        if is_short(text, tokens):
            return text
        result = await self._call("clip", {"text": text, "tokens": tokens})
        return str(result["text"])

    def branch(self) -> RemotePolicy:
        """As ``Session.branch``."""
        number = next(self._seat.branches)
        self._seat.line.post(Fork(self._seat.lease, self._seat.episode, number, self._branch))
        return RemotePolicy(self._seat, number)

    def reward(self, value: float) -> None:
        """As ``Session.reward``."""
        if not isinstance(value, Real) or not math.isfinite(value):
            raise ValueError(f"policy.reward: expected a finite number, got {value!r:.80}")
        if not self._may_have_sampled:
            raise ValueError("policy.reward: no turn was sampled yet in this branch, so there is none to reward")
        self._seat.line.post(TurnReward(self._seat.lease, self._seat.episode, float(value), self._branch))

    def finish(self, reward: float | Reward) -> None:
        """As ``Session.finish``."""
        try:
            checked = checked_reward(reward)
        except EnvironmentFailed as error:
            raise ValueError(f"policy.finish: {error}") from None
        seat = self._seat
        seat.line.post(Finish(seat.lease, seat.episode, branch=self._branch, **worth(checked)))

    @property
    def base_url(self) -> str:
        """Where an OpenAI- or Anthropic-compatible client reaches this session."""
        self._refuse_branch()
        return self._seat.base_url

    @property
    def api_key(self) -> str:
        """The key of this session for such a client; it is good until the episode ends."""
        self._refuse_branch()
        self._may_have_sampled = True
        return self._seat.api_key

    def _refuse_branch(self) -> None:
        if self._branch:
            raise RuntimeError(
                "policy.base_url: in an attached process only the episode itself has an endpoint, a branch has none"
            )

    async def _call(self, method: str, args: dict[str, Any]) -> dict[str, Any]:
        seat = self._seat
        return await seat.line.call(seat.lease, seat.episode, self._branch, method, args)


def _given(first: Any, max_tokens: int | None, stop: str | Iterable[str] | None, name: str) -> dict[str, Any]:
    stops = stop if stop is None or isinstance(stop, str) else list(stop)
    return call_args({name: first, "max_tokens": max_tokens, "stop": stops})
