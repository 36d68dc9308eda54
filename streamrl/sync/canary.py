"""The canary: one short row of tokens that trainer and engine score under every version that was committed (C7).

It catches weights that are wrong, incomplete or under other names, which the digests of buckets cannot see. The row is
made from the run's seed, in every process alike, and ends with the rarest tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from streamrl.parity.compare import compare, limits_of
from streamrl.parity.probe import probe_of
from streamrl.parity.weights import Ledger, digests
from streamrl.ports import Engine, TellsDigests
from streamrl.schema import Config
from streamrl.sync.staging import Tensors
from streamrl.sync.subscriber import Judgement

MIXED = 48
"""Tokens of the row before the rarest ones."""


def canary_row(model_folder: str, config: Config) -> list[int]:
    """Token ids of the row, for the checkpoint in ``model_folder``."""
    _, mixed, _, rarest = probe_of(model_folder, config).scored
    return [*mixed[:MIXED], *rarest][: config.model.max_length]


class LogprobCanary:
    """Holds an engine's log-probs of ``row`` at temperature 1 against the trainer's.

    ``dtype`` is ``model.dtype``, which says how far they may differ, unless ``rms`` (``parity.rms``) does.
    """

    def __init__(self, row: Sequence[int], dtype: str, rms: float = 0.0) -> None:
        self._row = row
        self._limit = limits_of(dtype, rms).rms
        self._setting = f"parity.rms={rms:g}" if rms else f"model.dtype={dtype}"

    async def judge(self, engine: Engine, scores: list[float], sent: Tensors) -> Judgement:
        own = await engine.score(self._row, 1.0)
        if len(own) != len(scores):
            return Judgement(0.0, f"canary: the engine scored {len(own)} tokens, the trainer {len(scores)}")
        rms = compare(own[1:], np.asarray(scores)[1:]).rms
        if rms <= self._limit:
            return Judgement(rms)
        allowed = f"{self._setting} allows {self._limit:.0e}"
        reason = f"canary: engine and trainer log-probs differ by rms {rms:.2e}, {allowed}"
        return Judgement(rms, f"{reason}: {await _where(engine, sent)}")


async def _where(engine: Engine, sent: Tensors) -> str:
    """Which tensors the engine does not hold as they were sent, where it can tell."""
    if not isinstance(engine, TellsDigests):
        return "this engine cannot tell which tensors differ"
    held = await engine.digests()
    expected = await asyncio.to_thread(digests, sent)
    return Ledger(sent=expected).wrong(held) or "it holds every tensor as it was sent: the trainer means other weights"
