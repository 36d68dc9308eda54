"""Which weights an engine holds: a digest per tensor, and perturbed copies that no trainer has ever had."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

SHOWN = 3
"""Names that a line gives at most."""
_OF_A_LAYER = re.compile(r"\.\d+\.")


def digest(tensor: Any) -> int:
    """xxh3-64 of the bytes of a torch tensor, on whatever device."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_64_intdigest(flat.numpy())


def digests(tensors: Mapping[str, Any]) -> dict[str, int]:
    return {name: digest(tensor) for name, tensor in tensors.items()}


def after_the_cache(names: Mapping[str, object]) -> list[str]:
    """Tensors that change log-probs but no key or value: the norm after the last layer, else an output head.

    Empty where no name looks like one; a head that is tied to the embedding has no name of its own.
    """
    outside = [name for name in names if not _OF_A_LAYER.search(name)]
    norms = [name for name in outside if "norm" in name or "ln_f" in name]
    norms = [name for name in norms if "embed" not in name]
    return norms or [name for name in outside if name.startswith("lm_head.")]


class Perturbed(Mapping[str, Any]):
    """``tensors`` with those of ``names`` changed (None: all), made one at a time as they are read.

    Each value moves to its neighbour's place, and every second one by ``scale`` root mean squares (+ 0.05) on top: a
    constant norm, a zero bias and a weight that a norm rescales all change what the model says, and nothing grows far
    beyond the scale that it has.
    """

    def __init__(self, tensors: Mapping[str, Any], names: list[str] | None = None, scale: float = 0.25) -> None:
        self._tensors = tensors
        self._scale = scale
        self._names = set(tensors if names is None else names)

    def changes(self, name: str) -> bool:
        """Whether this tensor is another one here: it has values, and these are no integers."""
        tensor = self._tensors[name]
        return name in self._names and tensor.numel() > 0 and tensor.is_floating_point()

    def __getitem__(self, name: str) -> Any:
        tensor = self._tensors[name]
        if not self.changes(name):
            return tensor
        step = self._scale * tensor.float().square().mean().sqrt().item() + 0.05
        moved = tensor.reshape(-1).roll(1)
        moved[::2] += step
        return moved.reshape(tensor.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


@dataclass
class Ledger:
    """Digests by name round one update: what was sent, and what the engine then held."""

    initial: dict[str, int] = field(default_factory=dict)
    """Held before any update; empty where the engine cannot tell."""
    first: dict[str, int] = field(default_factory=dict)
    """Held after an update in which each of these tensors was another."""
    previous: dict[str, int] = field(default_factory=dict)
    """Sent with the last update before the one in question."""
    before: dict[str, int] = field(default_factory=dict)
    """Held then."""
    sent: dict[str, int] = field(default_factory=dict)
    """Sent with the update in question."""

    def wrong(self, held: Mapping[str, int]) -> str:
        """What is wrong with the digests that an engine holds after the update; empty where it holds what was sent."""
        never = [name for name in self.sent if name in self.first and self.first[name] == self.initial[name]]
        different = [name for name in self.sent if held.get(name) != self.sent[name]]
        old = [name for name in different if held.get(name) in (self.before.get(name), self.previous.get(name))]
        changed = [name for name in self.sent if self.previous.get(name) != self.sent[name]]
        if never and set(different) <= set(never):
            return f"{_names(never)} not loaded: no update changes what the engine holds"
        if not different:
            return ""
        if old == changed:
            return "the weights are one version behind: the engine holds those of before the update"
        if swapped := self._swapped(different, held):
            return f"tensors {swapped[0]} and {swapped[1]} are swapped"
        if old:
            return f"{_names(old)} not loaded: the engine holds what was there before the update"
        return f"{_names(different)}: the engine holds something that was not sent"

    def _swapped(self, different: list[str], held: Mapping[str, int]) -> tuple[str, str] | None:
        place = {held.get(name): name for name in different}
        for one in different:
            other = place.get(self.sent[one])
            if other is not None and held.get(one) == self.sent[other]:
                return one, other
        return None


def _names(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(names[:SHOWN])}{more}"
