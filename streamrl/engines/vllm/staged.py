"""A second set of vLLM's weights: filled while the first one computes, exchanged with it between two steps.

::

    stage (a thread of the worker, while it steps)           load (the worker itself, while it is paused)
    ─────────────────────────────────────────────            ──────────────────────────────────────────────────────────
    vLLM's layer-by-layer reload, into the second set:       on a CPU: weights and the packed copies that its kernels
    load, pack as the kernels want it                          compute with change places with those of the second set
                                                             on a GPU: copied on the device into the tensors that the
                                                               captured graphs know

The second set is a tree of modules like the model's that never computes: it has the parts that loading needs, and
tensors of its own. Only layers are taken whose processing is known to leave nothing else behind (``_require_known``).
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs, sanitize_layer_refs
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo, LayerTensors

from streamrl.engines.ahead import beside_the_kernels
from streamrl.engines.shelf import ShelfReader
from streamrl.engines.vllm.heads import repack_tied_heads
from streamrl.engines.vllm.reports import BEGUN

PACKED = "cpu_linear"
"""Attribute of a layer on a CPU: the product with a packed copy of its weight."""
_KNOWN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
_REASON = 600
"""Characters of an error, of six bytes at most: what is written to a pipe at once arrives as one, up to 4096 bytes."""


class SecondSet:
    """Of ``model``, which stays as it is until ``exchange``.

    Raises ``ValueError`` for a model that it cannot be of, ``torch.OutOfMemoryError`` for a GPU without the room.
    """

    def __init__(self, model: nn.Module, model_config: Any) -> None:
        _require_known(model)
        self._model = model
        self._model_config = model_config
        self._device = next(model.parameters()).device
        self._wanted = {name for name, _ in model.named_parameters()}
        self._twin: nn.Module | None = _twin_of(model)

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Load checkpoint-format ``tensors``, from any thread. After an error the next call begins afresh."""
        twin, self._twin = self._twin or _twin_of(self._model), None
        with beside_the_kernels(self._device):
            layerwise.initialize_layerwise_reload(twin)
            loaded = set(twin.load_weights(iter(tensors.items())) or ())  # type: ignore[operator]
            layerwise.finalize_layerwise_reload(twin, self._model_config)
            repack_tied_heads(twin)
        if missing := self._wanted - loaded:
            raise RuntimeError(f"vLLM loaded no weights into {sorted(missing)[:3]} ({len(missing)} parameters)")
        self._twin = twin

    @torch.no_grad()
    def exchange(self) -> None:
        """From its next step on, the model computes with what was filled in last."""
        assert self._twin is not None, "fill comes before exchange"
        others = dict(self._twin.named_modules())
        pairs = [(layer, others[name]) for name, layer in self._model.named_modules() if name in others]
        tensors = {id(own): (own, theirs) for layer, other in pairs for own, theirs in _parameters(layer, other)}
        if self._device.type == "cpu":
            for own, theirs in tensors.values():
                own.data, theirs.data = theirs.data, own.data
            for layer, other in pairs:
                if PACKED in layer.__dict__:
                    layer.__dict__[PACKED], other.__dict__[PACKED] = other.__dict__[PACKED], layer.__dict__[PACKED]
            return
        torch._foreach_copy_([own.data for own, _ in tensors.values()], [theirs.data for _, theirs in tensors.values()])
        torch.accelerator.synchronize(self._device)  # the next fill writes to what this reads


class Stager:
    """Fills a ``SecondSet`` in a thread, one version at a time."""

    def __init__(self, second: SecondSet) -> None:
        self.second = second
        self._reader = ShelfReader()

    def begin(self, placed: dict[str, Any], report: str) -> None:
        """Return at once. Once the second set is filled, or was not, the pipe ``report`` is told (``reports.py``)."""
        pipe = os.open(report, os.O_WRONLY | os.O_CLOEXEC)
        os.write(pipe, BEGUN)
        threading.Thread(target=partial(self._work, placed, pipe), name="streamrl-stage", daemon=True).start()

    def _work(self, placed: dict[str, Any], pipe: int) -> None:
        reason = ""
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(1)  # of this thread: the cores are for the steps
            self.second.fill(self._reader.views(**placed))
        except Exception as error:  # noqa: BLE001 whatever it is, the actor has to hear of it
            reason = f"{type(error).__name__}: {error}"[:_REASON]
        finally:
            torch.set_num_threads(threads)  # what later threads begin with
            os.write(pipe, json.dumps(reason).encode() + b"\n")
            os.close(pipe)


def _require_known(model: nn.Module) -> None:
    """``ValueError`` for a model with a layer that loading leaves in a form that ``exchange`` does not know."""
    if callable(getattr(model, "process_weights_after_loading", None)):
        raise ValueError(f"{type(model).__name__} processes its weights as a whole")
    for name, layer in model.named_modules():
        if what := _unknown(layer):
            raise ValueError(f"{name} ({type(layer).__name__}) {what}")


def _unknown(layer: nn.Module) -> str:
    method = getattr(layer, "quant_method", None)
    if is_deferred_attention_layer(layer):
        return "" if type(layer) is Attention and not layer._parameters else "holds weights in a form of its own"
    if isinstance(method, QuantizeMethodBase) and type(method) not in _KNOWN:
        return f"is processed by {type(method).__name__}"
    parameters = [each for each in layer.parameters(recurse=False) if each.numel()]
    places = {each.untyped_storage().data_ptr() for each in parameters}
    for name, buffer in layer.named_buffers(recurse=False):
        if name not in layer._non_persistent_buffers_set or buffer.untyped_storage().data_ptr() in places:
            return f"has the buffer {name}, which weights are loaded into"
    return ""


def _twin_of(model: nn.Module) -> nn.Module:
    """The modules of ``model`` that may hold weights, each with parameters of its own; everything else is shared."""
    twins: dict[int, nn.Module] = {}
    tensors: dict[int, Tensor] = {}
    twin = _module_like(model, twins, tensors)
    assert twin is not None
    return twin


def _module_like(module: nn.Module, twins: dict[int, nn.Module], tensors: dict[int, Tensor]) -> nn.Module | None:
    """None for an attention, whose second reload would touch what computes."""
    if is_deferred_attention_layer(module):
        return None
    if id(module) in twins:
        return twins[id(module)]
    twin = module.__class__.__new__(module.__class__)
    twin.__dict__.update(module.__dict__)
    twins[id(module)] = twin
    own = {
        "_parameters": {
            name: None if each is None else _tensor_like(each, module, twin, tensors)
            for name, each in module._parameters.items()
        },
        "_buffers": dict(module._buffers),
        "_non_persistent_buffers_set": set(module._non_persistent_buffers_set),
        "_modules": {
            name: None if each is None else _module_like(each, twins, tensors) for name, each in module._modules.items()
        },
    }
    twin.__dict__.update(own)
    known = layerwise.get_layerwise_info(module)
    layerwise.LAYERWISE_INFO[twin] = LayerReloadingInfo(_metadata_like(known, module, twin), known.restore_device)
    return twin


def _tensor_like(tensor: Tensor, layer: nn.Module, twin: nn.Module, tensors: dict[int, Tensor]) -> Tensor:
    """Memory of the same form that ``twin`` may write to; tied parameters stay tied."""
    if id(tensor) not in tensors:
        fresh = torch.empty_like(tensor.data)
        fresh.__class__ = tensor.__class__
        fresh.__dict__ = tensor.__dict__.copy()
        tensors[id(tensor)] = _bound_to(twin, layer, fresh)
    return tensors[id(tensor)]


def _metadata_like(known: LayerReloadingInfo, layer: nn.Module, twin: nn.Module) -> LayerTensors:
    parameters, buffers = (
        {name: _bound_to(twin, layer, to_meta_tensor(each)) for name, each in some.items()}
        for some in known.restore_metadata
    )
    return parameters, buffers


def _bound_to(twin: nn.Module, layer: nn.Module, tensor: Tensor) -> Tensor:
    """``tensor``, whose loader may be the method of ``layer``, and wrapped by an earlier reload."""
    if hasattr(tensor, "weight_loader"):
        tensor.weight_loader = layerwise._get_original_loader(tensor)
    return restore_layer_refs(sanitize_layer_refs(tensor, layer), twin)


def _parameters(layer: nn.Module, other: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter of ``layer`` with that of ``other``."""
    for name, own in layer._parameters.items():
        theirs = other._parameters[name]
        if own is not None and theirs is not None:
            yield own, theirs
