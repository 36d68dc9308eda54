"""What vLLM must know of the run's LoRA adapter before it starts and before it serves. Needs no vLLM."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from streamrl.engines.blueprint import Blueprint
from streamrl.errors import ConfigError
from streamrl.lora import adapter_shapes
from streamrl.schema import Config
from streamrl.sync.names import same_names

ADAPTER, ADAPTER_PATH = "streamrl-adapter", "streamrl:adapter"
"""Of the run's LoRA adapter: what requests name it, and the place of no folder (``adapters.py``)."""
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""That vLLM has room for an adapter of; a smaller one is padded with zeros."""


def arriving_weights(config: Config, folder: str, blueprint: Blueprint) -> Blueprint:
    """What every update consists of: the model that ``blueprint`` is of, or with LoRA its adapter alone."""
    lora = config.model.lora
    if not lora.rank:
        return blueprint
    shapes = {name: each.shape for name, each in adapter_shapes(folder, lora, config.model.dtype).items()}
    return dataclasses.replace(blueprint, shapes=shapes, names=same_names(shapes), constants={})


def lora_arguments(config: Config, folder: str) -> dict[str, Any]:
    """Of an engine whose base stays as it is in ``folder``, with room for one adapter; empty without LoRA."""
    lora = config.model.lora
    if not lora.rank:
        return {}
    return {
        "enable_lora": True,
        "max_lora_rank": room_for(lora.rank),
        "max_loras": 1,
        "lora_dtype": "auto",  # that of the model
        "lora_target_modules": adapted_layers(adapter_shapes(folder, lora, config.model.dtype)),
    }


def room_for(rank: int) -> int:
    """The smallest rank that vLLM can make room for and that ``rank`` fits in."""
    if rank > _RANKS[-1]:
        raise ConfigError(f"model.lora.rank={rank} with engine.name=vllm: it takes ranks up to {_RANKS[-1]}")
    return next(room for room in _RANKS if room >= rank)


def adapted_layers(names: Iterable[str]) -> list[str]:
    """How the paths of the layers of these adapters end. vLLM makes room in such layers only: head and embedding stay
    as they are."""
    return sorted({name.split(".")[-3] for name in names})


def holding_arguments(config: Config, adapter: Blueprint) -> dict[str, Any]:
    """Of the workers' ``streamrl_hold_adapter``."""
    shapes = {name: list(shape) for name, shape in adapter.shapes.items()}
    return {"shapes": shapes, "rank": config.model.lora.rank, "alpha": config.model.lora.alpha}


def check_placed(unplaced: Sequence[Sequence[str]]) -> None:
    """``ConfigError`` for adapted layers that no worker has a place for; ``unplaced``: what each of them lacks."""
    if lost := set(unplaced[0]).intersection(*unplaced[1:]):
        raise ConfigError(
            f"engine.name=vllm: it has no place for adapters in {sorted(lost)[:3]} ({len(lost)} layers); name other "
            "layers in model.lora.targets, or set model.lora.rank=0"
        )
