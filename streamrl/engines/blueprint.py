"""What a checkpoint's model consists of, without its weights: what a real engine's weights are checked against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from streamrl.errors import WeightSyncError


@dataclass(frozen=True)
class Blueprint:
    """Parameters of the transformers model in a folder, as ``named_parameters`` lists them: tied ones once."""

    shapes: Mapping[str, torch.Size]
    dtype: torch.dtype
    """That all weights come in."""
    vocabulary: int
    text: Any
    """The transformers config of the language model."""

    @classmethod
    def of(cls, folder: str, dtype: str) -> Blueprint:
        """Built on the meta device: no weight is read or allocated."""
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        text = config.get_text_config()
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        return cls(shapes, getattr(torch, dtype), int(text.vocab_size), text)

    def verify(self, tensors: Mapping[str, object]) -> dict[str, torch.Tensor]:
        """``tensors`` in the model's order; ``WeightSyncError`` unless they are exactly its parameters."""
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
        return verified

    def kv_bytes_per_token(self) -> int:
        """Of all layers, for a plain transformer."""
        heads = getattr(self.text, "num_key_value_heads", None) or self.text.num_attention_heads
        size = getattr(self.text, "head_dim", None) or self.text.hidden_size // self.text.num_attention_heads
        return 2 * int(self.text.num_hidden_layers) * int(heads) * int(size) * self.dtype.itemsize
