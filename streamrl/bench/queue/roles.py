"""What all contenders have in common: the schedule of a producer, the clock and the check of the consumer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from streamrl.bench.queue.stage import Job, Port
from streamrl.bench.queue.workload import Verifier


class Schedule:
    """When this producer puts which group, and when it did.

    With ``job.groups_per_s`` all producers together offer that many, evenly spaced, whatever became of earlier ones.
    """

    def __init__(self, job: Job) -> None:
        self.paced = job.groups_per_s is not None
        self._job = job
        self._started = time.monotonic()
        self.put_at: dict[int, float] = {}
        """Monotonic seconds at which each group was put, on a schedule only."""

    def due(self, group: int) -> float:
        """Monotonic seconds."""
        assert self._job.groups_per_s is not None
        return self._started + group / self._job.groups_per_s

    def put(self, group: int) -> None:
        """``group`` is put now."""
        if self.paced:
            self.put_at[group] = time.monotonic()

    def __iter__(self) -> Iterator[int]:
        """This producer's groups when they are due, for a producer that blocks.

        A group that is late, because the producer was still busy with the one before, counts from when it was due.
        """
        for group in self._job.own_groups:
            if self.paced:
                left = self.due(group) - time.monotonic()
                time.sleep(max(0.0, left))
                self.put_at[group] = time.monotonic() if left > 0 else self.due(group)
            yield group


class Meter:
    """The consumer's clock and its verifier.

    For each batch: ``arrived`` as soon as it is complete, then ``verifier.take`` for every trajectory, then
    ``settled`` once it is acknowledged. The clock runs over all of that.
    """

    def __init__(self, job: Job, port: Port) -> None:
        self.verifier = Verifier(job.workload, job.groups)
        self._job = job
        self._port = port
        self._groups = 0
        self._started = 0.0
        self._ready_at: dict[int, float] = {}

    @property
    def complete(self) -> bool:
        """All groups of the run have been settled."""
        return self._groups >= self._job.groups

    def arrived(self, groups: Sequence[int]) -> None:
        if self._job.groups_per_s is not None:
            now = time.monotonic()
            self._ready_at.update((group, now) for group in groups)

    def settled(self, groups: int) -> None:
        """``groups`` more are taken, verified and acknowledged."""
        before, self._groups = self._groups, self._groups + groups
        if before < self._job.warm_up <= self._groups:
            self._port.tell("begin")
            self._started = time.monotonic()
        if self.complete:
            seconds = time.monotonic() - self._started
            self.verifier.finish()
            self._port.told["ready_at"] = self._ready_at
            self._port.tell("end", seconds=seconds)
