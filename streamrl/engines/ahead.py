"""Weights of the version that comes, on the device of the one that serves: what ``sync.stage=device`` is about.

A cancellation waits for the end of what reads the tensors: whoever cancels may write to their memory next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import TypeVar

import torch

Result = TypeVar("Result")


def on_device(tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """``tensors`` on ``device``: on a CPU as they are, on a GPU copied beside the kernels that run there. Blocking.

    The copies have a stream of their own, and memory of the default one, on which they will be used and freed.
    """
    if device.type != "cuda":
        return dict(tensors)
    fresh = {name: torch.empty_like(tensor, device=device) for name, tensor in tensors.items()}
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.default_stream(device))  # the memory may have had another use there
    with torch.cuda.stream(stream):
        for name, tensor in tensors.items():
            fresh[name].copy_(tensor, non_blocking=True)
    stream.synchronize()
    return fresh


async def finished(work: Awaitable[Result]) -> Result:
    """``work``; a cancellation takes effect at its end."""
    working = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait({working})
        if not working.cancelled():
            working.exception()  # nobody else asks
        raise
