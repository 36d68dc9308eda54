"""What every contender carries, and how the consumer knows that it arrived whole, once, and complete.

A trajectory as the field ships it: ids int64 ``[T]``, log-probs float32 ``[A]``, versions int32 ``[A]``, mask uint8
``[T]`` and a reward; T = 2,560 tokens of which A = 2,048 are sampled make 39,424 bytes. The arrays come from a pool
that both ends compute from the same seed; the reward is the number of the trajectory in the run. So the consumer can
tell a trajectory that was altered, swapped, lost or delivered twice, at the price of comparing every 64th element.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from streamrl.errors import StreamRLError
from streamrl.types import VersionSpans, expand_versions

POOL = 64
"""Different trajectories. Trajectory ``n`` of a run has the arrays ``n % POOL``."""
STRIDE = 64
"""Of each array the elements ``n % STRIDE + k × STRIDE`` are compared: all of them, over the pool."""


class Arrays(NamedTuple):
    """The arrays of one trajectory."""

    ids: np.ndarray
    """int64 ``[T]``."""
    logprobs: np.ndarray
    """float32 ``[A]``."""
    versions: np.ndarray
    """int32 ``[A]``."""
    mask: np.ndarray
    """uint8 ``[T]``."""
    spans: VersionSpans
    """``versions``, run-length encoded."""


@dataclass(frozen=True)
class Workload:
    """Sizes of one run."""

    prompt: int = 512
    """Prompt tokens."""
    answer: int = 2048
    """Sampled tokens (A)."""
    group_size: int = 8
    """Trajectories of a group."""
    groups_per_batch: int = 8
    """Groups that the consumer takes at once."""
    router_bytes: int = 0
    """Size of a further column, uint8, that makes a trajectory large; 0: there is none."""

    @property
    def tokens(self) -> int:
        """T."""
        return self.prompt + self.answer

    @property
    def trajectory_bytes(self) -> int:
        """Bytes of the arrays of one trajectory, as the field ships it."""
        return self.tokens * (8 + 1) + self.answer * (4 + 4) + self.router_bytes

    def number(self, group: int, index: int) -> int:
        """Of trajectory ``index`` of ``group`` in the run; also its reward."""
        return group * self.group_size + index


@lru_cache(maxsize=4)
def pool(workload: Workload) -> list[Arrays]:
    """The same ``POOL`` trajectories in every process."""
    rng = np.random.default_rng(workload.tokens)
    return [_arrays(workload, rng) for _ in range(POOL)]


def _arrays(workload: Workload, rng: np.random.Generator) -> Arrays:
    switched = int(rng.integers(1, workload.answer))
    spans = [(0, switched), (1, workload.answer - switched)]
    mask = np.zeros(workload.tokens, dtype=np.uint8)
    mask[workload.prompt :] = 1
    return Arrays(
        ids=rng.integers(0, 1 << 17, workload.tokens, dtype=np.int64),
        logprobs=-rng.random(workload.answer, dtype=np.float32),
        versions=expand_versions(spans).astype(np.int32),
        mask=mask,
        spans=spans,
    )


@lru_cache(maxsize=1)
def router_column(workload: Workload) -> np.ndarray:
    """The further column, uint8 ``[router_bytes]``; one array for every trajectory."""
    return np.frombuffer(np.random.default_rng(1).bytes(workload.router_bytes), dtype=np.uint8)


class Verifier:
    """Compares what arrived with what was sent. Raises ``StreamRLError`` at the first difference."""

    def __init__(self, workload: Workload, groups: int) -> None:
        self._workload = workload
        self._pool = pool(workload)
        self._router = router_column(workload)[::STRIDE].tobytes()
        self._seen = np.zeros(groups * workload.group_size, dtype=np.bool_)
        self._expected: dict[tuple[int, str, str], bytes] = {}

    def take(
        self,
        group: int,
        index: int,
        reward: float,
        ids: np.ndarray,
        logprobs: np.ndarray,
        versions: np.ndarray | VersionSpans,
        mask: np.ndarray,
        router: np.ndarray | None = None,
    ) -> None:
        """One trajectory has arrived. Arrays may have another dtype than the field's, but not other values."""
        where = f"group {group}, trajectory {index}"
        number = self._workload.number(group, index)
        if not (0 <= number < len(self._seen) and 0 <= index < self._workload.group_size):
            raise StreamRLError(f"{where}: expected one of {len(self._seen)} trajectories, got one that was never sent")
        if self._seen[number]:
            raise StreamRLError(f"{where}: expected once, arrived twice")
        self._seen[number] = True
        if reward != number:
            raise StreamRLError(f"{where}: expected the reward {number}, got {reward}")
        self._compare(where, number, "ids", ids)
        self._compare(where, number, "logprobs", logprobs)
        self._compare(where, number, "mask", mask)
        if isinstance(versions, np.ndarray):
            self._compare(where, number, "versions", versions)
        elif versions != self._pool[number % POOL].spans:
            raise StreamRLError(f"{where}: its versions are not those that were sent")
        if router is not None and (
            len(router) != self._workload.router_bytes or router[::STRIDE].tobytes() != self._router
        ):
            raise StreamRLError(f"{where}: its router column is not the one that was sent")

    def finish(self) -> None:
        """The run is over: every trajectory must have arrived."""
        lost = np.flatnonzero(~self._seen)
        if len(lost):
            first = divmod(int(lost[0]), self._workload.group_size)
            raise StreamRLError(
                f"{len(lost)} of {len(self._seen)} trajectories never arrived, "
                f"the first of them group {first[0]}, trajectory {first[1]}"
            )

    def _compare(self, where: str, number: int, field: str, array: np.ndarray) -> None:
        key = (number % POOL, field, array.dtype.str)
        expected = self._expected.get(key)
        sent: np.ndarray = getattr(self._pool[number % POOL], field)
        phase = number % STRIDE
        if expected is None:
            expected = self._expected[key] = sent[phase::STRIDE].astype(array.dtype).tobytes()
        if array.shape != sent.shape or array[phase::STRIDE].tobytes() != expected:
            raise StreamRLError(f"{where}: its {field} are not those that were sent")
