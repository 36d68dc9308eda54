"""From the names that travel to those that an engine loads by: which tensor is which part of which other one.

What travels are the trainer's parameters, by the names of the transformers model. Engines load by the names of its
checkpoint, where one may be called otherwise, be cut up (a stack of experts into one matrix each), be turned or be
put together. A ``NameMap`` says so as a table of windows::

    what travels                              what an engine loads
    mlp.experts.gate_up_proj [E, 2I, H]  ─┬─► mlp.experts.0.gate_proj.weight [I, H]     from element 0
                                          ├─► mlp.experts.0.up_proj.weight   [I, H]     from element I · H
                                          └─► mlp.experts.1.gate_proj.weight [I, H]     from element 2I · H
    mlp.gate_proj.weight [I, H] ────┬───────► mlp.gate_up_proj.weight [2I, H]           both, along axis 0
    mlp.up_proj.weight [I, H] ──────┘

The table is plain data and knows no architecture; ``engines/conversion.py`` derives it from transformers. Applied, it
gives views. Only what is put together may have to be copied: not where its parts follow each other in memory, as in a
manifest those do that follow each other in the model and take a multiple of 256 bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING

from streamrl.errors import WeightSyncError

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Window:
    """Elements of the tensor ``source``, as they lie in memory: from number ``offset`` on, by ``strides``."""

    source: str
    offset: int
    shape: Shape
    strides: Shape

    def runs(self) -> Iterator[tuple[int, int]]:
        """Its elements as ranges of the source, each from its first to one past its last; without elements none."""
        if not math.prod(self.shape):
            return
        axes = sorted((stride, size) for size, stride in zip(self.shape, self.strides, strict=True) if size > 1)
        length, inner = 1, 0
        while inner < len(axes) and axes[inner][0] == length:
            length *= axes[inner][1]
            inner += 1
        for index in product(*(range(size) for _, size in axes[inner:])):
            start = self.offset + sum(step * stride for step, (stride, _) in zip(index, axes[inner:], strict=True))
            yield start, start + length


@dataclass(frozen=True)
class Wanted:
    """A tensor that an engine loads: a window, or several that follow each other along ``axis``."""

    name: str
    parts: tuple[Window, ...]
    axis: int = 0

    @property
    def shape(self) -> Shape:
        shape = list(self.parts[0].shape)
        if len(self.parts) > 1:
            shape[self.axis] = sum(part.shape[self.axis] for part in self.parts)
        return tuple(shape)


class NameMap:
    """The table for tensors of these ``shapes`` by name.

    Raises ``WeightSyncError`` unless it is one to one: every element that travels is in exactly one tensor that the
    engine loads. A table that left one out would leave it as it was in the engine, update after update.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], wanted: Iterable[Wanted]) -> None:
        self.wanted = tuple(wanted)
        _check_names(self.wanted)
        _check_windows({name: math.prod(shape) for name, shape in shapes.items()}, self.wanted)

    @property
    def shapes(self) -> dict[str, Shape]:
        """Of what the engine loads, by name."""
        return {each.name: each.shape for each in self.wanted}

    def apply(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``tensors`` of the map's shapes, in its order and by the engine's names; views wherever that is possible."""
        dense = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        return {
            each.name: _joined([_view(dense[part.source], part) for part in each.parts], each) for each in self.wanted
        }


def same_names(shapes: Mapping[str, Sequence[int]]) -> NameMap:
    """The map of an engine that loads what travels."""
    windows = {name: Window(name, 0, tuple(shape), contiguous_strides(shape)) for name, shape in shapes.items()}
    return NameMap(shapes, [Wanted(name, (window,)) for name, window in windows.items()])


def contiguous_strides(shape: Sequence[int]) -> Shape:
    """Elements from one index to the next, by axis, where the last axis varies fastest."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _check_names(wanted: Sequence[Wanted]) -> None:
    twice = [name for name, count in Counter(each.name for each in wanted).items() if count > 1]
    if twice:
        raise WeightSyncError(f"name map: {twice[0]} is given twice ({len(twice)} such names)")


def _check_windows(sizes: Mapping[str, int], wanted: Sequence[Wanted]) -> None:
    taken: dict[str, list[tuple[int, int, str]]] = {name: [] for name in sizes}
    for each in wanted:
        for part in each.parts:
            if part.source not in sizes:
                raise WeightSyncError(f"name map: {each.name} is made of {part.source}, which does not travel")
            taken[part.source] += [(first, end, each.name) for first, end in part.runs()]
    for name, size in sizes.items():
        _check_ranges(name, size, sorted(taken[name]))


def _check_ranges(source: str, size: int, taken: list[tuple[int, int, str]]) -> None:
    """``taken``: from where to where, by whom, in order."""
    at = 0
    for first, end, name in taken:
        if end > size:
            raise WeightSyncError(f"name map: {name} takes element {end - 1} of {source}, which has {size}")
        if first < at:
            raise WeightSyncError(f"name map: {name} takes element {first} of {source}, which another tensor has")
        if first > at:
            break
        at = end
    if at < size:
        raise WeightSyncError(f"name map: no tensor that the engine loads has element {at} of {source}")


def _view(tensor: Tensor, window: Window) -> Tensor:
    return tensor.as_strided(window.shape, window.strides, tensor.storage_offset() + window.offset)


def _joined(parts: list[Tensor], wanted: Wanted) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    filled = [part for part in parts if part.numel()] or parts[:1]
    if wanted.axis == 0 and all(_follows(*pair) for pair in pairwise(filled)):
        shape = wanted.shape
        return filled[0].as_strided(shape, contiguous_strides(shape), filled[0].storage_offset())
    import torch

    return torch.cat(parts, wanted.axis)


def _follows(first: Tensor, second: Tensor) -> bool:
    """Whether the elements of both lie in memory without a gap, one tensor's after the other's."""
    return (
        first.is_contiguous()
        and second.is_contiguous()
        and first.dtype == second.dtype
        and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and first.storage_offset() + first.numel() == second.storage_offset()
    )
