"""What the tests of packing, learner and ranks share: a tiny model, hand-made trajectories, an unpacked reference."""

from __future__ import annotations

import math

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from streamrl.schema import Config
from streamrl.types import RankBatch, TrainGroup, Trajectory

torch.set_num_threads(1)
VOCAB = 16


def tiny_model(tied: bool = True, seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    return Qwen3ForCausalLM(config)


def trajectory(prompt: str, answer: str, versions=None, observation: str = "", second: str = "") -> Trajectory:
    """Tokens are letters; sampled are ``answer`` and ``second``, with an observation between them."""
    text = prompt + answer + observation + second
    tokens = np.array([ord(letter) - ord("a") for letter in text], dtype=np.int32)
    sampled = np.zeros(len(text), dtype=bool)
    sampled[len(prompt) : len(prompt) + len(answer)] = True
    sampled[len(text) - len(second) :] = bool(second)
    behaviour = np.where(sampled, -1.0 - 0.1 * (tokens % 7) - 0.01 * np.arange(len(text)), 0.0).astype(np.float32)
    count = len(answer) + len(second)
    return Trajectory(tokens, sampled, behaviour, versions or [(5, count)], reward=1.0)


def group(*trajectories: Trajectory, advantages=None, weight: float = 0.05, lease: int = 0) -> TrainGroup:
    size = len(trajectories)
    advantages = np.linspace(-1.0, 1.5, size) if advantages is None else np.asarray(advantages, dtype=np.float64)
    return TrainGroup(lease, "letters", list(trajectories), advantages, np.full(size, weight))


def varied_groups() -> list[TrainGroup]:
    """Shared beginnings, twins, an answer that begins another, two turns, several versions, a lone trajectory."""
    return [
        group(trajectory("abc", "de"), trajectory("abc", "dfg"), trajectory("abc", "de"), trajectory("abc", "hijkl")),
        group(trajectory("bc", "d"), trajectory("bc", "de"), trajectory("bc", "def")),
        group(
            trajectory("aab", "cd", observation="ee", second="fg", versions=[(4, 3), (5, 1)]),
            trajectory("aab", "cd", observation="eh", second="f", versions=[(5, 3)]),
            trajectory("aab", "c", observation="d", second="ee", versions=[(4, 2), (5, 1)]),
        ),
        group(trajectory("ponm", "lkjih"), advantages=[0.7]),
        group(trajectory("ha", "ab"), trajectory("ha", "ba"), trajectory("ha", "bb"), advantages=[0.0, 1.0, -1.0]),
        group(trajectory("dcba", "e"), trajectory("dcba", "f", versions=[(3, 1)])),
    ]


def batch(*micro_batches: list[TrainGroup], version: int = 5, oldest_allowed: int = 3, step: int = 1) -> RankBatch:
    return RankBatch(step, version, oldest_allowed, list(micro_batches), {})


def settings(**trainer) -> Config:
    config = Config(steps=10)
    config.trainer.lr = 1e-2
    config.trainer.max_grad_norm = 1e9
    for name, value in trainer.items():
        setattr(config.trainer, name, value)
    return config


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """‖found − expected‖ / ‖expected‖ over all entries of all tensors, in float64."""
    assert list(found) == list(expected)
    with torch.no_grad():
        gap = sum(float((found[name].double() - tensor.double()).square().sum()) for name, tensor in expected.items())
        whole = sum(float(tensor.double().square().sum()) for tensor in expected.values())
    return math.sqrt(gap / whole)


def reference_logprobs(model, one: Trajectory, temperature: float = 1.0) -> torch.Tensor:
    """``[T − 1]``: one trajectory alone, through the model's own head and a float64 log_softmax."""
    tokens = torch.tensor(one.tokens, dtype=torch.int64)
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].double() / temperature
    return torch.log_softmax(logits, dim=-1).gather(1, tokens[1:, None]).squeeze(1)


def reference_step(model, config, groups, oldest_allowed=3):
    """Truncated importance sampling on one trajectory at a time, then torch's plain AdamW."""
    loss = torch.zeros((), dtype=torch.float64)
    for each in groups:
        for one, advantage, weight in zip(each.trajectories, each.advantages, each.token_weights, strict=True):
            versions = np.repeat(*np.array(one.versions).reshape(-1, 2).T)
            trained = np.flatnonzero(one.sampled)[versions >= oldest_allowed]
            if not len(trained):
                continue
            current = reference_logprobs(model, one)[trained - 1]
            ratio = (current.detach() - torch.tensor(one.behaviour[trained]).double()).exp().clamp(max=5.0)
            loss = loss - (weight * ratio * advantage * current).sum()
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.trainer.max_grad_norm)
    t = config.trainer
    torch.optim.AdamW(
        model.parameters(), lr=t.lr, betas=(t.beta1, t.beta2), eps=t.eps, weight_decay=t.weight_decay
    ).step()
    return float(loss.detach()), norm
