"""Bodies of ``/update_weights_from_tensor``: where verified tensors lie in shared memory, or the tensors by value.

A payload that SGLang cannot read ends its server, so only what a ``Blueprint`` verified comes here. The pickles are
SGLang's format, which it reads with a list of allowed classes; nothing here reads one.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from torch import Tensor

from streamrl.engines.sglang.loader import LOADER, written

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


def placed(where: Mapping[str, Any], *, version: int, flush: bool, copies: int) -> bytes:
    """Of all weights of ``version``, which lie ``where`` a ``Shelf`` says: for a server that sees this memory."""
    return _body(written(where), LOADER, version, flush, copies)


def by_value(bucket: Named, *, version: int | None, flush: bool, copies: int) -> bytes:
    """Of a bucket, as one flat tensor. ``version`` labels the weights that are complete with it.

    A namespace stands for SGLang's ``FlattenedTensorMetadata``.
    """
    flat = torch.cat([tensor.detach().contiguous().reshape(-1).view(torch.uint8) for _, tensor in bucket])
    metadata, start = [], 0
    for name, tensor in bucket:
        end = start + tensor.nbytes
        described = {"name": name, "shape": tensor.shape, "dtype": tensor.dtype}
        metadata.append(SimpleNamespace(**described, start_idx=start, end_idx=end, numel=tensor.nbytes))
        start = end
    return _body({"flattened_tensor": flat, "metadata": metadata}, "flattened_bucket", version, flush, copies)


def _body(content: object, load_format: str, version: int | None, flush: bool, copies: int) -> bytes:
    """JSON with ``content`` once for each of the ``copies`` processes that the model is split over."""
    fields: dict[str, object] = {
        "serialized_named_tensors": [base64.b64encode(pickle.dumps(content)).decode()] * copies,
        "load_format": load_format,
        "flush_cache": flush,
        "abort_all_requests": False,
    }
    if version is not None:
        fields["weight_version"] = str(version)
    return msgspec.json.encode(fields)
