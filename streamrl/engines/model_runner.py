"""The model side of the embedded engine: forward passes over slots, the head, weight loading.

Works with any transformers causal LM whose layers all do full attention and whose head is one linear layer; what it
cannot serve exactly is refused when the engine is built or started.
Shapes: ``[n]`` sequences, ``[n, q]`` padded tokens, ``[n, V]`` logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from streamrl.engines.ahead import on_device
from streamrl.engines.slots import DecodeWrite, PrefillWrite, SlotCache
from streamrl.errors import ConfigError, WeightSyncError
from streamrl.lora import adapter_parameters
from streamrl.loss.head import HeadForm

SCORE_ELEMENTS = 1 << 24
"""Logits of one pass of ``score``: 64 MiB in float32."""


def plan_scores(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Indices of rows by length, dealt to passes of at most ``tokens`` padded tokens; a longer row has its own."""
    passes: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if passes and (len(passes[-1]) + 1) * lengths[row] <= tokens:
            passes[-1].append(row)
        else:
            passes.append([row])
    return passes


def refuse_unsupported(model: PreTrainedModel, max_length: int) -> None:
    """Raise ``ConfigError`` for a model whose layers, head or positions the slot cache cannot serve."""
    config, name = model.config, type(model).__name__
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True):
        kinds.add("sliding_attention")
    forward = inspect.signature(model.base_model.forward).parameters
    attention = config._attn_implementation
    limit = getattr(config, "max_position_embeddings", None)
    reason = ""
    if kinds:
        reason = f"{name} has {', '.join(sorted(kinds))} layers; only full attention can be kept in slots"
    elif getattr(model, "_is_stateful", False) or getattr(config, "is_encoder_decoder", False):
        reason = f"{name} is recurrent or an encoder-decoder; only decoder-only attention can be kept in slots"
    elif model.base_model is model or not {"position_ids", "past_key_values"} <= forward.keys():
        reason = f"{name} takes no position_ids or past_key_values, which the slot cache needs"
    elif not isinstance(model.get_output_embeddings(), nn.Linear):
        reason = f"the head of {name} is {type(model.get_output_embeddings()).__name__}, not one nn.Linear"
    elif attention not in ("sdpa", "eager"):
        reason = f"{name} uses attention {attention!r}; load it with attn_implementation='sdpa'"
    elif limit is not None and max_length > limit:
        reason = f"max_length {max_length} is over the {limit} positions of {name}; lower model.max_length"
    if reason:
        raise ConfigError(f"engine embedded: {reason}")


class Head:
    """The output head, its product in fp32 unless asked otherwise. A weight that is upcast is so once per update."""

    def __init__(self, model: PreTrainedModel, dtype: str) -> None:
        head = model.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        self._linear = head
        self._form = HeadForm.of(model.config, dtype)
        self._prepared: tuple[int, Tensor] | None = None
        self.refresh()

    def prepare(self, weight: Tensor | None) -> None:
        """``weight`` comes next: do now what ``refresh`` will want of it. None: it does not come. From any thread."""
        self._prepared = None if weight is None else (weight.data_ptr(), self._form.operand(weight))

    def refresh(self) -> None:
        """Take over the weight as it is now. Free when the model is in fp32: then the parameter itself is used."""
        weight = self._linear.weight.detach()
        prepared, self._prepared = self._prepared, None
        fits = prepared is not None and prepared[0] == weight.data_ptr()
        self._weight = prepared[1] if prepared and fits else self._form.operand(weight)
        self._bias = None if self._linear.bias is None else self._linear.bias.detach()

    def __call__(self, hidden: Tensor) -> Tensor:
        """``[n, hidden]`` → fp32 logits ``[n, V]``."""
        return self._form.logits(hidden, self._weight, self._bias)


class ProductWatch(TorchDispatchMode):
    """Sees which dtype matrix products come out in while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.linear):
            self.found.add(result.dtype)
        return result


class ModelRunner:
    """Prefill, decode and score on one model; owns the KV cache. Not thread-safe: one thread calls it."""

    def __init__(self, model: PreTrainedModel, slots: int, max_length: int, head_dtype: str = "float32") -> None:
        refuse_unsupported(model, max_length)
        self._model = model.eval()
        self._base = model.base_model
        self._device = next(model.parameters()).device
        self.dtype = next(model.parameters()).dtype
        self._rows = torch.arange(slots, device=self._device)
        self._columns = torch.arange(max_length, device=self._device)
        self.head = Head(model, head_dtype)
        self.head_dtype = ""
        """Of the head's product; ``check`` sees it in a forward pass."""
        self.cache = SlotCache(model.config.num_hidden_layers, slots, max_length)
        embedding = model.get_input_embeddings()
        assert isinstance(embedding, nn.Embedding)
        self.vocabulary = embedding.num_embeddings
        self.tied = model.get_output_embeddings().weight is embedding.weight
        self._adapters = adapter_parameters(model)
        self._parameters: Mapping[str, nn.Parameter] = self._adapters or dict(model.named_parameters())
        self._sent = (
            "the adapters of model.lora alone"
            if self._adapters
            else ("what named_parameters() lists, tied weights once")
        )

    def _put(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _mask(self, allowed: Tensor) -> Tensor:
        """Additive mask: made once here, where a boolean one would be converted in every layer."""
        return torch.zeros_like(allowed, dtype=self.dtype).masked_fill_(~allowed, -torch.inf)

    def _hidden(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Last hidden states ``[n, q, hidden]`` of a forward pass through the slot cache."""
        output = self._base(
            input_ids=tokens, position_ids=positions, attention_mask=mask, past_key_values=self.cache, use_cache=True
        )
        return output.last_hidden_state

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[np.ndarray], sources: Sequence[int], targets: Sequence[int]) -> Tensor:
        """Run ``prompts`` from position 0, keep row ``sources[i]`` in slot ``targets[i]``; last hidden ``[n, hidden]``.

        Rows are padded on the right: the causal mask alone keeps padding out of every real token's sight, and what
        padding leaves in the cache lies beyond the sequence's length until decoding overwrites it.
        """
        lengths = np.fromiter((len(prompt) for prompt in prompts), dtype=np.int64, count=len(prompts))
        width = int(lengths.max())
        padded = np.zeros((len(prompts), width), dtype=np.int64)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt)] = prompt
        self.cache.reserve(width)
        self.cache.write = PrefillWrite(self._put(np.asarray(sources)), self._put(np.asarray(targets)))
        columns = self._columns[:width]
        mask = self._mask(columns[None, :] <= columns[:, None])[None, None]
        hidden = self._hidden(self._put(padded), columns[None], mask)
        return hidden[self._rows[: len(prompts)], self._put(lengths - 1)]

    @torch.inference_mode()
    def decode(self, tokens: np.ndarray, positions: np.ndarray) -> Tensor:
        """Feed ``tokens`` int64 ``[n]`` at ``positions`` int64 ``[n]`` to slots 0 … n − 1; logits ``[n, V]``."""
        return self.head(self._decode_hidden(tokens, positions))

    def _decode_hidden(self, tokens: np.ndarray, positions: np.ndarray) -> Tensor:
        longest = int(positions.max()) + 1
        self.cache.reserve(longest)
        position = self._put(positions)[:, None]
        self.cache.write = DecodeWrite(self._rows[: len(tokens)], position[:, 0], longest)
        mask = self._mask(self._columns[:longest] <= position)[:, None, None]
        return self._hidden(self._put(tokens)[:, None], position, mask)[:, 0]

    @torch.inference_mode()
    def score(self, rows: Sequence[np.ndarray], temperature: float) -> list[np.ndarray]:
        """Log-probs float32 ``[T]`` of the tokens of each row, the first 0, by plain forward passes without a cache.

        Rows of about the same length share a pass, padded on the right as in ``prefill``.
        """
        scores = [np.zeros(len(row), dtype=np.float32) for row in rows]
        for chosen in plan_scores([len(row) for row in rows], SCORE_ELEMENTS // self.vocabulary):
            ids = np.zeros((len(chosen), len(rows[chosen[-1]])), dtype=np.int64)
            for line, row in zip(ids, chosen, strict=True):
                line[: len(rows[row])] = rows[row]
            tokens = self._put(ids)
            hidden = self._base(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
            logprobs = (self.head(hidden.flatten(0, 1)) / temperature).log_softmax(dim=-1)
            found = logprobs.gather(1, tokens[:, 1:].reshape(-1, 1)).view(len(chosen), -1).numpy(force=True)
            for line, row in zip(found, chosen, strict=True):
                scores[row][1:] = line[: len(rows[row]) - 1]
        return scores

    def check(self) -> None:
        """Compare slots and head with the model's own forward pass; ``ConfigError`` where they differ."""
        name = type(self._model).__name__
        try:
            actual, expected = self._probe()
        except Exception as error:  # whatever an unknown architecture raises means the same
            raise ConfigError(
                f"engine embedded: {name} cannot run on slots with a 4-D mask: {error}; use another engine"
            ) from error
        difference = float((actual - expected).abs().max())
        exact = self.dtype == torch.float32 and self.head_dtype == "float32"
        tolerance = (1e-3 if exact else 0.1) * max(1.0, float(expected.abs().max()))
        if not difference <= tolerance:
            raise ConfigError(
                f"engine embedded: logits of {name} through slots and {self.head_dtype} head differ by "
                f"{difference:.2g} from its own forward pass (allowed {tolerance:.2g}); use another engine"
            )

    @torch.inference_mode()
    def _probe(self) -> tuple[Tensor, Tensor]:
        """Logits ``[V]`` after a few tokens: through prefill and decode, and by the model's own forward pass."""
        width = min(4, self.cache.max_length)
        tokens = np.arange(1, width + 1) % self.vocabulary
        if width > 1:
            self.prefill([tokens[:-1]], [0], [0])
        hidden = self._decode_hidden(tokens[-1:], np.array([width - 1]))
        with ProductWatch() as watch:
            actual = self.head(hidden)[0]
        self.head_dtype = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in watch.found))
        return actual, self._model(input_ids=self._put(tokens)[None]).logits[0, -1].float()

    def verify(self, tensors: Mapping[str, object]) -> None:
        """Raise ``WeightSyncError`` unless ``tensors`` are exactly what ``parameters`` lists, tied ones once."""
        parameters = self.parameters()
        missing, unknown = parameters.keys() - tensors.keys(), tensors.keys() - parameters.keys()
        if missing or unknown:
            raise WeightSyncError(
                f"weights do not fit the model: missing {sorted(missing)[:3]} ({len(missing)}), unknown "
                f"{sorted(unknown)[:3]} ({len(unknown)}); send {self._sent}"
            )
        for name, parameter in parameters.items():
            tensor = tensors[name]
            if not isinstance(tensor, Tensor):
                raise WeightSyncError(f"weight {name}: expected a torch tensor, got {type(tensor).__name__}")
            if tensor.shape != parameter.shape or tensor.dtype != parameter.dtype:
                raise WeightSyncError(
                    f"weight {name}: expected {parameter.dtype} {list(parameter.shape)}, "
                    f"got {tensor.dtype} {list(tensor.shape)}"
                )

    def parameters(self) -> dict[str, Tensor]:
        """What ``load`` changes, by its names: the adapters of an adapted model (``lora.py``), else all parameters."""
        return dict(self._parameters)

    @torch.no_grad()
    def stage(self, tensors: Mapping[str, object]) -> dict[str, Tensor]:
        """What ``load`` takes over in no time, from any thread: ``tensors`` on this device, and what the head needs."""
        self.head.prepare(None)
        self.verify(tensors)
        staged = on_device(
            {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}, self._device
        )
        head = self._model.get_output_embeddings().weight
        for name, parameter in self._parameters.items():
            if parameter is head:
                self.head.prepare(staged[name])
        return staged

    @torch.no_grad()
    def load(self, tensors: Mapping[str, object]) -> None:
        """Take verified ``tensors`` over: where they lie on the model's device they become its parameters, uncopied.

        Nothing writes to a parameter here: what lies in shared memory is mapped for reading only.
        """
        for name, parameter in self._parameters.items():
            tensor = tensors[name]
            assert isinstance(tensor, Tensor)
            if tensor.device == parameter.device:
                parameter.data = tensor.contiguous()
            else:
                parameter.copy_(tensor)
        if not self._adapters:  # they leave the head as it is
            self.head.refresh()
