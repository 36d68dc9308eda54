"""Heads of a vLLM model that share their weight with the embedding."""

from __future__ import annotations

from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding


def tied_heads(model: nn.Module) -> list[ParallelLMHead]:
    """Heads whose weight is that of an embedding."""
    layers = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    embeddings = {layer.weight.data_ptr() for layer in layers if not isinstance(layer, ParallelLMHead)}
    return [layer for layer in layers if isinstance(layer, ParallelLMHead) and layer.weight.data_ptr() in embeddings]


def repack_tied_heads(model: nn.Module) -> None:
    """After a reload of ``model``. Nothing was loaded into such a head, so the reload let it be; but where a backend
    computes with a packed copy of the weight, as on a CPU, that copy is still the old one."""
    for head in tied_heads(model):
        head.quant_method.process_weights_after_loading(head)
