"""What a checkpoint's model consists of, without its weights: what a real engine's weights are checked against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from streamrl.engines.conversion import checkpoint_names
from streamrl.errors import WeightSyncError
from streamrl.sync.names import NameMap


@dataclass(frozen=True)
class Blueprint:
    """Parameters of the transformers model in a folder, as ``named_parameters`` lists them: tied ones once."""

    shapes: Mapping[str, torch.Size]
    dtype: torch.dtype
    """That all weights come in."""
    vocabulary: int
    text: Any
    """The transformers config of the language model."""
    names: NameMap
    """To the tensors of a checkpoint, by which engines load."""
    constants: Mapping[str, torch.Tensor]
    """What the checkpoint in the folder has beside them, by its names. Nobody trains it, so it does not travel."""

    @classmethod
    def of(cls, folder: str, dtype: str) -> Blueprint:
        """Built on the meta device: no weight is read or allocated."""
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        text = config.get_text_config()
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        names, constants = checkpoint_names(model, shapes), _constants(model, Path(folder))
        return cls(shapes, getattr(torch, dtype), int(text.vocab_size), text, names, constants)

    def verify(self, tensors: Mapping[str, object]) -> dict[str, torch.Tensor]:
        """What an engine is to load, by the names of a checkpoint: views of ``tensors``, and the constants.

        ``WeightSyncError`` unless ``tensors`` are exactly the model's parameters.
        """
        missing, unknown = self.shapes.keys() - tensors.keys(), tensors.keys() - self.shapes.keys()
        if missing or unknown:
            raise WeightSyncError(
                f"weights do not fit the model: missing {sorted(missing)[:3]} ({len(missing)}), unknown "
                f"{sorted(unknown)[:3]} ({len(unknown)}); send what named_parameters() lists, tied weights once"
            )
        verified = {}
        for name, shape in self.shapes.items():
            tensor = tensors[name]
            if not isinstance(tensor, torch.Tensor):
                raise WeightSyncError(f"weight {name}: expected a torch tensor, got {type(tensor).__name__}")
            if tensor.shape != shape or tensor.dtype != self.dtype:
                raise WeightSyncError(
                    f"weight {name}: expected {self.dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}"
                )
            verified[name] = tensor
        return {**self.names.apply(verified), **self.constants}

    def kv_bytes_per_token(self) -> int:
        """Of all layers, for a plain transformer."""
        heads = getattr(self.text, "num_key_value_heads", None) or self.text.num_attention_heads
        size = getattr(self.text, "head_dim", None) or self.text.hidden_size // self.text.num_attention_heads
        return 2 * int(self.text.num_hidden_layers) * int(heads) * int(size) * self.dtype.itemsize


def _constants(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """The buffers that ``folder`` has weights for, such as the biases of a router that no gradient reaches.

    An engine that starts with random weights needs them; one that does not know a name in them could not have loaded
    the checkpoint either.
    """
    kept = model.state_dict().keys()
    shapes = {name: buffer.shape for name, buffer in model.named_buffers() if name in kept}
    if not shapes:
        return {}
    wanted = checkpoint_names(model, shapes).shapes
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in _read(path, wanted)}


def _read(path: Path, names: Mapping[str, object]) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name in sorted(names.keys() & set(file.keys())):
            yield name, file.get_tensor(name)
