"""From the rewards of a batch to the advantages of its trajectories, as the settings say; no torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streamrl.loss.advantages import advantages
from streamrl.loss.shaping import overlong_penalty
from streamrl.objective_checks import trains_without_advantage
from streamrl.schema import Config

NOT_QUITE_ZERO = 5e-324
"""The batcher leaves out trajectories with an advantage of exactly 0. Where those matter to the loss they get the
smallest number instead, which is 0 again in the float32 of a packed micro-batch."""


class AdvantageEstimator:
    """Callable as ``estimator(rewards, lengths)``, both ``[G_i]`` per group, lengths in sampled tokens.

    Rewards are shaped by length first (``loss.overlong_cache``), then compared as ``loss.advantage`` says. With ``gae``
    they are handed on: the trainer, which has the values, makes advantages of tokens from them.
    """

    def __init__(self, config: Config) -> None:
        self._loss = config.loss
        self._longest = config.sampling.max_tokens

    def __call__(self, rewards: Sequence[np.ndarray], lengths: Sequence[np.ndarray]) -> list[np.ndarray]:
        loss = self._loss
        if loss.overlong_cache:
            rewards = [
                reward + loss.overlong_penalty * overlong_penalty(length, self._longest, loss.overlong_cache)
                for reward, length in zip(rewards, lengths, strict=True)
            ]
        if loss.advantage == "gae":
            found = [np.asarray(reward, dtype=np.float64) for reward in rewards]
        else:
            found = advantages(rewards, loss.advantage, lengths)
        if trains_without_advantage(loss):
            found = [np.where(each == 0, NOT_QUITE_ZERO, each) for each in found]
        return found
