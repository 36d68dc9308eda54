"""From the rewards of a batch to the advantages of its trajectories, as the settings say; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from streamrl.loss.advantages import advantages, samples
from streamrl.loss.shaping import overlong_penalty
from streamrl.objective_checks import trains_without_advantage
from streamrl.schema import Config

NOT_QUITE_ZERO = 5e-324
"""The batcher leaves out trajectories with an advantage of exactly 0. Where those matter to the loss they get the
smallest number instead, which is 0 again in the float32 of a packed micro-batch."""


class AdvantageEstimator:
    """Callable as ``estimator(rewards, lengths, episodes)``, all ``[G_i]`` per group, lengths in sampled tokens.

    What is compared are *samples*: the trajectories of one episode that have the same reward are one of them, and each
    gets its advantage. So an episode counts once, however many trajectories it was recorded in. A sample is as long as
    its trajectories together; for the penalty on length the longest one counts.

    Rewards are shaped by length first (``loss.overlong_cache``), then compared as ``loss.advantage`` says. With ``gae``
    they are handed on: the trainer, which has the values, makes advantages of tokens from them.
    """

    def __init__(self, config: Config) -> None:
        self._loss = config.loss
        self._longest = config.sampling.max_tokens

    def __call__(
        self, rewards: Sequence[np.ndarray], lengths: Sequence[np.ndarray], episodes: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        places = [samples(*each) for each in zip(episodes, rewards, strict=True)]
        of_samples = [_Samples.of(*each) for each in zip(rewards, lengths, places, strict=True)]
        found = self._of_samples([each.rewards for each in of_samples], of_samples)
        if trains_without_advantage(self._loss):
            found = [np.where(each == 0, NOT_QUITE_ZERO, each) for each in found]
        return [each[place] for each, place in zip(found, places, strict=True)]

    def _of_samples(self, rewards: list[np.ndarray], of_samples: Sequence[_Samples]) -> list[np.ndarray]:
        loss = self._loss
        if loss.overlong_cache:
            rewards = [
                reward + loss.overlong_penalty * overlong_penalty(each.longest, self._longest, loss.overlong_cache)
                for reward, each in zip(rewards, of_samples, strict=True)
            ]
        if loss.advantage == "gae":
            return rewards
        return advantages(rewards, loss.advantage, [each.lengths for each in of_samples])


@dataclass(frozen=True)
class _Samples:
    """The S samples of one group, each ``[S]``."""

    rewards: np.ndarray
    lengths: np.ndarray
    """Sampled tokens of all of its trajectories."""
    longest: np.ndarray
    """Sampled tokens of its longest trajectory."""

    @classmethod
    def of(cls, rewards: np.ndarray, lengths: np.ndarray, places: np.ndarray) -> _Samples:
        count = int(places.max(initial=-1)) + 1
        of_sample, longest = np.zeros(count), np.zeros(count)
        of_sample[places] = rewards
        np.maximum.at(longest, places, lengths)
        return cls(of_sample, np.bincount(places, weights=lengths, minlength=count), longest)
