"""Weights out of an actor's shared memory, inside SGLang's processes.

SGLang imports ``load`` by its name when the server starts with ``--custom-weight-loader``, in its own environment,
where streamrl's dependencies are absent. What it raises ends the server: the actor asks first whether the server sees
its memory (``facts.sees_memory``), and verifies every tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from streamrl.engines.shelf import ShelfReader

LOADER = f"{__name__}.load"
"""How SGLang finds ``load``."""
_reader = ShelfReader()


def load(model: Any, named: Iterable[tuple[str, Tensor]]) -> None:
    """``named`` is one tensor: the bytes of ``written``. Each of the server's processes loads its own part."""
    ((_, text),) = named
    model.load_weights(_reader.views(**json.loads(text.cpu().numpy().tobytes())).items())


def written(placed: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """What ``load`` is given for what ``Shelf.put`` says."""
    return [("placed", torch.frombuffer(bytearray(json.dumps(placed).encode()), dtype=torch.uint8))]


def sees(placed: Mapping[str, Any], values: Mapping[str, list[float]]) -> bool:
    """Whether the shelf of ``placed`` holds ``values`` for this process."""
    try:
        found = ShelfReader().views(**placed)
    except (OSError, ValueError):  # no such process here, not ours to look into, or another file by now
        return False
    return {name: tensor.tolist() for name, tensor in found.items()} == values
