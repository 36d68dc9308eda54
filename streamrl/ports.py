"""The seams of the ring: protocols that actors are written against. Implementations know nothing of actors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from streamrl.types import Generation, SamplingParams


@dataclass(frozen=True)
class EngineStatistics:
    """Counters of one engine since its start."""

    running: int
    """Sequences in a slot."""
    waiting: int
    """Requests that wait for a slot."""
    generated_tokens: int
    prefilled_tokens: int
    busy_s: float
    """Seconds spent in forward passes and sampling."""
    version: int
    kv_used: float = 0.0
    """Share of the KV cache that is taken, in [0, 1]."""
    preemptions: int = 0
    """Requests that lost their KV cache to others and were computed again."""


@dataclass(frozen=True)
class EngineFacts:
    """How an engine really runs, as it was found and not as it was asked: what the parity gate judges (C7)."""

    engine: str
    """Name and version: ``vllm 0.32.0``."""
    dtype: str
    """Of the weights of the body."""
    head_dtype: str
    """Of the logits as the head's product came out, before any upcast."""
    tied: bool
    """Whether head and embedding are one parameter."""
    logprobs: str
    """``processed`` (after penalties, temperature and truncation, renormalised) or what else is returned."""
    prefix_caching: bool = False
    async_scheduling: bool = False
    cascade_attention: bool = False
    chunked_prefill: bool = False
    kv: str = "keep"


class Sampler(Protocol):
    """What episodes need of an engine. All methods are called on the event loop."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Sample one continuation. Survives weight updates; cancelling the call frees its slot."""
        ...


class Engine(Sampler, Protocol):
    """An inference engine that this process holds, and gives weights to."""

    @property
    def version(self) -> int:
        """Policy version of the weights that serve now; -1 before the first commit."""
        ...

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        """Log-probs float32 ``[T]`` of each token given those before it under the serving weights; first is 0."""
        ...

    async def pause(self) -> None:
        """Stop between two decode steps and keep every request (C6). Idempotent."""
        ...

    async def resume(self) -> None:
        """Go on after ``pause``."""
        ...

    async def load(self, version: int, tensors: Mapping[str, object]) -> None:
        """Take ``tensors`` (torch tensors by parameter name) into service while paused; verify all names and shapes.

        They stay valid and unchanged until the next ``load`` has returned, so that an engine may serve from them where
        they lie; it never writes to them. All or nothing: raises ``WeightSyncError`` before the first copy when a name,
        shape or dtype does not fit. Applies the KV policy (``keep`` or ``recompute``) to the requests in flight.
        """
        ...

    def statistics(self) -> EngineStatistics: ...

    def facts(self) -> EngineFacts: ...

    async def close(self) -> None:
        """Free the model; requests in flight end with ``asyncio.CancelledError``."""
        ...


@runtime_checkable
class TellsDigests(Protocol):
    """An engine that holds its weights under the names of ``Engine.load``, and can tell which they are."""

    async def digests(self) -> dict[str, int]:
        """``parity.weights.digest`` of every parameter as it is held now, by name."""
        ...


@runtime_checkable
class StagesWeights(Protocol):
    """An engine that can take weights to where it computes while it still generates with others."""

    async def stage(self, version: int, tensors: Mapping[str, object]) -> None:
        """Do ahead of time what ``load`` of the same version would have to do for every byte of ``tensors``.

        The weights that serve, and whatever else is loaded in between, are untouched; what was staged before is gone,
        also when this fails. Tensors and errors are those of ``load``. A cancellation takes effect once nobody reads
        the tensors any more.
        """
        ...

    def unstage(self) -> None:
        """Forget what is staged, so that a version of the same number is not taken for it. Idempotent."""
        ...
