"""What a reward is: an async callable from a task and an answer to a number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from streamrl.envs.environment import Reward, Task
from streamrl.errors import EnvironmentFailed

Answer = str | Sequence[Mapping[str, Any]]
"""The policy's answer: its text, or the chat messages of the episode, the newest last."""


class RewardFn(Protocol):
    """Scores one answer. Any number of calls may run at once."""

    async def __call__(self, task: Task, answer: Answer) -> float | Reward:
        """The reward. Raises ``EnvironmentFailed`` where none can be given, never a zero instead."""
        ...

    async def close(self) -> None:
        """End the processes and connections that calls started; a later call starts them again."""
        ...


def text_of(answer: Answer) -> str:
    """The text that is scored: ``answer`` itself, or the content of the last message of the assistant."""
    if isinstance(answer, str):
        return answer
    for message in reversed(answer):
        if message.get("role") == "assistant":
            content = message.get("content")
            if content is None or isinstance(content, str):
                return content or ""
            raise EnvironmentFailed(f"the last assistant message has content {type(content).__name__}, expected a str")
    raise EnvironmentFailed(f"expected an answer, got {len(answer)} messages and none of the assistant")


def reference_of(task: Task, reward: str) -> str:
    """``task.answer``; raises ``EnvironmentFailed`` where there is none, for a reward that compares with it."""
    if task.answer is None:
        raise EnvironmentFailed(f"reward {reward!r} needs Task(answer=…), and task {task.index} has none")
    return task.answer
