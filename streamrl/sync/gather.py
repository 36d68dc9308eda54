"""From sharded parameters to a slot of the slab on rank 0, in pieces of at most a bucket (C5).

A parameter that FSDP2 shards lies in rows: rank r holds the r-th part of them, one range of the flat tensor. Each rank
casts a piece of its rows to the dtype on the wire and sends it to rank 0 alone, which receives it where it is to lie.
Beside the shards this takes the memory of one piece on a rank, and on rank 0 none where the slab's memory can be
received into.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from streamrl.errors import WeightSyncError
from streamrl.sync.arena import Filling
from streamrl.sync.manifest import ITEM_BYTES, Manifest

Named = Iterable[tuple[str, torch.Tensor]]


def gather(named_parameters: Named, manifest: Manifest, filling: Filling | None) -> None:
    """Write every parameter into ``filling`` (rank 0), or give this rank's share (the others: None).

    Collective, in the order of the parameters, equal on all ranks. Values are cast to the dtypes of the manifest.
    Raises ``WeightSyncError`` on every rank alike for a parameter that the manifest lacks or has in another shape.
    """
    places = {tensor.name: tensor for tensor in manifest.tensors}
    with torch.no_grad():
        for name, parameter in named_parameters:
            place = places.get(name)
            if place is None or tuple(parameter.shape) != place.shape:
                shape = tuple(parameter.shape)
                raise WeightSyncError(f"parameter {name!r} {shape} is not in the manifest in this shape: {place}")
            most = max(1, manifest.bucket_bytes // ITEM_BYTES[place.dtype])
            _gather_one(name, parameter.detach(), getattr(torch, place.dtype), most, filling)


def _gather_one(name: str, parameter: torch.Tensor, dtype: torch.dtype, most: int, filling: Filling | None) -> None:
    """``most``: elements of one piece."""
    if isinstance(parameter, DTensor):
        if tuple(parameter.placements) == (Shard(0),):
            _gather_rows(name, parameter, dtype, most, filling)
            return
        parameter = parameter.full_tensor()
    if filling is not None:
        _write(name, parameter.reshape(-1), 0, most, filling)


def _gather_rows(name: str, parameter: DTensor, dtype: torch.dtype, most: int, filling: Filling | None) -> None:
    group = parameter.device_mesh.get_group()
    own, rank = parameter.to_local().reshape(-1), dist.get_rank(group)
    root = dist.get_global_rank(group, 0)
    for owner, (start, stop) in enumerate(_ranges(parameter)):
        if rank == owner and filling is not None:
            _write(name, own, start, most, filling)
        elif rank == owner:
            for offset in range(0, len(own), most):
                dist.send(own[offset : offset + most].to(dtype).contiguous(), dst=root, group=group)
        elif filling is not None:
            _receive(name, start, stop, dist.get_global_rank(group, owner), group, own.device, most, filling)


def _ranges(parameter: DTensor) -> Iterator[tuple[int, int]]:
    """Flat range of each rank's rows: ``torch.chunk``'s, and empty ones after them."""
    ranks, rows = parameter.device_mesh.size(), parameter.shape[0]
    width = parameter.numel() // rows if rows else 0
    chunk = -(-rows // ranks)
    for rank in range(ranks):
        yield min(rank * chunk, rows) * width, min((rank + 1) * chunk, rows) * width


def _write(name: str, values: torch.Tensor, start: int, most: int, filling: Filling) -> None:
    """Values of this rank, from element ``start`` of the tensor on. Cast on the way."""
    if not len(values) and start == 0:
        filling.wrote(name, 0, 0)
    for offset in range(0, len(values), most):
        piece = values[offset : offset + most]
        filling.view(name, start + offset, len(piece)).copy_(piece)
        filling.wrote(name, start + offset, len(piece))


def _receive(
    name: str, start: int, stop: int, source: int, group: Any, device: torch.device, most: int, filling: Filling
) -> None:
    for offset in range(start, stop, most):
        count = min(most, stop - offset)
        out = filling.view(name, offset, count)
        if device.type == "cpu":
            dist.recv(out, src=source, group=group)
        else:  # what came lies in device memory
            landed = torch.empty(count, dtype=out.dtype, device=device)
            dist.recv(landed, src=source, group=group)
            out.copy_(landed)
        filling.wrote(name, offset, count)
