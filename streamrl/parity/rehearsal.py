"""One engine's part of the gate: a rehearsal round its first update, and its report under version 0 (C7).

::

    before the first load       commit of version 0       after
    ────────────────────────    ──────────────────────    ─────────────────────────────────────────────
    load weights that differ    pause                     in flight: the requests end, part before, part after
      in every tensor           load version 0            shared prefix: the same prompts again
    adapters: scored            resume                    sampled: fresh prompts
    sample, to fill caches                                prompts: scored
    send requests, leave them
      in flight

The engine is used through ``ports.Engine`` alone, so that every engine passes the same gate. With ``engine.kv=keep``
the requests in flight begin under weights that differ from version 0 in what lies after the KV cache only: what they
keep is right, and the boundary is exact to the token.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from streamrl.errors import ParityError
from streamrl.parity.probe import ProbeSet
from streamrl.parity.records import IN_FLIGHT, REHEARSED, SAMPLED, SCORED, SHARED, EngineReport, Row, Semantics
from streamrl.parity.weights import Ledger, Perturbed, after_the_cache, alike, digests
from streamrl.ports import Engine, TellsDigests
from streamrl.schema import Config
from streamrl.types import Generation

EVERYTHING, PAST_THE_CACHE = -3, -2
"""Versions of the perturbed weights; no token of theirs is ever trained."""
AHEAD = 4
"""Tokens of the request whose end says that the others are in flight; and of those that fill a cache."""
DRAWS = 2
"""Continuations of each fresh prompt."""
STRONG = 2.0
"""Scale of the perturbation of the one norm that differs while requests are in flight."""
SHARE = 0.8
"""Of ``sync.timeout_s``, for the rehearsal: the publisher's clock runs already, and the load itself comes after it."""

Prompt = Sequence[int]
Decode = Callable[[int], str]
"""The text of one token id."""


class EngineProbe:
    """Drives ``engine`` through the probe. ``rehearse`` at most once, before the first load; then ``report``, once.

    Both raise ``ParityError`` where the engine is too slow, which ends the run, as a fresh process would be no faster:
    ``rehearse`` within the ``sync.timeout_s`` that the publisher allows for the first commit, ``report`` after
    ``liveness.start_timeout_s``.
    """

    def __init__(self, engine: Engine, config: Config, probe: ProbeSet, decode: Decode) -> None:
        self._engine = engine
        self._config = config
        self._probe = probe
        self._decode = decode
        self._semantics = Semantics.of(config.sampling)
        self._in_flight: list[asyncio.Task[Generation]] = []
        self._before: list[Row] = []
        self._rehearsed: list[Row] = []
        self._ledger = Ledger()
        self._notes: list[str] = []

    async def rehearse(self, tensors: Mapping[str, Any], tasks: asyncio.TaskGroup) -> None:
        """Load and use weights that are not ``tensors``; returns with requests, owned by ``tasks``, in flight."""
        timeout_s = SHARE * self._config.sync.timeout_s
        async with self._deadline(timeout_s, "rehearse the first weight update; raise sync.timeout_s"):
            other = Perturbed(tensors)
            initial = await self._digests()
            await self._load(EVERYTHING, other)
            held = await self._digests()
            first = {name: digest for name, digest in held.items() if name in tensors and other.changes(name)}
            if self._config.model.lora.rank:
                self._rehearsed = [msgspec.structs.replace(row, part=REHEARSED) for row in await self._scored()]
            await self._generate(self._probe.sharing, AHEAD)
            overtakes = self._shares_cache(tensors)
            if overtakes and self._engine.facts().kv == "keep":
                other = Perturbed(tensors, after_the_cache(tensors), STRONG)
                await self._load(PAST_THE_CACHE, other)
            self._before = await self._scored()
            if initial:
                sent = [await asyncio.to_thread(digests, each) for each in (other, tensors)]
                same = [name for name in alike(sent[1]) if name in first]
                planned = await asyncio.to_thread(digests, Perturbed({name: tensors[name] for name in same}))
                self._ledger = Ledger(initial, first, sent[0], await self._digests(), sent[1], planned)
            if overtakes:
                await self._leave_in_flight(tasks)

    async def report(self) -> EngineReport:
        """What the engine says under version 0, which serves now."""
        timeout_s = self._config.liveness.start_timeout_s
        async with self._deadline(timeout_s, "answer the parity probe; raise liveness.start_timeout_s"):
            overtaken = await asyncio.gather(*self._in_flight)
            rows = self._rows(IN_FLIGHT, self._probe.overtaken[: len(overtaken)], overtaken)
            rows += self._rows(SHARED, self._probe.sharing, await self._generate(self._probe.sharing))
            prompts = self._probe.prompts * DRAWS
            rows += self._rows(SAMPLED, prompts, await self._generate(prompts))
            rows += [*await self._scored(), *self._rehearsed]
            held = await self._digests()
        if rows and overtaken and not any(version == 0 for each in overtaken for version, _ in each.versions):
            self._notes.append("in flight: not checked, the requests ended before the update")
        return EngineReport(
            facts=self._engine.facts(),
            rows=rows,
            before=[row.logprobs for row in self._before],
            weights=self._ledger.wrong(held),
            notes=self._notes,
            texts={token: self._decode(token) for token in sorted({token for row in rows for token in row.tokens})},
        )

    async def report_scores(self) -> EngineReport:
        """What an engine says that never loads weights: scores alone."""
        timeout_s = self._config.liveness.start_timeout_s
        async with self._deadline(timeout_s, "score the parity probe; raise liveness.start_timeout_s"):
            return EngineReport(facts=self._engine.facts(), rows=await self._scored())

    # Loading ----------------------------------------------------------------------------------------------------------

    async def _load(self, version: int, tensors: Mapping[str, Any]) -> None:
        await self._engine.pause()
        await self._engine.load(version, tensors)
        await self._engine.resume()

    def _shares_cache(self, tensors: Mapping[str, Any]) -> bool:
        """Whether requests in flight can be judged: KV is recomputed, or there are other weights that share it."""
        if self._engine.facts().kv != "keep" or after_the_cache(tensors):
            return True
        self._notes.append("in flight: not checked, no tensor is known to lie after the KV cache")
        return False

    async def _leave_in_flight(self, tasks: asyncio.TaskGroup) -> None:
        """The end of a short request says that the long ones, sent before it, are under way."""
        prompts = self._probe.overtaken[: self._config.engine.slots - 1]
        if not prompts:
            self._notes.append("in flight: not checked, which needs engine.slots=2 or more")
            return
        self._in_flight = [
            tasks.create_task(self._engine.generate(prompt, self._semantics.params(self._probe.in_flight, seed)))
            for seed, prompt in enumerate(prompts)
        ]
        await self._generate(self._probe.overtaken[:1], AHEAD)

    async def _digests(self) -> dict[str, int]:
        return await self._engine.digests() if isinstance(self._engine, TellsDigests) else {}

    # Asking -----------------------------------------------------------------------------------------------------------

    async def _generate(self, prompts: Sequence[Prompt], tokens: int = 0) -> list[Generation]:
        """One continuation of each, all at once, of ``tokens`` or as many as the probe says."""
        seeds = range(len(prompts))
        params = [self._semantics.params(tokens or self._probe.sampled, self._config.seed + seed) for seed in seeds]
        return await asyncio.gather(*map(self._engine.generate, prompts, params))

    async def _scored(self) -> list[Row]:
        """The rows to score, at the run's temperature, or at 1 where the engine can score at no other."""
        temperature = self._semantics.temperature
        try:
            scores = await self._scores(temperature)
        except ValueError:
            if temperature == 1.0:
                raise
            temperature = 1.0
            scores = await self._scores(temperature)
        return [
            Row(SCORED, list(row), 1, own[1:].tolist(), Semantics(temperature))
            for row, own in zip(self._probe.scored, scores, strict=True)
        ]

    async def _scores(self, temperature: float) -> list[np.ndarray]:
        return await asyncio.gather(*(self._engine.score(row, temperature) for row in self._probe.scored))

    def _rows(self, part: str, prompts: Sequence[Prompt], generations: Sequence[Generation]) -> list[Row]:
        return [
            Row(
                part,
                [*prompt, *each.token_ids.tolist()],
                len(prompt),
                each.logprobs.tolist(),
                self._semantics,
                list(each.versions),
            )
            for prompt, each in zip(prompts, generations, strict=True)
        ]

    @contextlib.asynccontextmanager
    async def _deadline(self, timeout_s: float, what: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError:
            raise ParityError(f"the engine took over {timeout_s:g} s to {what}") from None
