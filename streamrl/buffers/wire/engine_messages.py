"""What rollouters say to an engine that they share, and what it says to them (``engines/serving.py``)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from streamrl.buffers.wire.fields import Count, Name, Spans

STOPS = 1 << 10
"""Stop tokens, and stop strings, of one request at most."""


class GenerateRequest(Struct, tag="generate"):
    """``types.SamplingParams``; the prompt's token ids follow, int32. Answered with ``Generated``.

    Withdrawn by ``Withdraw``: the engine forgets it.
    """

    temperature: float
    top_k: Count
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    max_tokens: Count
    stop_token_ids: Annotated[list[Count], Meta(max_length=STOPS)]
    stop_strings: Annotated[list[Name], Meta(max_length=STOPS)]
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class EngineState(Struct, array_like=True, frozen=True):
    """An engine, as its host tells those that share it."""

    number: Annotated[int, Meta(ge=1, lt=1 << 53)]
    """+1 with every change of ``version``, ``paused`` or ``serving``."""
    version: int
    serving: bool
    """It has weights, and takes requests; before, they wait."""
    paused: bool
    """It stands still for an update; requests wait and keep what they have."""
    slots: Count
    running: Count
    waiting: Count
    generated_tokens: Count
    prefilled_tokens: Count
    busy_s: float
    kv_used: float
    preemptions: Count


class Generated(Struct, tag="generated"):
    """``types.Generation``; the token ids, int32, and then their log-probs, float32, follow in one frame."""

    versions: Spans
    finish_reason: Name
    state: EngineState


class WatchRequest(Struct, tag="watch"):
    """Answered with ``Watched`` once the state's number is another than ``seen``; 0: at once."""

    seen: Count


class Watched(Struct, tag="watched"):
    state: EngineState
