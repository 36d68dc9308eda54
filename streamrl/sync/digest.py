"""One number for all weights of a version, to compare runs by."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import xxhash

from streamrl.sync.manifest import Manifest


def weights_digest(manifest: Manifest, digests: Sequence[int]) -> str:
    """xxh3-128, 32 hex digits, over the bucket plan and the ``digests`` of its buckets: ``Arena.write`` gives them.

    Equal for two processes exactly if names, shapes, dtypes, ``sync.bucket_bytes`` and every bit of the weights are.
    """
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode((manifest.fingerprint, list(digests))))
