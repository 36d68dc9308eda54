"""Which transcript a request with a whole message history extends, realigns or forks.

::

    plan(messages, tools) ──► Plan(transcript, context) ──► sampling ──► record(plan, turn) ──► ChatTurn
         │ the longest beginning of the history that ends with an answer of ours
         ├─ its transcript ends there and is free ............................ extend
         ├─ the same, but the answer came back with drift ..................... realign
         ├─ it ends elsewhere: sampled again, n > 1, busy, rewritten later ..... fork there
         └─ there is none: another first message, another system text, tools ... start, or fork at 0

Nothing is decided by text that is encoded again: tokens are copied, and only what is new is encoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamrl.envs.chat.alignment import Kind, Line, Plan, begin, can_grow, drifted, kept_tokens
from streamrl.envs.chat.messages import Message, Tools, meaning, next_key, normalised, prefix_keys
from streamrl.envs.chat.template import ChatTemplate
from streamrl.envs.chat.tool_calls import ToolCall, number_calls
from streamrl.envs.transcript import Transcript, Turn


@dataclass(frozen=True)
class ChatTurn:
    """One answer of the policy to a message history."""

    text: str
    """The content: without special tokens, reasoning and tool calls, and up to a stop string."""
    tool_calls: list[ToolCall]
    reasoning: str
    message: dict[str, Any]
    """The assistant message to append to the history, as it is."""
    finish_reason: str
    """``stop``, ``length`` or ``tool_calls``."""
    token_ids: tuple[int, ...]
    """As sampled, with the end token."""
    logprobs: tuple[float, ...]
    """Of each sampled token."""
    prompt_token_ids: tuple[int, ...]
    """Everything before the first sampled token."""


@dataclass(eq=False)
class _Mark:
    """An answer in a transcript."""

    owner: Capture
    transcript: Transcript
    turn: Turn
    message: Message
    """As it was given to the client, or as the client wrote it since."""
    key: int
    """Of the history before it."""
    drift: list[int] = field(default_factory=list)
    """What the client wrote instead of the end of the turn."""
    replaced: bool = False
    """The turn was realigned: its tokens no longer say this."""


@dataclass(frozen=True)
class _Request(Plan):
    """A plan, and what ``record`` must know of its request."""

    key: int = 0
    """Of the whole history."""
    calls: bool = False
    """Tools were offered."""
    realigned: tuple[_Mark, Message, list[int]] | None = None


class Capture:
    """The message histories of one session. ``plan`` and ``record`` do not wait; sampling stands between them."""

    def __init__(self, template: ChatTemplate, line: Line, parent: Capture | None = None) -> None:
        """``parent``: whose histories this one may fork, but never extend."""
        self._template = template
        self._line = line
        self._calls: int = parent._calls if parent else 0
        known = parent._after if parent else {}
        self._after: dict[int, list[_Mark]] = {key: list(marks) for key, marks in known.items()}
        """By the key of a history that ends with the answer."""
        self._before: dict[int, list[_Mark]] = {}
        """By the key of the history before the answer."""

    def plan(self, messages: Iterable[Mapping[str, Any]], tools: Tools = None) -> Plan:
        """Match a whole history. Raises ``ValueError`` where messages or tools cannot be used."""
        shaped, tools = normalised(messages), self._template.offered(tools)
        keys = prefix_keys(shaped, tools)
        for place in reversed(range(len(shaped))):
            if shaped[place]["role"] != "assistant":
                continue
            after = [mark for mark in self._after.get(keys[place + 1], ()) if not mark.replaced]
            if after:
                mark = next(filter(self._can_grow, after), after[0])
                return self._go_on(mark, shaped, place + 1, tools, keys[-1])
            for mark in filter(self._can_grow, self._before.get(keys[place], ())):
                if plan := self._realign(mark, shaped, place, tools, keys[-1]):
                    return plan
        fresh = begin(self._line, self._template.start(shaped, tools))
        return _Request(fresh.kind, fresh.transcript, fresh.context, key=keys[-1], calls=bool(tools))

    def record(self, plan: Plan, turn: Turn, stops: Iterable[str] = ()) -> ChatTurn:
        """Remember ``turn``, which was sampled for ``plan`` until one of ``stops``, and read it."""
        assert isinstance(plan, _Request)
        if plan.realigned is not None:
            self._replace(*plan.realigned)
        transcript, generation = plan.transcript, turn.generation
        token_ids = tuple(generation.token_ids.tolist())
        parsed = self._template.parse(token_ids, stops, calls=plan.calls)
        calls = number_calls(parsed.calls, self._calls)
        self._calls += len(calls)
        message = _message(parsed.content, parsed.reasoning, calls)
        self._remember(_Mark(self, transcript, turn, normalised([message])[0], plan.key))
        ended = generation.finish_reason
        return ChatTurn(
            text=parsed.content,
            tool_calls=calls,
            reasoning=parsed.reasoning,
            message=message,
            finish_reason="tool_calls" if calls and ended == "stop" else ended,
            token_ids=token_ids,
            logprobs=tuple(generation.logprobs.tolist()),
            prompt_token_ids=tuple(transcript.tokens[: turn.start]),
        )

    def branch(self, line: Line) -> Capture:
        """A capture for ``line`` that knows the histories of this one."""
        return Capture(self._template, line, self)

    def _can_grow(self, mark: _Mark) -> bool:
        return mark.owner is self and not mark.replaced and can_grow(mark.transcript, mark.turn)

    def _go_on(self, mark: _Mark, messages: list[Message], said: int, tools: Tools, key: int) -> _Request:
        """Go on after ``mark``, which is the answer ``messages[said − 1]``."""
        sampled = mark.turn.generation.token_ids.tolist()
        context = mark.drift + self._template.extend(messages[:said], messages[said:], tools, sampled)
        if self._can_grow(mark):
            return _Request(Kind.EXTEND, mark.transcript, context, key=key, calls=bool(tools))
        fork = self._line.fork(mark.transcript, mark.turn.end)
        return _Request(Kind.FORK, fork, context, key=key, calls=bool(tools))

    def _realign(self, mark: _Mark, messages: list[Message], place: int, tools: Tools, key: int) -> _Request | None:
        """Take ``messages[place]`` for the answer of ``mark`` where it differs by no more than drift."""
        old, new = mark.message, messages[place]
        if meaning(old | {"content": ""}) != meaning(new | {"content": ""}) or not drifted(
            old["content"], new["content"]
        ):
            return None
        sampled = self._template.without_end(mark.turn.generation.token_ids.tolist())
        before, found, after = self._template.decode(sampled).rpartition(old["content"])
        text = before + new["content"] + after
        kept = kept_tokens(sampled, text, self._template.decode)
        if not found or not kept:  # a content round calls was put together: it stands nowhere as a whole
            return None
        drift = self._template.encode(text[len(self._template.decode(sampled[:kept])) :])
        context = drift + self._template.extend(messages[: place + 1], messages[place + 1 :], tools, ())
        return _Request(
            Kind.REALIGN,
            mark.transcript,
            context,
            mark.turn.start + kept,
            key=key,
            calls=bool(tools),
            realigned=(mark, new, drift),
        )

    def _replace(self, mark: _Mark, message: Message, drift: list[int]) -> None:
        """The transcript of ``mark`` was realigned: it says ``message`` now."""
        mark.replaced = True
        self._remember(_Mark(self, mark.transcript, mark.turn, message, mark.key, drift))

    def _remember(self, mark: _Mark) -> None:
        self._before.setdefault(mark.key, []).append(mark)
        self._after.setdefault(next_key(mark.key, mark.message), []).append(mark)


def _message(content: str, reasoning: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """As OpenAI's clients get it."""
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.written_arguments}}
            for call in calls
        ]
    return message
