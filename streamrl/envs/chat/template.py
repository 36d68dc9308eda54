"""A chat template that only ever appends: earlier tokens, the sampled ones above all, are never rendered again.

A conversation is rendered as a whole once, when it begins. After a sampled turn only what follows it is rendered, as
the tail of a dummy conversation whose answer is a known word::

    dummy       <|user|>Q<end><|assistant|>WORD<end><|tool|>42<end><|assistant|>
                                               └─────── the tail ──────────────┘   less <end>, if it was sampled

So a template that drops earlier reasoning, or writes earlier turns in another way than the policy did, changes nothing
of what was sampled.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamrl.envs.chat.messages import Message, Tools, checked_tools, normalised
from streamrl.envs.chat.tool_calls import RawCall, find_format
from streamrl.envs.memory import remembering
from streamrl.envs.stops import cut
from streamrl.errors import ConfigError

_WORD = f"W{secrets.token_hex(12)}"
"""Stands for a sampled answer in a dummy conversation; nobody can have written it into a message. Never encoded."""

_QUESTION: Message = {"role": "user", "content": "Q"}
_SHIELD = "\ue000"
"""Set into the text of a special token that stands in a message, so that it is read as text. Of no character set."""


@dataclass(frozen=True)
class Parsed:
    """What a sampled turn says."""

    content: str
    """Without special tokens, reasoning and calls."""
    reasoning: str
    calls: list[RawCall]


class ChatTemplate:
    """The chat template of a tokenizer. Raises ``ConfigError`` for one that cannot be used.

    Messages are OpenAI's, tools OpenAI's list of functions. Text in messages and tools that spells a special token is
    encoded as text. ``ValueError``: the messages cannot be used, or the template refuses them.
    """

    def __init__(self, tokenizer: Any, tool_format: str = "auto") -> None:
        """``tokenizer``: one of transformers'. ``tool_format``: a name of ``FORMATS``, or ``auto``, as it shows."""
        template = getattr(tokenizer, "chat_template", None)
        if not template:
            raise ConfigError(
                "policy.chat: the tokenizer of the model has no chat template; use policy.complete, or save one with "
                "it (tokenizer.chat_template)"
            )
        self._tokenizer = tokenizer
        self._format = find_format(tool_format, str(template))
        added: Mapping[int, Any] = tokenizer.added_tokens_decoder
        special = {place: str(token) for place, token in added.items() if token.special}
        self._special = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)) | special
        markers = self._format.markers if self._format else ()
        self._markers = {place for place, text in self._special.items() if text in markers}
        self._thoughts = {place for place, text in self._special.items() if text in ("<think>", "</think>")}
        spelled = "|".join(map(re.escape, sorted(self._special.values(), key=len, reverse=True)))
        self._spells_special = re.compile(spelled) if spelled else None
        self._shielded = re.compile("(" + _SHIELD + "(?:" + spelled + "))")
        self._encode = remembering(self._encode_text)
        self._closing, self._space, self._thinks = self._examine()

    @property
    def closing(self) -> str:
        """The text of the token that closes an answer; empty where the template has none."""
        return self._closing

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The token that closes an answer, where the template has one; it ends a turn."""
        return tuple(self._encode(self._closing))

    def start(self, messages: Iterable[Mapping[str, Any]], tools: Tools = None) -> list[int]:
        """The tokens of a whole conversation, up to where the policy answers."""
        return list(self._encode(self._render(normalised(messages), self.offered(tools))))

    def extend(
        self,
        history: Sequence[Mapping[str, Any]],
        new: Sequence[Mapping[str, Any]],
        tools: Tools,
        last_ids: Sequence[int],
    ) -> list[int]:
        """The tokens between a sampled turn and the next one.

        ``history`` ends with the message of the sampled turn, ``last_ids`` are its tokens; ``new`` follows it.
        """
        answer = normalised(history[-1:])[0]
        tail = self._tail(answer, normalised(new) if new else [], self.offered(tools))
        tokens = self._encode(self._closing + tail)
        ended = bool(last_ids) and tuple(last_ids[-1:]) == self.end_tokens
        return list(tokens[1:] if ended else tokens)

    def encode(self, text: str) -> list[int]:
        """The tokens of ``text`` within an answer; what spells a special token is text."""
        return list(self._encode(self._closing + self._shield(text))[len(self.end_tokens) :])

    def decode(self, token_ids: Sequence[int], *, calls: bool = True) -> str:
        """The text of sampled tokens without special tokens, but for those that mark reasoning and calls."""
        kept = self._thoughts | self._markers if calls else self._thoughts
        ids = [each for each in token_ids if each not in self._special or each in kept]
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def without_end(self, token_ids: Sequence[int]) -> list[int]:
        """``token_ids`` without the special tokens that end them and say nothing."""
        silent = self._special.keys() - self._markers - self._thoughts
        count = len(token_ids)
        while count and token_ids[count - 1] in silent:
            count -= 1
        return list(token_ids[:count])

    def parse(self, token_ids: Sequence[int], stops: Iterable[str] = (), *, calls: bool = True) -> Parsed:
        """Read a sampled turn up to the first of ``stops``. ``calls``: whether tools were offered. Never raises."""
        calls = calls and self._format is not None
        text = cut(self.decode(token_ids, calls=calls), stops)
        reasoning, content = self._split_reasoning(text)
        if not calls or self._format is None:
            return Parsed(content, reasoning, [])
        content, found = self._format.read(content)
        return Parsed(content, reasoning, found)

    def demonstration(self, messages: Sequence[Mapping[str, Any]], tools: Tools = None) -> tuple[list[int], list[bool]]:
        """A conversation that was written, as if it had been sampled: its tokens, and which the policy would sample.

        Both ``[T]``. Raises ``ValueError`` where it does not end with a message of the assistant.
        """
        shaped, offered = normalised(messages), self.offered(tools)
        answers = [place for place, message in enumerate(shaped) if message["role"] == "assistant"]
        if not answers or answers[-1] != len(shaped) - 1 or answers[0] == 0:
            raise ValueError("a demonstration begins with another message and ends with one of the assistant's")
        ids: list[int] = []
        mask: list[bool] = []
        said: list[int] = []
        done = 0
        for place in answers:
            new = shaped[done:place]
            context = self.extend(shaped[:done], new, offered, said) if done else self.start(new, offered)
            said = self._answer(shaped[place], offered)
            ids += context + said
            mask += [False] * len(context) + [True] * len(said)
            done = place + 1
        return ids, mask

    def offered(self, tools: Tools) -> list[dict[str, Any]] | None:
        """``tools`` checked, None for none. Raises ``ConfigError`` where the template shows no way to call them."""
        checked = checked_tools(tools)
        if checked and self._format is None:
            raise ConfigError(
                "tools: the chat template of the model's tokenizer shows none of the tool formats that are known; set "
                "model.tool_format"
            )
        return checked

    def _answer(self, message: Message, tools: Tools) -> list[int]:
        """What the policy would sample to say ``message``."""
        asked = self._render([_QUESTION], tools)
        whole = self._render([_QUESTION, message], tools, ask=False)
        said, closed, _ = whole.removeprefix(asked).rpartition(self._closing) if self._closing else (whole, "", "")
        if not whole.startswith(asked):
            raise ConfigError(
                "the chat template writes an answer in another way than it asks for it, so answers cannot be shown to "
                "a model; leave out the demonstration"
            )
        if closed:
            return list(self._encode(self._closing + said + closed)[len(self.end_tokens) :])
        end = self._tokenizer.eos_token_id
        return [*self._encode(whole.removeprefix(asked).rstrip()), *([] if end is None else [end])]

    def _split_reasoning(self, text: str) -> tuple[str, str]:
        bare = text.lstrip()
        if not (self._thinks or bare.startswith("<think>")):
            return "", text
        thought, closed, content = bare.removeprefix("<think>").partition("</think>")
        return thought.strip(), content.lstrip("\n") if closed else ""

    def _examine(self) -> tuple[str, str, bool]:
        """The token that closes an answer (empty: none), the white space before it, and whether the template opens the
        reasoning itself."""
        answer = {"role": "assistant", "content": _WORD}
        try:
            after = self._render([_QUESTION, answer], None, ask=False).rpartition(_WORD)[2]
            longer = self._render([_QUESTION, answer, _QUESTION], None)
            asked = self._render([_QUESTION], None)
        except ValueError as error:
            raise ConfigError(f"the chat template cannot be extended turn by turn: {error}") from None
        if longer.count(_WORD) != 1 or "Q" not in longer.rpartition(_WORD)[2]:
            raise ConfigError(
                "the chat template cannot be extended turn by turn: it does not write out an answer followed by what "
                "comes after it; use policy.complete, or another template (tokenizer.chat_template)"
            )
        found = self._spells_special.search(after) if self._spells_special else None
        thinks = asked.rstrip().endswith("<think>")
        if found is None or after[: found.start()].strip() or len(self._encode(found[0])) > 1:
            return "", "", thinks
        return found[0], after[: found.start()], thinks

    def _tail(self, answer: Message, new: list[Message], tools: Tools) -> str:
        """What the template writes after ``answer`` and the token that closes it, when ``new`` follows."""
        refusal = "it does not write out an answer followed by these messages"
        for dummy in _dummies(answer):
            try:
                after = self._after([_QUESTION, dummy, *new], tools, ask=True)
                gap = self._gap(dummy, tools)
            except ValueError as error:
                refusal = str(error)
                continue
            if gap is not None and after.startswith(gap + self._closing):
                return after.removeprefix(gap + self._closing)
        raise ValueError(f"messages: the chat template cannot go on with them: {refusal}")

    def _gap(self, dummy: Message, tools: Tools) -> str | None:
        """What the template writes between the word in ``dummy`` and the token that closes it; None: unclear."""
        if "tool_calls" not in dummy:
            return self._space
        if not self._closing:
            return None
        gap, closed, _ = self._after([_QUESTION, dummy], tools, ask=False).partition(self._closing)
        return gap if closed else None

    def _after(self, messages: list[Message], tools: Tools, *, ask: bool) -> str:
        """What the template writes after the word that stands for the answer."""
        _, found, after = self._render(messages, tools, ask=ask).rpartition(_WORD)
        if not found:
            raise ValueError("it does not write out the answer before these messages")
        return after

    def _render(self, messages: list[Message], tools: Tools, *, ask: bool = True) -> str:
        """The text of ``messages``; ``ask``: with what makes the policy answer."""
        shielded = self._shield(messages), self._shield(tools)
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    shielded[0], tools=shielded[1], tokenize=False, add_generation_prompt=ask
                )
            )
        except Exception as error:  # noqa: BLE001 a template is a program, and may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"messages: the chat template refuses them: {reason:.200}") from None

    def _shield(self, value: Any) -> Any:
        """``value``, nested texts, with a mark before everything in it that spells a special token."""
        if isinstance(value, str):
            return self._spells_special.sub(_shielded, value) if self._spells_special else value
        if isinstance(value, Mapping):
            return {key: self._shield(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self._shield(each) for each in value]
        return value

    def _encode_text(self, text: str) -> tuple[int, ...]:
        if self._spells_special is None or _SHIELD not in text:
            return self._tokens(text, literal=False)
        tokens: list[int] = []
        for place, piece in enumerate(self._shielded.split(text)):
            literal = place % 2 == 1
            tokens += self._tokens(piece.removeprefix(_SHIELD) if literal else piece, literal=literal)
        return tuple(tokens)

    def _tokens(self, text: str, *, literal: bool) -> tuple[int, ...]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=literal)
        return tuple(ids)


def _shielded(found: re.Match[str]) -> str:
    return _SHIELD + found[0]


def _dummies(answer: Message) -> list[Message]:
    """Answers like ``answer`` to render in its place, the likest first."""
    plain: Message = {"role": "assistant", "content": _WORD}
    if not answer.get("tool_calls"):
        return [plain]
    named = [(call["id"], call["function"]["name"]) for call in answer["tool_calls"]]
    calls = [
        {"id": place, "type": "function", "function": {"name": name, "arguments": {"word": _WORD}}}
        for place, name in named
    ]
    return [plain | {"tool_calls": calls}, plain]
