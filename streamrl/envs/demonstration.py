"""What a task shows a model that is built from scratch: pieces of a trajectory, and which of them it is to learn.

A task has an ``answer``, or a whole ``demonstration``: texts that alternate between environment and policy, or chat
messages, whose assistant messages are learnt as the chat template writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from streamrl.envs.chat.template import ChatTemplate
from streamrl.envs.environment import Task

Lesson = list[tuple[str | Sequence[int], bool]]


def lesson(task: Task, template: ChatTemplate) -> Lesson:
    """Pieces of text or token ids, True where the policy is to learn them."""
    shown = task.demonstration
    if not shown:
        return [(task.prompt, False), (task.answer or "", True)]
    if isinstance(shown[0], str):
        return [(str(text), place % 2 == 1) for place, text in enumerate(shown)]
    messages = [dict(message) for message in shown if not isinstance(message, str)]
    ids, taught = template.demonstration(messages, task.tools)
    runs = groupby(zip(ids, taught, strict=True), key=lambda pair: pair[1])
    return [([token for token, _ in run], is_taught) for is_taught, run in runs]
