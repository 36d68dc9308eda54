"""A policy that gives the right answers: what they are worth shows whether the reward and its task agree."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from streamrl.envs.codec import Codec
from streamrl.envs.demonstration import lesson
from streamrl.envs.environment import Task
from streamrl.types import Generation, SamplingParams


class Teacher:
    """An engine that samples what a task's answer or demonstration says, turn by turn, whatever it is asked."""

    def __init__(self, task: Task, codec: Codec) -> None:
        self._turns = [
            [*codec.encode(piece), *codec.end_tokens] if isinstance(piece, str) else list(piece)
            for piece, is_policys in _pieces(task, codec)
            if is_policys
        ]
        self._end = list(codec.end_tokens) or [0]

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        await asyncio.sleep(0)
        wanted = self._turns.pop(0) if self._turns else self._end
        token_ids = np.array(wanted[: params.max_tokens], dtype=np.int32)
        reason = "stop" if len(token_ids) == len(wanted) else "length"
        return Generation(token_ids, np.zeros(len(token_ids), dtype=np.float32), [(0, len(token_ids))], reason)


def _pieces(task: Task, codec: Codec) -> list[tuple[str | Sequence[int], bool]]:
    if task.demonstration and not isinstance(task.demonstration[0], str):
        return lesson(task, codec.template)
    texts = task.demonstration or (task.prompt, task.answer or "")
    return [(str(text), place % 2 == 1) for place, text in enumerate(texts)]
