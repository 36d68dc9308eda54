"""One trainer rank of a mixture of experts, as a process: ``python mixture_process.py RANK RANKS STORE OUT``.

After a step, rank 0 writes its metrics and the weights as they are gathered for the engines to OUT.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from learner_cases import VOCAB, batch, settings, varied_groups
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from streamrl.policy.learner import Learner
from streamrl.policy.parallel import close_ranks, init_ranks
from streamrl.sync.arena import Filling, describe
from streamrl.sync.gather import gather
from streamrl.sync.manifest import plan_manifest
from streamrl.sync.staging import slot_memory, tensors_in

EXPERTS = 4
"""More than ranks, and no multiple of three: the last of three ranks holds none."""
BUCKET_BYTES = 4096
"""Less than the experts of a layer take."""


def mixture() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        norm_topk_prob=True,
        initializer_range=0.2,
    )
    return Qwen3MoeForCausalLM(config)


def step(rank: int, ranks: int, store: str) -> dict[str, Any]:
    """Metrics of a step whose groups are dealt to ``ranks`` in turn, and the weights that rank 0 gathered."""
    mesh = init_ranks(rank, ranks, store, timeout_s=100.0)
    learner = Learner(settings(eps=0.1), mixture(), mesh)
    metrics = learner.step(batch(varied_groups()[rank::ranks]))
    named = dict(learner.model.named_parameters())
    shapes = {name: torch.empty(each.shape, device="meta") for name, each in named.items()}
    plan = plan_manifest(describe(shapes), BUCKET_BYTES)
    memory = slot_memory(plan)
    filling = Filling(plan, memory, lambda index: None) if rank == 0 else None
    gather(named.items(), plan, filling)
    close_ranks()
    return {"metrics": metrics, "weights": tensors_in(plan, memory)}


if __name__ == "__main__":
    seen = step(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    if sys.argv[1] == "0":
        torch.save(seen, Path(sys.argv[4]))
