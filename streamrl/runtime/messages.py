"""The control plane's wire: what actors and the controller tell each other, as tagged msgspec structs.

Every actor holds one DEALER socket to the controller's ROUTER. Data never travels here: trajectories go through the
queue, weights through shared memory.
"""

from __future__ import annotations

from typing import Any

import msgspec

from streamrl.errors import WireError
from streamrl.parity.records import Asked, EngineReport, TrainerReport

SCHEMA = 1


class Message(msgspec.Struct, tag=True, kw_only=True):
    schema: int = SCHEMA


# Actor to controller --------------------------------------------------------------------------------------------------


class Hello(Message):
    """First word of a process: it runs and has its control socket."""

    pid: int
    host: str


class Ready(Message):
    """Setup is done; the actor waits for ``Start``."""

    info: dict[str, Any] = {}


class Heartbeat(Message):
    state: str
    waiting_for: str
    """Empty while the actor works."""
    waiting_s: float
    gauges: dict[str, float]


class Event(Message):
    """One line for ``events.jsonl``."""

    event: str
    fields: dict[str, Any]


class Stepped(Message):
    """Trainer rank 0: an optimizer step is done and its version is published."""

    step: int
    version: int
    metrics: dict[str, float]


class Evaluated(Message):
    version: int
    accuracy: float
    answers: list[tuple[str, str, float]]
    """(prompt, answer, reward) of the first few held-out tasks."""


class Probed(Message):
    """What an engine says of the parity probe under version 0 (C7)."""

    report: EngineReport


class Scored(Message):
    """Trainer rank 0: its answer to ``ScoreProbe``."""

    report: TrainerReport


class Unresponsive(Message):
    """Trainer rank 0: a rollouter did not do its part of a weight update in time; it must be replaced."""

    member: str
    waited_for: str


class Progress(Message):
    """How far a long setup is, for the screen."""

    done: int
    total: int
    text: str


class Statistics(Message):
    """The buffer's final counts of groups; until it stops they travel as its heartbeats' gauges."""

    values: dict[str, float]


class Finished(Message):
    """The actor's work is done; its result, where it has one."""

    result: dict[str, Any] = {}


class Failed(Message):
    """The actor cannot go on: the run ends, or the actor is replaced."""

    kind: str
    """Name of the exception class."""
    reason: str
    traceback: str


# Controller to actor --------------------------------------------------------------------------------------------------


class Tick(Message):
    """The controller's heartbeat."""


class Start(Message):
    """Everybody is ready: begin."""


class ScoreProbe(Message):
    """To every trainer rank: score these rows; rank 0 answers with ``Scored``."""

    rows: list[Asked]


class GatePassed(Message):
    """To every trainer rank: engines and trainer agree on the probe, training may begin."""


class Members(Message):
    """To trainer rank 0: who must acknowledge a version."""

    rollouters: list[str]
    observers: list[str]


class HolderLost(Message):
    """To the buffer: this rollouter died, its leases go back; to engine hosts: its requests are forgotten."""

    holder: str


class Stop(Message):
    """Drain and end."""


Any_ = (
    Hello | Ready | Heartbeat | Event | Stepped | Evaluated | Probed | Scored | Unresponsive | Progress | Statistics
    | Finished | Failed | Tick | Start | ScoreProbe | GatePassed | Members | HolderLost | Stop
)  # fmt: skip

_decoder = msgspec.msgpack.Decoder(Any_)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(frame: bytes | memoryview) -> Message:
    """The message in ``frame``; ``WireError`` where it does not follow the schema."""
    try:
        message = _decoder.decode(frame)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise WireError(f"control message: {error}") from error
    if message.schema != SCHEMA:
        raise WireError(f"control message: expected schema {SCHEMA}, got {message.schema}")
    return message
