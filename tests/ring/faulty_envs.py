"""Environments that break the engine of the process that builds them, for runs that the parity gate must stop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ring_envs import Digits

from streamrl.engines.embedded import EmbeddedEngine
from streamrl.types import Generation, SamplingParams

_generate, _load = EmbeddedEngine.generate, EmbeddedEngine.load


async def _returns_raw(self: EmbeddedEngine, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
    answer = await _generate(self, prompt_ids, params)
    scores = await self.score([*prompt_ids, *answer.token_ids.tolist()], 1.0)
    return replace(answer, logprobs=scores[len(prompt_ids) :])


async def _loads_no_norm(self: EmbeddedEngine, version: int, tensors: Mapping[str, object]) -> None:
    await _load(self, version, {**tensors, "model.norm.weight": self._core.runner.parameters()["model.norm.weight"]})


class Broken(Digits):
    """``fault``: ``raw`` (log-probs at temperature 1) or ``norm`` (the last norm is never loaded)."""

    def __init__(self, fault: str) -> None:
        if fault == "raw":
            EmbeddedEngine.generate = _returns_raw  # type: ignore[method-assign]
        else:
            EmbeddedEngine.load = _loads_no_norm  # type: ignore[method-assign]
