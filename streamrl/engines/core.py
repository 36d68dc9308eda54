"""The engine as a plain synchronous loop: admit → prefill → compact → decode → hand out what ended.

``EngineCore`` knows nothing of threads or asyncio; ``embedded.py`` runs it in one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice

import numpy as np
import torch

from streamrl.engines.model_runner import ModelRunner
from streamrl.engines.sampling import sample
from streamrl.engines.slots import Request, SlotTable
from streamrl.errors import WeightSyncError
from streamrl.ports import EngineStatistics
from streamrl.types import Generation

PREFILL_TOKENS = 2048
"""Padded tokens that one step prefills, so that running requests and ``pause`` do not wait for a long queue of prompts.
A longer single prompt gets a step of its own."""
_PREFILL_COST = 0.5
"""What starting a prefill forward pass costs however few its tokens, in decode steps of all slots."""

Finished = list[tuple[Request, Generation]]
Decode = Callable[[list[int]], str]
"""The text of token ids, special tokens included."""


def plan_prefill(prompts: Sequence[np.ndarray], budget: int) -> list[list[int]]:
    """Split prompts, in order, into batches whose padded size (rows × longest) stays within ``budget`` tokens."""
    batches: list[list[int]] = []
    width = 0
    for index, prompt in enumerate(prompts):
        width = max(width, len(prompt))
        if batches and (len(batches[-1]) + 1) * width <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
            width = len(prompt)
    return batches


class EngineCore:
    """Continuous batching over a fixed number of slots. Methods are called between steps, by one thread."""

    def __init__(
        self, runner: ModelRunner, slots: int, max_length: int, *, recompute: bool, decode: Decode | None = None
    ) -> None:
        """``decode`` is needed by requests with stop strings."""
        self.runner = runner
        self._decode_text = decode
        self.version = -1
        self.paused = False
        self._recompute = recompute
        self._table = SlotTable(slots, max_length)
        self._waiting: dict[Request, None] = {}
        self._idle = 0
        """Slot-steps that stayed empty while requests waited, since the last admission."""
        self._generated = self._prefilled = 0
        self._busy_s = 0.0

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would do anything."""
        return not self.paused and bool(self._waiting or self._table.running)

    def statistics(self) -> EngineStatistics:
        """Reads plain numbers: any thread may call it."""
        return EngineStatistics(
            running=self._table.running,
            waiting=len(self._waiting),
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            busy_s=self._busy_s,
            version=self.version,
            kv_used=self._table.used,
        )

    def add(self, request: Request) -> None:
        self._waiting[request] = None

    def cancel(self, request: Request) -> None:
        """Forget ``request``, wherever it is; no-op when it has ended."""
        if request in self._waiting:
            del self._waiting[request]
        elif request.slot >= 0 and self._table.requests[request.slot] is request:
            self._table.release(request.slot)

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def score(self, rows: Sequence[np.ndarray], temperature: float) -> list[np.ndarray]:
        started = time.perf_counter()
        scores = self.runner.score(rows, temperature)
        self._busy_s += time.perf_counter() - started
        return scores

    def load(self, version: int, tensors: Mapping[str, object]) -> None:
        """All or nothing: raises ``WeightSyncError`` before the first copy. Needs ``pause``."""
        if not self.paused:
            raise WeightSyncError(f"load of version {version} while generating: pause the engine first")
        self.runner.verify(tensors)
        self._table.stamp(self.version)
        self.runner.load(tensors)
        self.version = version
        if self._recompute and self._table.running:
            self._refill()

    @torch.inference_mode()
    def step(self) -> Finished:
        """One prefill for newly admitted requests, if any, and one decode of all running ones."""
        started = time.perf_counter()
        finished: Finished = []
        if admitted := self._admit():
            finished += self._prefill(admitted)
        self._compact()
        if self._table.count:
            finished += self._decode()
        self._busy_s += time.perf_counter() - started
        return finished

    def _admit(self) -> list[list[Request]]:
        """Give slots to the requests that start now; each inner list shares one prompt.

        A prefill of one request costs nearly as much as one of eight. So while more wait than fit, free slots stay
        idle until the slot-steps lost that way equal what the prefill costs (the ski-rental rule); the wait is at most
        ``_PREFILL_COST × slots`` steps, and shorter the faster slots become free.
        """
        table = self._table
        ready = min(table.free, len(self._waiting))
        if not ready:
            return []
        self._idle += ready
        if ready < len(self._waiting) and table.running and self._idle < _PREFILL_COST * table.slots:
            return []
        sharing: dict[bytes, list[Request]] = {}
        for request in islice(self._waiting, ready):
            sharing.setdefault(request.prompt.tobytes(), []).append(request)
        sets = list(sharing.values())
        batches = plan_prefill([members[0].prompt for members in sets], PREFILL_TOKENS)
        if len(batches) == 1:
            self._idle = 0
        admitted = [sets[index] for index in batches[0]]
        for request in chain.from_iterable(admitted):
            del self._waiting[request]
            table.place(request)
        return admitted

    def _prefill(self, admitted: list[list[Request]]) -> Finished:
        """Run each distinct prompt once, give every request that shares it a KV row, and sample first tokens."""
        prompts = [members[0].prompt for members in admitted]
        sources = [row for row, members in enumerate(admitted) for _ in members]
        slots = np.array([request.slot for members in admitted for request in members])
        hidden = self.runner.prefill(prompts, sources, slots.tolist())
        self._prefilled += sum(len(prompt) for prompt in prompts)
        return self._extend(slots, self.runner.head(hidden)[sources])

    def _compact(self) -> None:
        if not self._table.holes:
            return
        sources, targets = self._table.compact()
        if sources:
            self.runner.cache.move(sources, targets, int(self._table.length[targets].max()))

    def _decode(self) -> Finished:
        slots = np.arange(self._table.count)
        positions = self._table.length[: len(slots)] - 1
        tokens = self._table.tokens[slots, positions].astype(np.int64)
        return self._extend(slots, self.runner.decode(tokens, positions))

    def _extend(self, slots: np.ndarray, logits: torch.Tensor) -> Finished:
        """Sample one token for each of ``slots`` and take out the requests that end with it."""
        tokens, logprobs = sample(logits, self._table.inputs(slots))
        self._generated += len(slots)
        stopped, full = self._table.append(slots, tokens, logprobs)
        if self._decode_text is not None:
            said = self._table.complete_string(slots, self._decode_text)
            if said:
                stopped, full = np.union1d(stopped, said), np.setdiff1d(full, said)
        finished = [self._table.finish(slot, self.version, "stop") for slot in stopped.tolist()]
        finished += [self._table.finish(slot, self.version, "length") for slot in full.tolist()]
        return finished

    def _refill(self) -> None:
        """Compute the KV of every running sequence anew, the sampled but not yet fed last token left out."""
        self._compact()
        table = self._table
        histories = [table.tokens[slot, : table.length[slot] - 1] for slot in range(table.count)]
        for batch in plan_prefill(histories, PREFILL_TOKENS):
            self.runner.prefill([histories[slot] for slot in batch], range(len(batch)), batch)
        self._prefilled += sum(len(history) for history in histories)
