"""What flows round the ring: prompts become trajectories, trajectories groups, groups training batches.

Shapes: ``[T]`` tokens of one trajectory, ``[G]`` trajectories of one group. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

VersionSpans = list[tuple[int, int]]
"""Run-length encoded policy versions of *sampled* tokens in order: ``[(version, count), …]``.

``[(4, 3), (5, 2)]`` says: three tokens sampled by version 4, then two by version 5.
"""


def expand_versions(spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Versions per sampled token, int64 ``[sum of counts]``: ``[(4, 3), (5, 1)]`` → ``[4, 4, 4, 5]``."""
    if not spans:
        return np.zeros(0, dtype=np.int64)
    versions, counts = zip(*spans, strict=True)
    return np.repeat(np.asarray(versions, dtype=np.int64), np.asarray(counts, dtype=np.int64))


def append_version(spans: VersionSpans, version: int, count: int = 1) -> None:
    """Extend ``spans`` in place by ``count`` tokens of ``version``."""
    if count <= 0:
        return
    if spans and spans[-1][0] == version:
        spans[-1] = (version, spans[-1][1] + count)
    else:
        spans.append((version, count))


@dataclass(frozen=True)
class SamplingParams:
    """How one request samples. ``temperature=0`` is greedy.

    Order, as in vLLM: penalties on the logits, then temperature, min-p, top-k, top-p. ``top_k=0``, ``top_p=1.0`` and
    ``min_p=0.0`` switch truncation off. The repetition penalty counts prompt and sampled tokens, presence and frequency
    penalties sampled ones only.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    """End the continuation with the token that completes one of them; that token belongs to it."""
    seed: int = 0


@dataclass
class Generation:
    """One sampled continuation, as an engine returns it."""

    token_ids: np.ndarray
    """int32 ``[N]``, the sampled tokens, the stop token included."""
    logprobs: np.ndarray
    """float32 ``[N]``, processed log-probs (after temperature, top-k, top-p; renormalised) of those tokens."""
    versions: VersionSpans
    """Policy version of each sampled token, run-length encoded; counts sum to N."""
    finish_reason: str
    """``stop`` (a stop token or string was sampled) or ``length`` (``max_tokens`` or the context was reached)."""


@dataclass
class Trajectory:
    """One sampled episode of one prompt, or a branch of one.

    Example, prompt ``12+3=`` answered with ``15`` and the end token::

        tokens    [1 2 + 3 =  1 5 $]       int32   [T]
        sampled   [0 0 0 0 0  1 1 1]       bool    [T]   True where the policy chose the token
        behaviour [0 0 0 0 0 -.1 -.3 -.0]  float32 [T]   processed log-prob by the sampler; 0 elsewhere
        versions  [(7, 2), (8, 1)]                       over the sampled tokens only
    """

    tokens: np.ndarray
    sampled: np.ndarray
    behaviour: np.ndarray
    versions: VersionSpans
    reward: float = math.nan
    turns: int = 1
    truncated: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers that the environment wants to see averaged, by name."""
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    """Further arrays by name, of any shape and dtype: expert indices of a router, image features. They travel and are
    kept with the trajectory; a consumer gets those that it asks for."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Nested strings, numbers and lists that go with the trajectory."""
    episode: int = -1
    """Which episode of its group it belongs to, counted from 0; −1 in all trajectories of a group: each is one of its
    own. An episode that branched, or whose history was rewritten, has several trajectories; those with the same reward
    count once in a baseline."""
    turn_rewards: list[float] = field(default_factory=list)
    """What each turn was given beside the reward of the whole, in order; ``reward`` has them in it. A turn is a run of
    sampled tokens. Empty: no turn was given any."""

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def sampled_count(self) -> int:
        return int(np.count_nonzero(self.sampled))

    @property
    def prompt_length(self) -> int:
        """Tokens before the first sampled one."""
        return int(np.argmax(self.sampled)) if self.sampled.any() else len(self.tokens)

    @property
    def oldest_version(self) -> int:
        return min(version for version, _ in self.versions)

    @property
    def nbytes(self) -> int:
        own = self.tokens.nbytes + self.sampled.nbytes + self.behaviour.nbytes
        return own + sum(array.nbytes for array in self.columns.values())


@dataclass
class Group:
    """The trajectories of one prompt under one lease; what a rollouter delivers."""

    lease: int
    prompt: int
    """Index of the prompt in the environment's task sequence."""
    env: str
    trajectories: list[Trajectory]

    @property
    def rewards(self) -> np.ndarray:
        """float64 ``[G]``."""
        return np.asarray([trajectory.reward for trajectory in self.trajectories], dtype=np.float64)

    @property
    def oldest_version(self) -> int:
        return min(trajectory.oldest_version for trajectory in self.trajectories)

    @property
    def nbytes(self) -> int:
        return sum(trajectory.nbytes for trajectory in self.trajectories)


@dataclass(frozen=True)
class Lease:
    """Permission to generate one group, with a deadline (C2)."""

    id: int
    prompt: int
    group_size: int
    attempt: int
    """0 for the first lease of a prompt, +1 each time the prompt is re-issued."""
    deadline_s: float
    """Seconds that the holder has, from the moment it was granted."""
    nbytes: int = 0
    """Bytes that the group's payload may take; the buffer keeps room for them (C4)."""


@dataclass
class TrainGroup:
    """A group (or the part of it that one micro-batch holds) as the trainer consumes it.

    ``advantages`` and ``token_weights`` are per trajectory, ``[G]``. The loss of a micro-batch is the sum over its
    trainable tokens of ``token_weight × per-token loss``, where the weight already holds the *global* denominator, so
    that the sum over all ranks and micro-batches is the loss of the batch (C8).
    """

    lease: int
    env: str
    trajectories: list[Trajectory]
    advantages: np.ndarray
    token_weights: np.ndarray


@dataclass
class RankBatch:
    """What one trainer rank trains on in one optimizer step. Every rank gets the same number of micro-batches."""

    step: int
    version: int
    """Trainer's policy version while it consumes this batch."""
    oldest_allowed: int
    """Tokens sampled by an older version have loss weight zero (``on_stale: mask``); ``version − max_lag``."""
    micro_batches: list[list[TrainGroup]]
    stats: dict[str, float]
    """Batch-wide numbers for the metrics (rewards, lengths, ledger, …), equal on all ranks."""


Metadata = dict[str, Any]
