"""An environment whose engine loads one version wrongly, in the middle of a run."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from ring_envs import Digits

from streamrl.engines.embedded import EmbeddedEngine

_load = EmbeddedEngine.load


class Spoiled(Digits):
    """``version``: loaded with half of the last norm's weight."""

    def __init__(self, version: int) -> None:
        async def spoil(self: EmbeddedEngine, loading: int, tensors: Mapping[str, torch.Tensor]) -> None:
            if loading == version:
                tensors = {**tensors, "model.norm.weight": tensors["model.norm.weight"] / 2}
            await _load(self, loading, tensors)

        EmbeddedEngine.load = spoil  # type: ignore[assignment,method-assign]
