"""The run's reward model as a reward: every answer goes to the process that serves it (``reward_model.name``)."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from streamrl.buffers.links.link_keys import LinkKeys
from streamrl.buffers.links.link_zmq import ClientLink
from streamrl.buffers.wire.messages import Rewarded, RewardRequest
from streamrl.envs.environment import Task
from streamrl.envs.rewards.protocol import Answer
from streamrl.errors import ConfigError, EnvironmentFailed, StreamRLError


@dataclass(frozen=True)
class ScorerAddress:
    """Where the reward model of the run is served."""

    endpoint: str
    name: str
    """Of this process, for the server."""
    keys: LinkKeys | None = None


_scorer: ScorerAddress | None = None


def use_scorer(address: ScorerAddress | None) -> None:
    """Rewards that this process loads from now on ask there: a process belongs to one run."""
    global _scorer
    _scorer = address


class ModelReward:
    """The reward model's number for the task's prompt and the answer; with ``sigmoid`` brought into (0, 1).

    An answer of chat messages is scored as they are. Requests survive a server that dies and comes back, so a call ends
    with the answer, by cancellation or ``close``. Raises ``EnvironmentFailed`` where the answer cannot be scored.
    """

    def __init__(self, sigmoid: bool = False) -> None:
        if _scorer is None:
            raise ConfigError("no reward model can be reached from this process; set reward_model.name=FOLDER")
        self._address = _scorer
        self._sigmoid = sigmoid
        self._link: ClientLink | None = None

    async def __call__(self, task: Task, answer: Answer) -> float:
        request = RewardRequest(_conversation(task, answer))
        try:
            header, _ = await self._connected().request(request, what=f"reward of task {task.index}")
        except StreamRLError as error:
            raise EnvironmentFailed(str(error)) from error
        if not isinstance(header.body, Rewarded):
            raise EnvironmentFailed(f"reward model: expected a reward, got {type(header.body).__name__}")
        return _sigmoid(header.body.value) if self._sigmoid else header.body.value

    async def close(self) -> None:
        """Close the connection."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _connected(self) -> ClientLink:
        if self._link is None:
            address = self._address
            self._link = ClientLink(address.endpoint, address.name, time.monotonic, keys=address.keys)
        return self._link


def _conversation(task: Task, answer: Answer) -> list[tuple[str, str]]:
    if isinstance(answer, str):
        return [("user", task.prompt), ("assistant", answer)]
    return [(str(message.get("role")), str(message.get("content") or "")) for message in answer]


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))
