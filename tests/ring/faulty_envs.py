"""Environments that break the engine of the process that builds them, for runs that the parity gate must stop."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ring_envs import Digits

from streamrl.engines.embedded import EmbeddedEngine
from streamrl.parity.rehearsal import PAST_THE_CACHE
from streamrl.types import Generation, SamplingParams

_generate, _load = EmbeddedEngine.generate, EmbeddedEngine.load


async def _returns_raw(self: EmbeddedEngine, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
    answer = await _generate(self, prompt_ids, params)
    scores = await self.score([*prompt_ids, *answer.token_ids.tolist()], 1.0)
    return replace(answer, logprobs=scores[len(prompt_ids) :])


async def _loads_no_norm(self: EmbeddedEngine, version: int, tensors: Mapping[str, object]) -> None:
    await _load(self, version, {**tensors, "model.norm.weight": self._core.runner.parameters()["model.norm.weight"]})


async def _never_answers(self: EmbeddedEngine, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


class Broken(Digits):
    """``fault``: ``raw`` (log-probs at temperature 1), ``norm`` (the last norm is never loaded) or ``deaf`` (requests
    are never answered)."""

    def __init__(self, fault: str) -> None:
        if fault == "raw":
            EmbeddedEngine.generate = _returns_raw  # type: ignore[method-assign]
        elif fault == "norm":
            EmbeddedEngine.load = _loads_no_norm  # type: ignore[method-assign]
        else:
            EmbeddedEngine.generate = _never_answers  # type: ignore[method-assign]


def _first_at(grave: str) -> bool:
    try:
        Path(grave).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class DiesOnce(Digits):
    """The first process whose engine rehearses a weight update is killed in the middle of it; ``grave`` then exists."""

    def __init__(self, grave: str) -> None:
        async def load(self: EmbeddedEngine, version: int, tensors: Mapping[str, object]) -> None:
            if version == PAST_THE_CACHE and _first_at(grave):
                os.kill(os.getpid(), signal.SIGKILL)
            await _load(self, version, tensors)

        EmbeddedEngine.load = load  # type: ignore[method-assign]
