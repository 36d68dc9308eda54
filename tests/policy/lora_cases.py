"""What the tests of adapters share: settings, adapted tiny models, and the same models with the adapters merged."""

from __future__ import annotations

from typing import Any

import torch
from learner_cases import settings, tiny_model
from torch import nn

from streamrl.lora import PREFIX, adapted, adapter_parameters
from streamrl.lora_schema import LoraConfig
from streamrl.schema import Config

RANK, ALPHA = 4, 6.0
SCALE = ALPHA / RANK


def lora_settings(targets: list[str] | None = None, **trainer: Any) -> Config:
    config = settings(**trainer)
    config.model.lora = LoraConfig(RANK, ALPHA, targets or [])
    return config


def adapted_model(config: Config, tied: bool = True, trained: bool = True) -> nn.Module:
    """The tiny model with adapters; ``trained``: none of their ``B`` is 0 any more."""
    model = adapted(tiny_model(tied), config.model.lora, config.seed, torch.float32)
    if trained:
        generator = torch.Generator().manual_seed(7)
        for name, parameter in adapter_parameters(model).items():
            if name.endswith("lora_B.weight"):
                parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def merged_model(model: nn.Module, tied: bool = True, scale: float = SCALE) -> nn.Module:
    """The tiny model without adapters, each adapted weight ``W + alpha/rank · B·A``."""
    merged = tiny_model(tied)
    adapters = adapter_parameters(model)
    with torch.no_grad():
        for name, parameter in merged.named_parameters():
            path = PREFIX + name.removesuffix(".weight")
            if f"{path}.lora_A.weight" in adapters:
                parameter += scale * adapters[f"{path}.lora_B.weight"] @ adapters[f"{path}.lora_A.weight"]
    return merged
