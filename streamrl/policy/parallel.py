"""Trainer ranks: process group, FSDP2 sharding of the policy, and gathering of full parameters.

Parameters, gradients and optimizer state are sharded by decoder layer (ZeRO-3, arXiv 1910.02054). Gradients are
*summed* over ranks, not averaged: the token weights of a batch already hold its global denominators (C8).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from streamrl.policy.precision import mixed_precision


def rank_device(rank: int) -> torch.device:
    """Where a trainer rank computes: rank r on CUDA device r, modulo how many there are, else on the CPU."""
    return torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")


def init_ranks(rank: int, world_size: int, store_path: str | Path, timeout_s: float = 300.0) -> DeviceMesh | None:
    """Join the trainer ranks of this host through the file ``store_path``, new for each start; returns their 1-D mesh.

    NCCL where CUDA is there (``rank_device``), else gloo on the loopback interface. One rank needs no process
    group: returns None. Collective; a collective in which a rank is missing fails after ``timeout_s`` seconds.
    """
    if world_size == 1:
        return None
    device = rank_device(rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        # By default gloo binds to whatever the host name resolves to, which may be public or not resolve at all.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(str(store_path), world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    return dist.init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))


def close_ranks() -> None:
    """Leave the process group, if there is one. Idempotent."""
    if dist.is_initialized():
        dist.destroy_process_group()


def shard(root: nn.Module, layers: nn.ModuleList, mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> None:
    """Shard ``root`` in place over the ranks of ``mesh``: each of ``layers`` alone, everything else with the root.

    ``root`` is the module whose forward the trainer calls; embedding and head lie in its own unit, so that tied ones
    stay one parameter. It computes in ``dtype``, but for its ``value`` head. Every rank must hold equal parameters;
    frozen ones are sharded too, and get no gradient.
    Layers stay gathered between forward and backward on CPU, where memory is cheaper than another gather.
    """
    again = mesh.device_type != "cpu"
    policy = mixed_precision(dtype)
    value = getattr(root, "value", None)
    if value is not None:
        fully_shard(value, mesh=mesh, reshard_after_forward=again)
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=again, mp_policy=policy)
    fully_shard(root, mesh=mesh, reshard_after_forward=again, mp_policy=policy)
    for module in _units(root):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def accumulate_only(root: nn.Module, on: bool) -> None:
    """Whether the next backward passes keep gradients on their rank (``on``) or sum them over the ranks."""
    if isinstance(root, FSDPModule):
        root.set_requires_gradient_sync(not on)
        root.set_is_last_backward(not on)


def reshard(root: nn.Module) -> None:
    """Free the gathered parameters that a forward pass without backward left behind."""
    for module in _units(root):
        module.reshard()


def full_parameters(
    parameters: Iterable[tuple[str, Tensor]], dtype: torch.dtype = torch.float32
) -> Iterator[tuple[str, Tensor]]:
    """``(name, full tensor in dtype)`` of each of ``parameters``.

    Collective: gathers one parameter at a time, so that every rank must walk the whole iterator in step. On one rank
    the tensors are the parameters' own storage where they have that dtype, not copies.
    """
    for name, parameter in parameters:
        tensor = parameter.detach().to(dtype)
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather_rows(table: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The rows ``[N_rank, K]`` of all ranks, one rank after the other, ``[ΣN, K]``. Collective; equal on all ranks."""
    if group is None:
        return table
    size = torch.tensor([len(table)], device=table.device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    longest = max(int(each) for each in sizes)
    padded = torch.cat([table, table.new_zeros(longest - len(table), table.shape[1])])
    every = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(every, padded, group=group)
    return torch.cat([rows[: int(count)] for rows, count in zip(every, sizes, strict=True)])


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor, or the tensor itself where nothing is sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rows_of_rank(full: Tensor, parameter: Tensor) -> Tensor:
    """The rows of ``full`` ``[N, …]`` that this rank holds of ``parameter``, which FSDP2 shards as ``torch.chunk``."""
    if not isinstance(parameter, DTensor):
        return full
    size = -(-len(full) // parameter.device_mesh.size())
    start = parameter.device_mesh.get_local_rank() * size
    return full[start : start + size]


def _units(root: nn.Module) -> list[FSDPModule]:
    return [module for module in root.modules() if isinstance(module, FSDPModule)]
