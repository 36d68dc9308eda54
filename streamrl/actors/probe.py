"""The launch's parity gate: engines and trainer score the same tokens under version 0 and must agree (C7).

It goes the whole way: the trainer's weights through the weight plane into each engine, temperature and head included.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from streamrl.runtime.messages import Scored
from streamrl.schema import Config

TRAINER = "trainer-0"
"""Whose scores the engines are held against."""

RMS_LIMITS = {"float32": 1e-4}
"""Largest accepted root mean square of the log-prob difference, in nats, by ``model.dtype``: fp32 kernels differ by
summation order alone, which is well under 1e-5 for the models here."""


def probe_tokens(model_folder: str, config: Config) -> list[list[int]]:
    """Token ids of the probe: one short, one long and one repeating sequence, equal in every process of the run."""
    vocabulary = json.loads((Path(model_folder) / "config.json").read_text())["vocab_size"]
    generator = np.random.default_rng(config.seed)
    longest = min(config.model.max_length, 64)
    mixed = generator.integers(0, vocabulary, size=longest).tolist()
    return [mixed[: max(2, longest // 8)], mixed, [mixed[0]] * (longest // 2)]


@dataclass(frozen=True)
class Verdict:
    """The numbers of the gate, over the worst engine, in nats."""

    rms: float
    max: float
    limit: float
    passed: bool


class ParityGate:
    """Collects the scores of version 0 and gives one verdict when trainer and all engines have reported."""

    def __init__(self, dtype: str) -> None:
        self._limit = RMS_LIMITS[dtype]
        self._scores: dict[str, np.ndarray] = {}
        self.verdict: Verdict | None = None

    def add(self, actor: str, scored: Scored, rollouters: list[str]) -> Verdict | None:
        """The verdict, with the score that completes it; None before and after."""
        if scored.version != 0 or self.verdict is not None:
            return None  # a replacement that joined later: version 0 was already judged
        self._scores[actor] = np.asarray(scored.logprobs)
        if not {TRAINER, *rollouters} <= self._scores.keys():
            return None
        offsets = [self._scores[name] - self._scores[TRAINER] for name in rollouters]
        # np.max, unlike max, lets a NaN of any engine through, and NaN fails the comparison.
        rms = float(np.max([np.sqrt(np.mean(offset**2)) for offset in offsets]))
        worst = float(np.max([np.max(np.abs(offset)) for offset in offsets]))
        self.verdict = Verdict(rms, worst, self._limit, passed=rms <= self._limit)
        return self.verdict
