"""Bytes per second of what is done to each bucket on its way, by the number of threads that do it at once.

The copy into the slab, the digest, and with ``sync.encoding=delta`` the code of a bucket and its way back. Each thread
works on a bucket of its own, which no cache holds. These are the g and d of docs/weights.md.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from streamrl.bench.report import Row, alternate, summarise
from streamrl.bench.sync.weights import GB
from streamrl.errors import StreamRLError
from streamrl.sync.delta import decode, encode
from streamrl.sync.staging import digest_of
from streamrl.sync.workers import MOST_WORKERS

BUCKET_BYTES = 64 << 20
SHARES = (0.01, 0.2)
"""Of bfloat16 values, that move by one step."""


@dataclass(frozen=True)
class _Bucket:
    """What one thread works on. Every page is there."""

    base: memoryview
    new: memoryview
    out: memoryview
    code: memoryview


def rates(runs: int) -> Iterator[Row]:
    cores = len(os.sched_getaffinity(0))
    counts = sorted({1, *(count for count in (2, 4, MOST_WORKERS) if count <= cores)})
    for share in SHARES:
        buckets = [_bucket(share, seed) for seed in range(counts[-1])]
        work: dict[str, Callable[[_Bucket], object]] = {
            f"code, {share:.0%} changed": lambda bucket: encode(bucket.base, bucket.new, 2),
            f"decode and digest, {share:.0%} changed": lambda bucket: decode(bucket.code, bucket.base, bucket.out),
        }
        if share == SHARES[0]:
            work = {"copy": _copy, "digest": lambda bucket: digest_of(bucket.new)} | work
        for name, each in work.items():
            measured = alternate(runs, *(_timed(each, buckets[:count]) for count in counts))
            for count, values in zip(counts, measured, strict=True):
                threads = f"{count} thread{'s' * (count > 1)}"
                yield summarise(f"{name}, {threads} against one", "GB/s", values, measured[0])


def _bucket(share: float, seed: int) -> _Bucket:
    random = np.random.default_rng(seed)
    base = random.integers(0, 1 << 16, BUCKET_BYTES // 2, np.uint16)
    new = base + (random.random(len(base), np.float32) < share)
    memory, out = new.view(np.uint8).data, np.zeros(BUCKET_BYTES, np.uint8).data
    code = encode(base.view(np.uint8).data, memory, 2)
    if code is None or decode(code, base.view(np.uint8).data, out) != digest_of(memory):
        raise StreamRLError(f"bench sync: a bucket of which {share:.0%} changed did not come back from its code")
    return _Bucket(base.view(np.uint8).data, memory, out, code)


def _copy(bucket: _Bucket) -> None:
    np.copyto(np.frombuffer(bucket.out, np.uint8), np.frombuffer(bucket.new, np.uint8))


def _timed(work: Callable[[_Bucket], object], buckets: list[_Bucket]) -> Callable[[], float]:
    """Bytes of all buckets per second, 1e9 of them, with a thread for each."""

    def measure() -> float:
        with ThreadPoolExecutor(len(buckets)) as threads:
            list(threads.map(lambda bucket: None, buckets))
            started = time.perf_counter()
            list(threads.map(work, buckets))
            return sum(bucket.new.nbytes for bucket in buckets) / (time.perf_counter() - started) / GB

    return measure
