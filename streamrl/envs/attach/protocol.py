"""What an attached process and a rollouter tell each other: JSON texts on one WebSocket (docs/attach.md).

::

    process                                      rollouter
    hello(agent, workers)         ──────────►
                                  ◄──────────    welcome(run, …)
                                  ◄──────────    lease(id, task, a key per episode)
    call(complete | chat | clip)  ──────────►
                                  ◄──────────    answer | refused
    done | failed, per episode    ──────────►
                                  ◄──────────    closed(lease, what became of it)
    detach                        ──────────►
                                  ◄──────────    bye

Messages of one direction arrive in their order. The connection is the sign of life: when it ends, so do the leases.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct

from streamrl.buffers.wire.dtypes import DTYPES, NAMES, as_array
from streamrl.envs.environment import Reward, Task
from streamrl.errors import EnvironmentFailed, WireError

PROTOCOL = 1
PATH = "/attach"

MESSAGE_BYTES = 16 << 20
"""Of one message; an episode's columns are the largest part of any."""

HEARTBEAT_S = 20.0
"""Seconds between pings; a side that does not answer one for half of that is gone."""

MAX_CALLS = 4_096
"""Under way at once for one process (C4); so it plays no more episodes than that at once."""

OUTBOX_MESSAGES = 4 * MAX_CALLS
"""That may wait for the other side to read them, several for each call; one that is so far behind is given up."""

MAX_WORKERS = 4_096
MAX_EPISODES = 1 << 20

Name = Annotated[str, Meta(max_length=64, pattern=r"^[A-Za-z0-9_.-]*$")]
Id = Annotated[int, Meta(ge=0, lt=1 << 53)]
Number = Annotated[int, Meta(ge=0, le=MAX_EPISODES)]
Text = Annotated[str, Meta(max_length=8_192)]


# Process → rollouter ------------------------------------------------------------------------------------------------


class Hello(Struct, tag="hello"):
    """The first message; answered with ``Welcome`` or ``Bye``."""

    protocol: int
    agent: Annotated[Name, Meta(min_length=1)]
    """Its name in the metrics, ``reward/<agent>/mean``, where it brings its own tasks; and in the events."""
    workers: Annotated[int, Meta(ge=1, le=MAX_WORKERS)]
    """Leases that it plays at once."""
    own_tasks: bool = False
    """It makes the task of a lease from the lease's prompt number; else the run's task comes with the lease."""


class Call(Struct, tag="call"):
    """Call a method of an episode's ``policy``; answered with ``Answer`` or ``Refused`` of the same ``id``."""

    id: Id
    lease: Id
    episode: Number
    method: Annotated[str, Meta(pattern="^(complete|chat|clip)$")]
    args: dict[str, Any]
    """Of the method, by name."""
    branch: Number = 0


class Cancel(Struct, tag="cancel"):
    """Nobody waits for this call any more."""

    id: Id


class Fork(Struct, tag="branch"):
    """From now on ``number`` is a branch of the branch ``parent`` (``policy.branch``); 0 is the episode itself."""

    lease: Id
    episode: Number
    number: Annotated[int, Meta(ge=1, le=MAX_EPISODES)]
    parent: Number = 0


class TurnReward(Struct, tag="reward"):
    """Add to the turn that a branch sampled last (``policy.reward``)."""

    lease: Id
    episode: Number
    value: float
    branch: Number = 0


class Array(Struct):
    """An array in JSON."""

    dtype: str
    """Such as ``float32``."""
    shape: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=32)]
    data: bytes
    """Little-endian, row by row; base64 on the wire."""


class Worth(Struct):
    """A ``Reward`` in JSON."""

    lease: Id
    episode: Number
    reward: float
    metrics: dict[str, float] = {}
    metadata: dict[str, Any] = {}
    columns: dict[str, Array] = {}


class Done(Worth, tag="done"):
    """The episode has ended and is worth this."""

    env: Name = ""
    """Name in the metrics for the task of this lease, of a process that brings its own; empty: the agent's."""


class Finish(Worth, tag="finish"):
    """A branch of the episode has ended and is worth this by itself (``policy.finish``)."""

    branch: Number = 0


class Failed(Struct, tag="failed"):
    """The episode did not finish."""

    lease: Id
    episode: Number
    reason: Text
    traceback: Text = ""
    context_full: bool = False
    """It had no more room to sample: the episode counts as truncated, with reward 0, and not as failed."""


class Detach(Struct, tag="detach"):
    """No more leases, please; answered with ``Bye`` once those under way are closed."""

    at_once: bool = False
    """Those under way are returned now."""


# Rollouter → process ------------------------------------------------------------------------------------------------


class Welcome(Struct, tag="welcome"):
    run: str
    rollouter: str
    environment: str
    """Name of the run's own."""
    group_size: int
    """Episodes of one lease."""
    timeout_s: float
    """Seconds that one episode may take."""
    restart_s: float
    """Seconds within which a rollouter that died is replaced."""
    seed: int
    """Of the run: it decides which task a prompt number stands for."""
    held_out: float
    """Share of the prompts that are kept from training."""


class PlayedTask(Struct):
    """A task in JSON."""

    index: int
    prompt: str = ""
    answer: str | None = None
    metadata: dict[str, Any] = {}


class Leased(Struct, tag="lease"):
    """Play the episodes of this prompt, all of the same task. They are closed when ``deadline_s`` is over."""

    lease: Id
    prompt: int
    """Number of the prompt in the training sequence."""
    attempt: int
    deadline_s: float
    keys: list[str]
    """Per episode: the key by which clients that speak HTTP reach it."""
    task: PlayedTask | None = None
    """None for a process that brings its own tasks."""


class Answer(Struct, tag="answer"):
    id: Id
    result: dict[str, Any]
    """Fields of the ``Completion`` or ``ChatTurn``; of ``clip`` the ``text``."""


class Refused(Struct, tag="refused"):
    """A call that could not be carried out."""

    id: Id
    kind: str
    """``value`` (arguments that cannot be used), ``context_full``, ``ended`` or ``engine``."""
    message: str


class Closed(Struct, tag="closed"):
    """A lease is over: its worker is free, and whatever still runs of it can be ended."""

    lease: Id
    rewards: list[float]
    """Of the episodes that count."""
    failures: list[str]
    """Why the others do not."""
    cut: str = ""
    """Why the lease was closed before its episodes had ended; empty where they had."""


class Bye(Struct, tag="bye"):
    """The last message."""

    kind: Literal["ended", "detached", "leaving", "refused"]
    """The run is over; the process wanted it; the rollouter ends, and another may take its place; or the process did
    something that the protocol does not allow, or failed too often."""
    reason: str


FromProcess = Hello | Call | Cancel | Fork | TurnReward | Finish | Done | Failed | Detach
FromRollouter = Welcome | Leased | Answer | Refused | Closed | Bye

_FROM_PROCESS = msgspec.json.Decoder(FromProcess)
_FROM_ROLLOUTER = msgspec.json.Decoder(FromRollouter)


def encode(message: Struct) -> str:
    """As JSON. Raises ``WireError`` for what JSON cannot say, such as an object in the metadata of a task, and for what
    is larger than a message may be."""
    kind = type(message).__name__.lower()
    try:
        text = msgspec.json.encode(message)
    except (TypeError, msgspec.MsgspecError, UnicodeEncodeError) as error:
        raise WireError(f"message {kind}: {error}") from error
    if len(text) > MESSAGE_BYTES:
        raise WireError(f"message {kind}: expected at most {MESSAGE_BYTES} bytes, got {len(text)}")
    return text.decode()


def decode_from_process(text: str | bytes) -> FromProcess:
    """Raises ``WireError`` naming what is wrong and where."""
    return _decode(_FROM_PROCESS, text)


def decode_from_rollouter(text: str | bytes) -> FromRollouter:
    """Raises ``WireError`` naming what is wrong and where."""
    return _decode(_FROM_ROLLOUTER, text)


def _decode(decoder: msgspec.json.Decoder[Any], text: str | bytes) -> Any:
    try:
        return decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(" ".join(str(error).split())) from error


def task_in_json(task: Task) -> PlayedTask:
    """Raises ``EnvironmentFailed`` where its metadata cannot travel."""
    played = PlayedTask(task.index, task.prompt, task.answer, task.metadata)
    try:
        msgspec.json.encode(played)
    except (TypeError, msgspec.MsgspecError, UnicodeEncodeError) as error:
        raise EnvironmentFailed(
            f"task({task.index}).metadata cannot be sent to an attached agent as JSON ({error}); attach one that "
            "brings its own tasks, or the run's own environment"
        ) from error
    return played


def worth(reward: Reward) -> dict[str, Any]:
    """The fields of ``Worth`` that a checked reward gives."""
    columns = {name: _array_in_json(as_array(value, name)) for name, value in reward.columns.items()}
    return {
        "reward": reward.value,
        "metrics": dict(reward.metrics),
        "metadata": dict(reward.metadata),
        "columns": columns,
    }


def reward_of(message: Worth) -> Reward:
    """The reward in a message, not checked. Raises ``EnvironmentFailed`` for a column that is not one."""
    columns = {name: _array(name, each) for name, each in message.columns.items()}
    return Reward(message.reward, message.metrics, columns, message.metadata)


def _array_in_json(array: np.ndarray) -> Array:
    return Array(NAMES[array.dtype], list(array.shape), array.tobytes())


def _array(name: str, column: Array) -> np.ndarray:
    dtype = DTYPES.get(column.dtype)
    if dtype is None:
        raise EnvironmentFailed(f"column {name!r:.80}: no dtype {column.dtype!r:.40}; there are {', '.join(DTYPES)}")
    expected = int(np.prod(column.shape, dtype=object)) * dtype.itemsize
    if len(column.data) != expected:
        raise EnvironmentFailed(
            f"column {name!r:.80}: {column.dtype} of shape {column.shape} takes {expected} bytes, got "
            f"{len(column.data)}"
        )
    return np.frombuffer(column.data, dtype).reshape(column.shape)


def call_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that were given, without those left at None."""
    return {name: value for name, value in args.items() if value is not None}
