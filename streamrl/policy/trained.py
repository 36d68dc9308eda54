"""What is trained and sent: the whole model, or with ``model.lora.rank`` its adapters (``lora.py``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from streamrl.lora import adapted, adapter_parameters
from streamrl.policy.model import load_model
from streamrl.policy.precision import MASTER_DTYPE, compute_dtype
from streamrl.schema import Config


def load_trained(config: Config, folder: Path | str, device: torch.device | str = "cpu") -> Any:
    """The causal LM in ``folder`` as a rank trains it, equal on all ranks: what is trained in float32.

    With adapters the rest is frozen, in ``model.dtype``, as it is served. Raises ``ConfigError`` as ``lora.adapted``.
    """
    if not config.model.lora.rank:
        return load_model(folder, MASTER_DTYPE, device)
    return _adapted(config, load_model(folder, config.model.dtype, device), MASTER_DTYPE)


def load_served(config: Config, folder: Path | str, device: torch.device | str = "cpu") -> Any:
    """The same as the embedded engine holds it: all in ``model.dtype``."""
    model = load_model(folder, config.model.dtype, device)
    return _adapted(config, model, config.model.dtype) if config.model.lora.rank else model


def _adapted(config: Config, model: Any, dtype: str) -> Any:
    return adapted(model, config.model.lora, config.seed, compute_dtype(dtype))


def sent_parameters(model: nn.Module) -> Mapping[str, nn.Parameter]:
    """What engines get of a trained model, by the names under which it travels, in order: adapters alone if any."""
    return adapter_parameters(model) or dict(model.named_parameters())


def as_sent(model: nn.Module, dtype: str) -> Iterator[tuple[str, Tensor]]:
    """Name, shape and ``dtype`` of every parameter as it is sent to engines, without data."""
    for name, parameter in sent_parameters(model).items():
        yield name, torch.empty(parameter.shape, dtype=compute_dtype(dtype), device="meta")


def counts(model: nn.Module) -> dict[str, int]:
    """How many parameters a model has, and how many of them are trained."""
    every = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return {"parameters": sum(size for size, _ in every), "trained": sum(size for size, trained in every if trained)}
