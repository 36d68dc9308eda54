"""The same for clients that send the whole text, or all token ids, every time, as with ``/v1/completions``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from streamrl.envs.chat.alignment import Kind, Line, Plan, begin, can_grow, kept_tokens
from streamrl.envs.codec import Codec
from streamrl.envs.environment import Completion
from streamrl.envs.stops import cut
from streamrl.envs.transcript import Transcript, Turn


@dataclass(frozen=True)
class TextTurn(Completion):
    """One answer to a whole text."""

    prompt_token_ids: tuple[int, ...] = ()
    """Everything before the first sampled token."""


@dataclass(eq=False)
class _Mark:
    """A sampled turn, and what was read up to it."""

    transcript: Transcript
    turn: Turn
    before: str | None
    """The text before it; None where token ids were asked with."""
    said: str
    """All that it sampled."""
    answer: str
    """What the client got of that."""

    def begins(self, prompt: str | list[int]) -> bool:
        """Whether ``prompt`` is the history of this turn, its answer, and more."""
        if isinstance(prompt, str):
            return self.before is not None and prompt.startswith(self.before + self.answer)
        return prompt[: self.turn.end] == self.transcript.tokens[: self.turn.end]


@dataclass(frozen=True)
class _Request(Plan):
    prompt: str | None = None
    """The whole text, where it was text."""
    realigned: _Mark | None = None


class TextCapture:
    """The texts of one session; as ``capture.Capture``, by the beginnings of texts and of token ids."""

    def __init__(self, codec: Codec, line: Line) -> None:
        self._codec = codec
        self._line = line
        self._marks: list[_Mark] = []

    def plan_text(self, prompt: str | Sequence[int]) -> Plan:
        """Match a whole text, or all token ids. Raises ``ValueError`` for what cannot be encoded."""
        asked = prompt if isinstance(prompt, str) else self._codec.context(prompt)
        text = asked if isinstance(asked, str) else None
        known = [mark for mark in self._marks if mark.begins(asked)]
        mark = max(known, key=lambda each: (each.turn.end, can_grow(each.transcript, each.turn)), default=None)
        if mark is None:
            fresh = begin(self._line, list(self._codec.context(asked)))
            return _Request(fresh.kind, fresh.transcript, fresh.context, prompt=text)
        kept, rest = self._shared(mark, asked)
        context, whole = list(self._codec.context(rest)), kept == mark.turn.end
        if not can_grow(mark.transcript, mark.turn) or kept == mark.turn.start:
            return _Request(Kind.FORK, self._line.fork(mark.transcript, kept), context, prompt=text)
        if whole:
            return _Request(Kind.EXTEND, mark.transcript, context, prompt=text)
        return _Request(Kind.REALIGN, mark.transcript, context, kept, prompt=text, realigned=mark)

    def record(self, plan: Plan, turn: Turn, stops: Iterable[str] = ()) -> TextTurn:
        """Remember ``turn``, which was sampled for ``plan`` until one of ``stops``."""
        assert isinstance(plan, _Request)
        if plan.realigned is not None:
            self._marks.remove(plan.realigned)
        generation = turn.generation
        token_ids = tuple(generation.token_ids.tolist())
        said = self._codec.decode(token_ids)
        answer = cut(said, stops)
        self._marks.append(_Mark(plan.transcript, turn, plan.prompt, said, answer))
        logprobs = tuple(generation.logprobs.tolist())
        read = tuple(plan.transcript.tokens[: turn.start])
        return TextTurn(answer, token_ids, generation.finish_reason, logprobs, read)

    def _shared(self, mark: _Mark, prompt: str | list[int]) -> tuple[int, str | list[int]]:
        """Tokens of the transcript that ``prompt`` begins with, and what follows them in it."""
        if not isinstance(prompt, str):
            return mark.turn.end, prompt[mark.turn.end :]
        follows = prompt.removeprefix(mark.before or "")
        if follows.startswith(mark.said):
            return mark.turn.end, follows.removeprefix(mark.said)
        sampled = mark.turn.generation.token_ids.tolist()
        kept = kept_tokens(sampled, follows, self._decode)
        return mark.turn.start + kept, follows.removeprefix(self._decode(sampled[:kept]))

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._codec.decode(tuple(token_ids))
