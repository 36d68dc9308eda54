"""Which weights an engine holds: a digest per tensor, and perturbed copies that no trainer has ever had."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

SHOWN = 3
"""Names that a line gives at most."""
_OF_A_LAYER = re.compile(r"\.\d+\.")
_PATTERN = 64
_OF_ZEROS = 0.05


def digest(tensor: Any) -> int:
    """xxh3-64 of the bytes of a torch tensor, on whatever device."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_64_intdigest(flat.numpy())


def digests(tensors: Mapping[str, Any]) -> dict[str, int]:
    return {name: digest(tensor) for name, tensor in tensors.items()}


def after_the_cache(names: Mapping[str, object]) -> list[str]:
    """Tensors that change log-probs but no key or value: the norm after the last layer, else an output head.

    Of adapters (``lora.py``) those of the last layer's feed-forward part, else of its queries and attention's output.
    Empty where no name looks like one; a head that is tied to the embedding has no name of its own.
    """
    if adapters := [name for name in names if ".lora_" in name]:
        return _of_the_last_layer(adapters)
    outside = [name for name in names if not _OF_A_LAYER.search(name)]
    norms = [name for name in outside if "norm" in name or "ln_f" in name]
    norms = [name for name in norms if "embed" not in name]
    return norms or [name for name in outside if name.startswith("lm_head.")]


def _of_the_last_layer(adapters: list[str]) -> list[str]:
    number = {name: int(found[0][1:-1]) for name in adapters if (found := _OF_A_LAYER.findall(name))}
    last = [name for name, layer in number.items() if layer == max(number.values())]
    outside = [name for name in last if "attn" not in name and "attention" not in name]
    return outside or [name for name in last if ".q_proj." in name or ".o_proj." in name]


def alike(sent: Mapping[str, int]) -> list[str]:
    """Tensors that their digests do not tell from another one, such as fresh ``B`` factors, which are all 0."""
    times = Counter(sent.values())
    return [name for name, value in sent.items() if times[value] > 1]


class Perturbed(Mapping[str, Any]):
    """``tensors`` with those of ``names`` changed (None: all), made one at a time as they are read.

    Each value moves to its neighbour's place, and about every second one, which ones depends on the name, by ``scale``
    root mean squares (of zeros 0.05) on top: a constant norm, a zero bias and a weight that a norm rescales all change
    what the model says, equal tensors become different ones, and nothing grows far beyond the scale that it has.
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
        step = self._scale * tensor.float().square().mean().sqrt().item() or _OF_ZEROS
        moved = tensor.reshape(-1).roll(1)
        steps = step * _pattern(name, moved)
        whole = len(moved) // _PATTERN * _PATTERN
        moved[:whole].view(-1, _PATTERN).add_(steps)
        moved[whole:] += steps[: len(moved) - whole]
        return moved.reshape(tensor.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _pattern(name: str, like: Any) -> Any:
    """``[64]`` zeros and ones out of ``name``; the first is 1, so that no tensor is too small to change."""
    bits = xxhash.xxh3_64_intdigest(name.encode()) | 1
    return like.new_tensor([bits >> place & 1 for place in range(_PATTERN)])


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
    planned: dict[str, int] = field(default_factory=dict)
    """Sent with the first update, of tensors that are ``alike`` in the update in question."""

    def wrong(self, held: Mapping[str, int]) -> str:
        """What is wrong with the digests that an engine holds after the update; empty where it holds what was sent."""
        never = [name for name in self.sent if name in self.first and self.first[name] == self.initial[name]]
        different = [name for name in self.sent if held.get(name) != self.sent[name]]
        old = [name for name in different if held.get(name) in (self.before.get(name), self.previous.get(name))]
        changed = [name for name in self.sent if self.previous.get(name) != self.sent[name]]
        if never and set(different) <= set(never):
            return f"{_names(never)} not loaded: no update changes what the engine holds"
        if not different:
            return self._misplaced()
        if old == changed:
            return "the weights are one version behind: the engine holds those of before the update"
        if swapped := _swapped(different, held, self.sent):
            return swapped
        if old:
            return f"{_names(old)} not loaded: the engine holds what was there before the update"
        return f"{_names(different)}: the engine holds something that was not sent"

    def _misplaced(self) -> str:
        """The engine holds what was sent; whether each of the tensors that are alike came to its own place."""
        different = [name for name, digest in self.planned.items() if self.first.get(name) != digest]
        if not different:
            return ""
        return _swapped(different, self.first, self.planned) or (
            f"{_names(different)}: the engine held something that was not sent"
        )


def _swapped(different: list[str], held: Mapping[str, int], sent: Mapping[str, int]) -> str:
    place = {held.get(name): name for name in different}
    for one in different:
        other = place.get(sent[one])
        if other is not None and held.get(one) == sent[other]:
            return f"tensors {one} and {other} are swapped"
    return ""


def _names(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(names[:SHOWN])}{more}"
