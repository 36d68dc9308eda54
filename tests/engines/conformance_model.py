"""The model that every engine is tried on, and what its log-probs ought to be, computed without any engine.

A two-layer Qwen3, with or without experts, over the character tokenizer; its weights are so large that distributions
are far from flat. The reference runs the transformers model and processes its logits token by token in float64; it
shares no code with the engines. Shapes: ``[T]`` tokens of one sequence, ``[N]`` sampled ones, ``[V]`` vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import (
    DynamicCache,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from streamrl.policy.tokenizer import character_tokenizer
from streamrl.types import SamplingParams

MAX_LENGTH = 256
"""Tokens of a sequence, prompt included; an engine under test is built with it."""

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Expected:
    """What the reference says of the sampled tokens of one answer."""

    logprobs: np.ndarray
    """float64 ``[N]``; −inf where the token is not in the kept set."""
    distance: np.ndarray
    """float64 ``[N]``: by how much logits would have to move before the kept set changed; inf without truncation."""


@dataclass(frozen=True)
class ConformanceModel:
    """A model folder, weight sets by name, and the reference over them.

    ``A`` and ``B`` differ in every tensor. ``late`` differs from ``A`` only after the last layer (final norm, and the
    head where it is untied), so that keys and values of both are the same.
    """

    folder: Path
    """config.json, tokenizer and safetensors of weights that are none of the sets."""
    tied: bool
    dtype: torch.dtype
    head_dtype: torch.dtype
    weights: Mapping[str, Weights]
    """Tensors in ``dtype`` by parameter name, tied ones once."""
    bodies: Mapping[str, PreTrainedModel]

    @property
    def vocabulary(self) -> int:
        return int(self.bodies["A"].config.vocab_size)

    def head(self, which: str, hidden: torch.Tensor) -> np.ndarray:
        """Logits float64 ``[T, V]`` of hidden states ``[T, hidden]`` as the head of ``head_dtype`` gives them."""
        weight = self.bodies[which].get_output_embeddings().weight
        if self.head_dtype == torch.float32:
            return (hidden.double() @ weight.double().T).numpy()
        return (hidden.to(self.head_dtype) @ weight.to(self.head_dtype).T).double().numpy()

    @torch.no_grad()
    def logits(self, which: str, tokens: Sequence[int]) -> np.ndarray:
        """float64 ``[T, V]``: row ``t`` is what follows ``tokens[: t + 1]`` under the weights ``which``."""
        body = self.bodies[which].base_model
        return self.head(which, body(input_ids=torch.tensor([list(tokens)]), use_cache=False).last_hidden_state[0])

    @torch.no_grad()
    def logits_over_stale_cache(self, prompt: Sequence[int], said: Sequence[int], spans: Spans) -> np.ndarray:
        """float64 ``[N, V]`` of an answer whose keys and values stayed across weight updates.

        The last token sampled before an update has not been fed yet, so the new weights compute its keys and values.
        """
        fed, cache, rows = [*prompt, *said], DynamicCache(), []
        start, end = 0, len(prompt) - 1
        for which, count in spans:
            end += count
            tokens = torch.tensor([fed[start:end]])
            hidden = self.bodies[which].base_model(input_ids=tokens, past_key_values=cache, use_cache=True)
            rows.append(self.head(which, hidden.last_hidden_state[0, -count:]))
            start = end
        return np.concatenate(rows)

    def score(self, which: str, tokens: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        """float64 ``[T]``: log-prob of each token after those before it; the first is 0."""
        rows = log_softmax(self.logits(which, tokens)[:-1] / temperature)
        return np.concatenate([[0.0], rows[np.arange(len(tokens) - 1), list(tokens[1:])]])

    def expected(
        self, prompt: Sequence[int], said: Sequence[int], spans: Spans, params: SamplingParams, kv: str
    ) -> Expected:
        """What the tokens ``said`` after ``prompt`` ought to have been given, under weights by name and count.

        ``kv`` says where keys and values of a span come from: ``keep`` (computed when the token was fed, by the weights
        of that time) or ``recompute`` (all by the weights of the span).
        """
        if kv == "keep":
            logits = self.logits_over_stale_cache(prompt, said, spans)
        else:
            whole = {which: self.logits(which, [*prompt, *said])[len(prompt) - 1 : -1] for which, _ in spans}
            labels = [which for which, count in spans for _ in range(count)]
            logits = np.stack([whole[which][index] for index, which in enumerate(labels)])
        found, distances = [], []
        for index, (row, token) in enumerate(zip(logits, said, strict=True)):
            logprobs, distance = distribution(row, prompt, said[:index], params)
            found.append(logprobs[token])
            distances.append(distance)
        return Expected(np.array(found), np.array(distances))


Spans = Sequence[tuple[str, int]]
"""Weight sets by name and how many sampled tokens each produced, in order."""


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64 over the last axis; −inf stays −inf."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def distribution(
    logits: np.ndarray, prompt: Sequence[int], said: Sequence[int], params: SamplingParams
) -> tuple[np.ndarray, float]:
    """Processed log-probs float64 ``[V]`` (−inf: removed), and how far the kept set is from changing, in logits.

    Order: repetition, frequency and presence penalty, temperature, min-p, top-k, top-p. Greedy: nothing after the
    penalties, so the log-prob is that of temperature 1.
    """
    row = np.array(logits, dtype=np.float64)
    repetition = params.repetition_penalty
    for token in {*prompt, *said}:
        row[token] *= 1 / repetition if row[token] > 0 else repetition
    for token in said:
        row[token] -= params.frequency_penalty
    for token in set(said):
        row[token] -= params.presence_penalty
    if params.temperature == 0:
        return log_softmax(row), math.inf
    row /= params.temperature
    distance = math.inf
    if params.min_p > 0:
        bound = row.max() + math.log(params.min_p)
        distance = min(distance, float(np.abs(row - bound).min()))
        row[row < bound] = -np.inf
    order = np.argsort(-row)
    if 0 < params.top_k < np.isfinite(row).sum():
        distance = min(distance, float(row[order[params.top_k - 1]] - row[order[params.top_k]]))
        row[order[params.top_k :]] = -np.inf
    if params.top_p < 1:
        probabilities = np.exp(log_softmax(row))[order]
        mass_before = probabilities.cumsum() - probabilities
        removed = mass_before >= params.top_p
        # Moving all logits by x changes a sum of probabilities by at most x / 4 either way.
        distance = min(distance, 4 * float(np.abs(mass_before - params.top_p).min()))
        if removed.any() and np.isfinite(row[order[removed]]).any():
            distance = min(distance, float(row[order[~removed]].min() - row[order[removed]].max()))
        row[order[removed]] = -np.inf
    return log_softmax(row), distance


def build_model(
    folder: Path,
    *,
    tied: bool = True,
    dtype: str = "float32",
    head_dtype: str = "float32",
    hidden: int = 64,
    experts: int = 0,
) -> ConformanceModel:
    """Write the model to ``folder`` and draw the weight sets. ``dtype`` is that of the body and of the tensors sent.

    With ``experts`` it is a mixture of so many, two of them for each token.
    """
    tokenizer = character_tokenizer()
    mixture = {
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    }
    kind, model_class = (Qwen3MoeConfig, Qwen3MoeForCausalLM) if experts else (Qwen3Config, Qwen3ForCausalLM)
    config = kind(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=dtype,
        **(mixture if experts else {}),
    )
    torch_dtype: torch.dtype = getattr(torch, dtype)
    model = model_class(config).to(torch_dtype).eval()  # type: ignore[arg-type]
    model.load_state_dict(_draw(model, seed=99), strict=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = {"A": _draw(model, seed=1), "B": _draw(model, seed=2)}
    weights["late"] = dict(weights["A"])
    signs = torch.rand(hidden, generator=torch.Generator().manual_seed(3)).sub(0.5).sign()
    weights["late"]["model.norm.weight"] = weights["A"]["model.norm.weight"] * signs.to(torch_dtype)
    if not tied:
        weights["late"]["lm_head.weight"] = weights["B"]["lm_head.weight"]
    bodies = {}
    for name, tensors in weights.items():
        bodies[name] = copy.deepcopy(model)
        bodies[name].load_state_dict(tensors, strict=False)
        bodies[name].tie_weights()
    return ConformanceModel(folder, tied, torch_dtype, getattr(torch, head_dtype), weights, bodies)


def _draw(model: PreTrainedModel, seed: int) -> Weights:
    """Every parameter at random: norms 0.5 … 1.5, matrices so that logits have a standard deviation of about 2."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            drawn = torch.rand(parameter.shape, generator=generator) + 0.5
        else:
            drawn = torch.randn(parameter.shape, generator=generator) * 2 / math.sqrt(parameter.shape[-1])
        weights[name] = drawn.to(parameter.dtype)
    return weights
