"""What a slot holds: KV rows (``SlotCache``) and request state (``SlotTable``), and how slots stay compact.

Sequences decode in slots ``0 … count − 1`` so that a decode step reads one contiguous view of the cache. A sequence
that ends leaves a hole; admitted requests fill holes first, and what is left is closed by moving the last rows.
Shapes: ``[slots, …]``; KV ``[slots, kv_heads, capacity, head_dim]`` per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from streamrl.engines.sampling import Penalties, SamplerInputs
from streamrl.types import Generation, SamplingParams, VersionSpans, append_version

_SMALLEST_CAPACITY = 64
_MORE_TOKENS = 4
"""Tokens that are decoded before those that can hold a stop string: a tokenizer may write the first one otherwise."""


@dataclass(eq=False)
class Request:
    """One ``generate`` call on its way through the engine."""

    prompt: np.ndarray
    """int32 ``[P]``."""
    params: SamplingParams
    reply: Any = None
    """Whom to tell; the core hands it back and never looks inside."""
    slot: int = -1
    spans: VersionSpans = field(default_factory=list)
    """Versions of the sampled tokens up to the last weight update."""
    stamped: int = 0
    """Sampled tokens that ``spans`` covers."""

    @cached_property
    def stop_window(self) -> int:
        """So many tokens at the end hold any stop string that they complete; a token has at least one byte."""
        return max(len(text.encode()) for text in self.params.stop_strings) + _MORE_TOKENS


@dataclass(frozen=True)
class PrefillWrite:
    """Row ``sources[i]`` of the forward pass starts slot ``targets[i]`` (int64 ``[m]`` each)."""

    sources: Tensor
    targets: Tensor


@dataclass(frozen=True)
class DecodeWrite:
    """Row i of the forward pass extends slot i at ``positions[i]``, int64 ``[n]``; ``longest`` counts the new token."""

    rows: Tensor
    positions: Tensor
    longest: int


class _SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, ``[slots, kv_heads, capacity, head_dim]``; grown by ``SlotCache.reserve``."""

    is_sliding = False

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self.cache = cache
        self.keys: Tensor
        self.values: Tensor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = self._grown(None, key_states)
        self.values = self._grown(None, value_states)
        self.is_initialized = True

    def _grown(self, old: Tensor | None, like: Tensor) -> Tensor:
        # Zeros, not empty: a masked position still takes part as 0 × value, which a stray NaN would survive.
        shape = (self.cache.slots, like.shape[1], self.cache.capacity, like.shape[3])
        new = torch.zeros(shape, dtype=like.dtype, device=like.device)
        if old is not None:
            new[:, :, : old.shape[2]] = old
        return new

    def grow(self) -> None:
        if self.is_initialized:
            self.keys, self.values = self._grown(self.keys, self.keys), self._grown(self.values, self.values)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new keys and values ``[n, kv_heads, q, head_dim]``; return what the queries may attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        write = self.cache.write
        if isinstance(write, DecodeWrite):
            self.keys[write.rows, :, write.positions] = key_states[:, :, 0]
            self.values[write.rows, :, write.positions] = value_states[:, :, 0]
            count = len(write.rows)
            return self.keys[:count, :, : write.longest], self.values[:count, :, : write.longest]
        width = key_states.shape[2]
        self.keys[write.targets, :, :width] = key_states[write.sources]
        self.values[write.targets, :, :width] = value_states[write.sources]
        return key_states, value_states

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        self.keys[targets, :, :length] = self.keys[sources, :, :length]
        self.values[targets, :, :length] = self.values[sources, :, :length]

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.cache.max_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        raise AssertionError("every forward pass brings its own 4-D attention mask")


class SlotCache(Cache):
    """Preallocated KV of all slots. Set ``write`` before each forward pass: it says where new rows go.

    ``capacity`` (tokens per slot) doubles from 64 up to ``max_length`` as sequences need it.
    """

    def __init__(self, layers: int, slots: int, max_length: int) -> None:
        self.slots, self.max_length = slots, max_length
        self.capacity = min(_SMALLEST_CAPACITY, max_length)
        self.write: PrefillWrite | DecodeWrite
        self.slot_layers = [_SlotLayer(self) for _ in range(layers)]
        super().__init__(layers=list(self.slot_layers))

    @torch.inference_mode()
    def reserve(self, length: int) -> None:
        """Make room for ``length`` tokens per slot."""
        if length <= self.capacity:
            return
        while self.capacity < length:
            self.capacity = min(2 * self.capacity, self.max_length)
        for layer in self.slot_layers:
            layer.grow()

    @torch.inference_mode()
    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first ``length`` positions of slots ``sources`` over slots ``targets`` (disjoint)."""
        device = self.slot_layers[0].keys.device
        source_index, target_index = (torch.tensor(index, device=device) for index in (sources, targets))
        for layer in self.slot_layers:
            layer.move(source_index, target_index, length)


def plan_compaction(count: int, holes: set[int]) -> tuple[list[int], list[int]]:
    """Moves (sources, targets) that bring the live slots among the first ``count`` to the front."""
    live = count - len(holes)
    return [slot for slot in range(live, count) if slot not in holes], sorted(hole for hole in holes if hole < live)


class SlotTable:
    """State of the request in each slot, as arrays ``[slots]`` that a decode step reads whole."""

    def __init__(self, slots: int, max_length: int) -> None:
        self.slots, self.max_length = slots, max_length
        self.count = 0
        """Slots ``0 … count − 1`` are in use, except ``holes``."""
        self.holes: set[int] = set()
        self.requests: list[Request | None] = [None] * slots
        self.length = np.zeros(slots, dtype=np.int64)
        """Tokens so far; the last one is sampled but not fed yet, so its KV is not in the cache."""
        self.prompt_length = np.zeros(slots, dtype=np.int64)
        self.limit = np.zeros(slots, dtype=np.int64)
        self.temperature = np.ones(slots)
        self.top_k = np.zeros(slots, dtype=np.int64)
        self.top_p = np.ones(slots)
        self.min_p = np.zeros(slots)
        self.repetition = np.ones(slots)
        self.presence = np.zeros(slots)
        self.frequency = np.zeros(slots)
        self.penalised = np.zeros(slots, dtype=bool)
        self.greedy = np.zeros(slots, dtype=bool)
        self.seed = np.zeros(slots, dtype=np.uint64)
        self.stop = np.full((slots, 1), -1, dtype=np.int64)
        self.reading = np.zeros(slots, dtype=bool)
        """The request has stop strings."""
        self.tokens = np.zeros((slots, max_length), dtype=np.int32)
        self.logprobs = np.zeros((slots, max_length), dtype=np.float32)

    @property
    def running(self) -> int:
        return self.count - len(self.holes)

    @property
    def used(self) -> float:
        """Share of the slots' positions that hold a token. Any thread may ask."""
        return float(self.length[: self.count].sum()) / (self.slots * self.max_length)

    @property
    def free(self) -> int:
        return self.slots - self.running

    def place(self, request: Request) -> int:
        """Give ``request`` a slot: the lowest hole, else the next one."""
        slot = min(self.holes) if self.holes else self.count
        self.holes.discard(slot)
        self.count = max(self.count, slot + 1)
        params, width = request.params, len(request.prompt)
        request.slot, self.requests[slot] = slot, request
        self.length[slot] = self.prompt_length[slot] = width
        self.limit[slot] = min(width + params.max_tokens, self.max_length)
        greedy = params.temperature == 0
        self.greedy[slot] = greedy
        self.temperature[slot] = 1.0 if greedy else params.temperature
        self.top_k[slot] = 0 if greedy else params.top_k
        self.top_p[slot] = 1.0 if greedy else params.top_p
        self.min_p[slot] = 0.0 if greedy else params.min_p
        penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        self.repetition[slot], self.presence[slot], self.frequency[slot] = penalties
        self.penalised[slot] = penalties != (1, 0, 0)
        self.seed[slot] = params.seed & 0xFFFF_FFFF_FFFF_FFFF
        self._set_stop(slot, params.stop_token_ids)
        self.reading[slot] = bool(params.stop_strings)
        self.tokens[slot, :width] = request.prompt
        return slot

    def _set_stop(self, slot: int, stop: tuple[int, ...]) -> None:
        missing = len(stop) - self.stop.shape[1]
        if missing > 0:
            self.stop = np.pad(self.stop, ((0, 0), (0, missing)), constant_values=-1)
        self.stop[slot] = -1
        self.stop[slot, : len(stop)] = stop

    def inputs(self, slots: np.ndarray) -> SamplerInputs:
        """What the sampler needs to know of ``slots`` int64 ``[n]``."""
        return SamplerInputs(
            temperature=self.temperature[slots],
            top_k=self.top_k[slots],
            top_p=self.top_p[slots],
            min_p=self.min_p[slots],
            greedy=self.greedy[slots],
            seed=self.seed[slots],
            position=self.length[slots] - self.prompt_length[slots],
            penalties=self._penalties(slots) if self.penalised[slots].any() else None,
        )

    def _penalties(self, slots: np.ndarray) -> Penalties:
        """Of those of ``slots`` that have some. Counts are made from the tokens at hand: nothing to move or undo."""
        rows = np.flatnonzero(self.penalised[slots])
        chosen = slots[rows]
        return Penalties(
            rows=rows,
            repetition=self.repetition[chosen],
            presence=self.presence[chosen],
            frequency=self.frequency[chosen],
            tokens=self.tokens[chosen, : self.length[chosen].max()].astype(np.int64),
            prompt_length=self.prompt_length[chosen],
            length=self.length[chosen],
        )

    def append(self, slots: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Record one token for each of ``slots`` int64 ``[n]``; the slots that end by stop token, and by length."""
        position = self.length[slots]
        self.tokens[slots, position] = tokens
        self.logprobs[slots, position] = logprobs
        self.length[slots] = position + 1
        stopped = (self.stop[slots] == tokens[:, None]).any(axis=1)
        full = (position + 1 >= self.limit[slots]) & ~stopped
        return slots[stopped], slots[full]

    def complete_string(self, slots: np.ndarray, decode: Callable[[list[int]], str]) -> list[int]:
        """Those of ``slots`` whose last token completed a stop string of their request."""
        return [slot for slot in slots[self.reading[slots]].tolist() if self._completes_string(slot, decode)]

    def _completes_string(self, slot: int, decode: Callable[[list[int]], str]) -> bool:
        request = self.requests[slot]
        assert request is not None
        end = int(self.length[slot])
        start = max(int(self.prompt_length[slot]), end - request.stop_window)
        text = decode(self.tokens[slot, start:end].tolist())
        return any(stop in text for stop in request.params.stop_strings)

    def stamp(self, version: int) -> None:
        """Close the version span of every running request: tokens so far are of ``version``."""
        for request in self.requests[: self.count]:
            if request is not None:
                self._stamp(request, version)

    def _stamp(self, request: Request, version: int) -> None:
        sampled = int(self.length[request.slot] - self.prompt_length[request.slot])
        append_version(request.spans, version, sampled - request.stamped)
        request.stamped = sampled

    def finish(self, slot: int, version: int, reason: str) -> tuple[Request, Generation]:
        """Take the request out of ``slot`` with its answer."""
        request = self.requests[slot]
        assert request is not None
        self._stamp(request, version)
        sampled = slice(int(self.prompt_length[slot]), int(self.length[slot]))
        tokens, logprobs = self.tokens[slot, sampled].copy(), self.logprobs[slot, sampled].copy()
        self.release(slot)
        return request, Generation(tokens, logprobs, request.spans, reason)

    def release(self, slot: int) -> None:
        """Leave a hole."""
        self.requests[slot] = None
        self.length[slot] = 0
        self.holes.add(slot)

    def compact(self) -> tuple[list[int], list[int]]:
        """Close the holes; returns the moves (sources, targets) that the KV rows must follow."""
        sources, targets = plan_compaction(self.count, self.holes)
        self.count -= len(self.holes)
        self.holes.clear()
        if sources:
            columns: tuple[np.ndarray, ...] = (self.length, self.prompt_length, self.limit, self.temperature)
            columns += (self.top_k, self.top_p, self.min_p, self.repetition, self.presence, self.frequency)
            columns += (self.penalised, self.greedy, self.seed, self.stop, self.reading)
            for column in columns:
                column[targets] = column[sources]
            width = int(self.length[targets].max())
            self.tokens[targets, :width] = self.tokens[sources, :width]
            self.logprobs[targets, :width] = self.logprobs[sources, :width]
        for source, target in zip(sources, targets, strict=True):
            request = self.requests[source]
            assert request is not None
            request.slot, self.requests[target], self.requests[source] = target, request, None
        return sources, targets
