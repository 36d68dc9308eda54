"""Experts of a vLLM model on a CPU, whose kernel computes with packed copies of their weights.

When vLLM 0.32 sets a layer of experts up, it pads and packs the weights. When it loads new ones into it, it does
neither: that the kernel is there already, it takes for a sign that nothing is left to do. The kernel then reads plain
weights as packed ones: no error, and log-probs that are off by nats.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod


def pack_with_every_load() -> None:
    """In this process, from now on: on a CPU, loading sets the kernel up as the first time."""
    set_up = UnquantizedFusedMoEMethod._setup_kernel

    def set_up_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.unquantized_backend == UnquantizedMoeBackend.CPU:
            self.moe_kernel = None
        set_up(self, *args, **kwargs)

    UnquantizedFusedMoEMethod._setup_kernel = set_up_anew
