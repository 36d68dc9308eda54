"""One rank of a gather, as a process of its own: ``python gather_process.py RANK RANKS STORE OUT``.

Rank 0 writes the bytes that it gathered, and the order in which buckets became complete, to OUT.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from streamrl.sync.arena import Filling
from streamrl.sync.gather import gather
from streamrl.sync.manifest import Manifest, plan_manifest
from streamrl.sync.staging import slot_memory

BUCKET_BYTES = 1024
SHAPES = {
    "rows": (37, 11),
    "fewer_rows_than_ranks": (2, 3),
    "larger_than_a_bucket": (300, 7),
    "empty": (0, 4),
    "vector": (129,),
    "replicated": (5, 5),
    "plain": (3, 3),
}


def named(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=random).to(dtype) for name, shape in SHAPES.items()}


def manifest() -> Manifest:
    """In bfloat16: the wire's dtype is not the parameters'."""
    return plan_manifest([(name, shape, "bfloat16") for name, shape in SHAPES.items()], BUCKET_BYTES)


def main(rank: int, ranks: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    parameters = {}
    for name, tensor in named().items():
        if name == "plain":
            parameters[name] = tensor
        else:
            parameters[name] = distribute_tensor(tensor, mesh, [Replicate() if name == "replicated" else Shard(0)])
    plan, complete = manifest(), []
    memory = slot_memory(plan)
    filling = Filling(plan, memory, complete.append) if rank == 0 else None
    gather(parameters.items(), plan, filling)
    if filling is not None:
        filling.finish(0)
        Path(out).write_text(json.dumps({"bytes": bytes(memory).hex(), "buckets": complete}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
