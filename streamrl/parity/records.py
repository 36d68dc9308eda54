"""What travels for the gate: an engine's report, the gate's question, the trainer's answer. Plain msgspec structs."""

from __future__ import annotations

import msgspec

from streamrl.ports import EngineFacts
from streamrl.schema import SamplingConfig
from streamrl.types import SamplingParams

SCORED, SAMPLED, SHARED, IN_FLIGHT = "prompts", "sampled", "shared prefix", "in flight"
"""Parts of the probe: rows that were scored; sampled from fresh prompts; sampled after a prefix that was cached under
other weights; sampled by requests that an update overtook."""
REHEARSED = "adapters"
"""The rows that were scored, under the first weights of the rehearsal: with adapters alone, as those of version 0 add
nothing, so that it says nothing of them."""


class Semantics(msgspec.Struct, frozen=True):
    """How a distribution follows from logits: temperature, then min-p, top-k, top-p, renormalised."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def of(cls, sampling: SamplingConfig) -> Semantics:
        return cls(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)

    @property
    def truncated(self) -> bool:
        return self.top_k != 0 or self.top_p != 1.0 or self.min_p != 0.0

    def at(self, temperature: float) -> Semantics:
        return msgspec.structs.replace(self, temperature=temperature)

    def whole(self) -> Semantics:
        """The same without truncation."""
        return Semantics(self.temperature)

    def params(self, max_tokens: int, seed: int) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p,
            max_tokens=max_tokens, seed=seed,
        )  # fmt: skip

    def truncation(self) -> str:
        """``top_k=20 top_p=0.9``; empty where nothing is truncated."""
        parts = {"top_k": (self.top_k, 0), "top_p": (self.top_p, 1.0), "min_p": (self.min_p, 0.0)}
        return " ".join(f"{name}={value:g}" for name, (value, off) in parts.items() if value != off)


class Row(msgspec.Struct):
    """One sequence, and the log-probs that an engine gives to its tokens from ``start`` on."""

    part: str
    tokens: list[int]
    start: int
    logprobs: list[float]
    """``[len(tokens) − start]``"""
    semantics: Semantics
    """What the engine was asked for."""
    versions: list[tuple[int, int]] = []
    """Labels of the tokens from ``start`` on, run-length encoded; none for rows that were scored."""

    @property
    def labelled(self) -> bool:
        """Whether its tokens were sampled, under versions."""
        return self.part not in (SCORED, REHEARSED)


class EngineReport(msgspec.Struct):
    """What one engine says of the probe under version 0."""

    facts: EngineFacts
    rows: list[Row]
    before: list[list[float]] = []
    """Its log-probs of the scored rows, in their order, under the weights of before the update."""
    weights: str = ""
    """What its digests say is wrong with the weights that it holds; empty where nothing is."""
    notes: list[str] = []
    """What could not be checked here, and why."""
    texts: dict[int, str] = {}
    """Text of each token id of the rows, for people."""


class Asked(msgspec.Struct):
    """One row for the trainer to score."""

    tokens: list[int]
    semantics: Semantics
    rehearsed: bool = False
    """Under the weights of the rehearsal (``weights.Perturbed``) in place of version 0."""


class TrainerFacts(msgspec.Struct):
    """How the trainer really computes, as it was found."""

    dtype: str
    """Of the matrix products of the body."""
    head_dtype: str
    """Of the logits as they came out of the head's product."""
    tied: bool


class TrainerReport(msgspec.Struct):
    rows: list[list[float]]
    """Log-probs of every token of each asked row, the first 0."""
    facts: TrainerFacts
