"""Weights of the version that comes, on the device of the one that serves: what ``sync.stage=device`` is about."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch


def on_device(tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """``tensors`` on ``device``: on a CPU as they are, on a GPU copied beside the kernels that run there. Blocking."""
    if device.type != "cuda":
        return dict(tensors)
    fresh = {name: torch.empty_like(tensor, device=device) for name, tensor in tensors.items()}
    with beside_the_kernels(device):
        for name, tensor in tensors.items():
            fresh[name].copy_(tensor, non_blocking=True)
    return fresh


@contextlib.contextmanager
def beside_the_kernels(device: torch.device) -> Iterator[None]:
    """On a GPU, a stream of its own, for writes to memory of the default one, on which that is used and freed."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.default_stream(device))  # the memory may have had another use there
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        stream.synchronize()  # after a failure too: the memory gets another use then, while copies still write to it
