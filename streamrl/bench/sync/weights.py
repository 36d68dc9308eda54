"""State dicts with the tensor sizes of a Qwen3, and how a step of training changes them."""

from __future__ import annotations

import torch
import xxhash

VOCABULARY = 151_936
GB = 1e9

SIZES = {"0.02": (64, 192, 1), "0.5": (1024, 3072, 7), "2": (2048, 6144, 14)}
"""By name, in GB: hidden size, intermediate size and layers; bfloat16, tied embedding. The first: for a quick look."""


def shapes(size: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all parameters; 0.02, 0.53 or 2.03 GB in bfloat16."""
    hidden, intermediate, layers = SIZES[size]
    return _model(VOCABULARY, hidden, intermediate, layers)


def _model(vocabulary: int, hidden: int, intermediate: int, layers: int) -> dict[str, tuple[int, ...]]:
    """16 query and 8 key-value heads of 128."""
    named: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        named |= {
            f"model.layers.{layer}.input_layernorm.weight": (hidden,),
            f"{attention}.q_proj.weight": (2048, hidden),
            f"{attention}.k_proj.weight": (1024, hidden),
            f"{attention}.v_proj.weight": (1024, hidden),
            f"{attention}.o_proj.weight": (hidden, 2048),
            f"{attention}.q_norm.weight": (128,),
            f"{attention}.k_norm.weight": (128,),
            f"model.layers.{layer}.post_attention_layernorm.weight": (hidden,),
            f"{mlp}.gate_proj.weight": (intermediate, hidden),
            f"{mlp}.up_proj.weight": (intermediate, hidden),
            f"{mlp}.down_proj.weight": (hidden, intermediate),
        }
    return named | {"model.norm.weight": (hidden,)}


def build(size: str) -> dict[str, torch.Tensor]:
    """Weights from a normal distribution of deviation 0.02, as models are; in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1 << 20, generator=generator).mul_(0.02).to(torch.bfloat16)
    weights = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes(size).items()}
    for tensor in weights.values():
        flat = tensor.view(-1)
        for start in range(0, flat.numel(), noise.numel()):
            part = flat[start : start + noise.numel()]
            part.copy_(noise[: part.numel()])
    return weights


def empty(size: str) -> dict[str, torch.Tensor]:
    """What an engine holds before its first update; its pages are there."""
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes(size).items()}


def change(weights: dict[str, torch.Tensor], share: float, seed: int, anyhow: bool) -> None:
    """Change about ``share`` of all values, in place; each seed picks others.

    A value becomes the next number above or below, as in training with small steps, or ``anyhow`` any other number.
    """
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(1 << 20, generator=generator) < share
    steps = torch.randint(0, 2, mask.shape, generator=generator, dtype=torch.int16) * 2 - 1
    others = torch.randint(1, 1 << 15, mask.shape, generator=generator, dtype=torch.int16)
    changes = torch.where(mask, others if anyhow else steps, 0)
    for tensor in weights.values():
        flat = tensor.view(-1).view(torch.int16)
        for start in range(0, flat.numel(), changes.numel()):
            part = flat[start : start + changes.numel()]
            if anyhow:
                part ^= changes[: part.numel()]
            else:
                part += changes[: part.numel()]


def digest(weights: dict[str, torch.Tensor]) -> str:
    """Of all bytes, in order of names."""
    whole = xxhash.xxh3_128()
    for name in sorted(weights):
        whole.update(name.encode())
        whole.update(weights[name].view(-1).view(torch.uint8).numpy().data)
    return whole.hexdigest()


def nbytes(weights: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in weights.values())
