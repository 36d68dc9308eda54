"""How a request goes on with a transcript, and how far a text that changed a little is still what was sampled."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from streamrl.envs.transcript import Transcript, Turn

REALIGN_TOKENS = 32
"""Sampled tokens at the end of a turn that a realignment may drop. What differs in more of them is another history."""


class Kind(Enum):
    """How a request was matched; counted by name. Starts and forks make one trajectory each."""

    START = "start"
    """The first of its line."""
    EXTEND = "extend"
    """The history of a transcript, and more."""
    REALIGN = "realign"
    """The same but for drift in the last answer: what differs became context."""
    FORK = "fork"
    """Another history: a transcript of its own, which begins with the tokens that both share."""


@dataclass(frozen=True)
class Plan:
    """What to sample from for one request."""

    kind: Kind
    transcript: Transcript
    context: list[int]
    """Tokens to append before sampling."""
    keep: int | None = None
    """Tokens of the transcript that stay as they are; None: all."""


class Line(Protocol):
    """Where the transcripts of a session are (``streamrl.envs.episode.Branch``)."""

    current: Transcript

    def fork(self, transcript: Transcript, end: int | None = None) -> Transcript: ...


def begin(line: Line, context: list[int]) -> Plan:
    """Sample from a history that shares nothing with another one of ``line``."""
    first = line.current
    if not first.tokens and not first.busy:
        return Plan(Kind.START, first, context)
    return Plan(Kind.FORK, line.fork(first, 0), context)


def can_grow(transcript: Transcript, turn: Turn) -> bool:
    """Whether ``turn`` is the end of ``transcript`` and nothing is being sampled after it."""
    last = bool(transcript.turns) and transcript.turns[-1] is turn
    return last and not transcript.busy and len(transcript.tokens) == turn.end


def kept_tokens(token_ids: Sequence[int], text: str, decode: Callable[[Sequence[int]], str]) -> int:
    """How many of the sampled ``token_ids`` stand at the start of ``text``; 0 where too many would not."""
    for kept in range(len(token_ids), max(0, len(token_ids) - REALIGN_TOKENS - 1), -1):
        if text.startswith(decode(token_ids[:kept])):
            return kept
    return 0


def drifted(old: str, new: str) -> bool:
    """Whether ``new`` is ``old`` but for white space, the form of characters or of JSON, or a cut at its end."""
    one, other = _squeezed(old), _squeezed(new)
    return bool(other) and (one.startswith(other) or _same_json(old, new))


def _squeezed(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).split())


def _same_json(old: str, new: str) -> bool:
    try:
        return bool(json.loads(old) == json.loads(new))
    except (ValueError, RecursionError):
        return False
