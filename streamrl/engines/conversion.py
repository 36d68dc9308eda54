"""The name map of a transformers model, derived from what transformers itself does when it saves a checkpoint.

``revert_weight_conversion`` is run once, on the meta device, where no tensor has bytes. Views keep their offset and
strides in the tensor that they look into there, so each result can be read off as a window of a parameter. Copies that
transformers makes of them (``contiguous``) are taken for the views that they copy; concatenations are written down. A
model whose conversion computes anything else is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from streamrl.errors import ConfigError, WeightSyncError
from streamrl.sync.names import NameMap, Wanted, Window

_aten = torch.ops.aten


def checkpoint_names(model: Any, shapes: Mapping[str, torch.Size]) -> NameMap:
    """From tensors of ``model``, by their names there, to those of its checkpoint, in the order of ``shapes``.

    Raises ``ConfigError`` for a model whose checkpoint holds more than parts of its tensors.
    """
    from transformers.core_model_loading import revert_weight_conversion

    sources = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    try:
        with _Trace(sources) as trace:
            converted = revert_weight_conversion(model, dict(sources))
        wanted = [trace.read(name, tensor) for name, tensor in converted.items()]
        place = {name: index for index, name in enumerate(shapes)}
        wanted.sort(key=lambda each: (place[each.parts[0].source], each.parts[0].offset))
        return NameMap(shapes, wanted)
    except (RuntimeError, WeightSyncError) as error:
        raise ConfigError(
            f"model.name: {type(model).__name__} is not saved as parts of its tensors ({error}), which is how streamrl "
            "brings weights to this engine; engine=embedded takes them as they are"
        ) from error


class _Trace(TorchDispatchMode):
    """What became of the tensors ``sources`` while this was entered."""

    def __init__(self, sources: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = {_storage(tensor): name for name, tensor in sources.items()}
        self._joined: dict[int, tuple[Tensor, list[Tensor], int]] = {}
        """Results of concatenations by their memory, with parts and axis. Kept, or their memory would be used again."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:  # what is written to is no longer what travels, and looks as if it were
            raise WeightSyncError(f"{func} changes values")
        if func is _aten.clone.default:
            return args[0]
        result = func(*args, **(kwargs or {}))
        if func is _aten.cat.default:
            self._joined[_storage(result)] = result, list(args[0]), args[1] if len(args) > 1 else 0
        return result

    def read(self, name: str, tensor: Tensor) -> Wanted:
        """Where the values of ``tensor`` come from; ``WeightSyncError`` where that is no part of a parameter."""
        if _storage(tensor) not in self._joined:
            return Wanted(name, (self._window(name, tensor),))
        result, parts, axis = self._joined[_storage(tensor)]
        if tensor.shape != result.shape or tensor.stride() != result.stride():
            raise WeightSyncError(f"{name} is a part of tensors that were put together")
        return Wanted(name, tuple(self._window(name, part) for part in parts), axis)

    def _window(self, name: str, tensor: Tensor) -> Window:
        source = self._names.get(_storage(tensor))
        if source is None:
            raise WeightSyncError(f"{name} is computed")
        return Window(source, int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))


def _storage(tensor: Tensor) -> int:
    """The same for a tensor and its views, for as long as one of them lives."""
    return int(tensor.untyped_storage()._cdata)
