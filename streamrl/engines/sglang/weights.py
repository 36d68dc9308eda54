"""Weights on their way to SGLang: verified tensors in bodies of bounded size.

A payload that SGLang cannot read ends its server, so only what a ``Blueprint`` verified comes here.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterable, Iterator
from types import SimpleNamespace

import msgspec
import torch
from torch import Tensor

BUCKET_BYTES = 64 << 20
"""Of the tensors in one call; a larger tensor has one of its own. A body takes three times as much memory."""

Named = list[tuple[str, Tensor]]


def buckets(named: Iterable[tuple[str, Tensor]]) -> Iterator[Named]:
    """In order, each of at most ``BUCKET_BYTES`` or of one tensor."""
    bucket: Named = []
    size = 0
    for name, tensor in named:
        if bucket and size + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def body(bucket: Named, *, version: int | None, flush: bool, copies: int) -> bytes:
    """The JSON of ``/update_weights_from_tensor``: the bucket as one flat tensor, by value, once per ``copies``.

    ``version`` labels the weights that are complete with this bucket. The pickle is SGLang's format, which it reads
    with a list of allowed classes (a namespace stands for its ``FlattenedTensorMetadata``); nothing here reads one.
    """
    flat = torch.cat([tensor.detach().contiguous().reshape(-1).view(torch.uint8) for _, tensor in bucket])
    metadata, start = [], 0
    for name, tensor in bucket:
        end = start + tensor.nbytes
        described = {"name": name, "shape": tensor.shape, "dtype": tensor.dtype}
        metadata.append(SimpleNamespace(**described, start_idx=start, end_idx=end, numel=tensor.nbytes))
        start = end
    payload = base64.b64encode(pickle.dumps({"flattened_tensor": flat, "metadata": metadata})).decode()
    fields: dict[str, object] = {
        "serialized_named_tensors": [payload] * copies,
        "load_format": "flattened_bucket",
        "flush_cache": flush,
        "abort_all_requests": False,
    }
    if version is not None:
        fields["weight_version"] = str(version)
    return msgspec.json.encode(fields)
