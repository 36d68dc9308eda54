"""``multiprocessing.Queue``: every producer puts whole groups of arrays, the queue pickles them through a pipe.

Bounded, so a producer waits for the consumer; it knows no acknowledgement, so there is none.
"""

from __future__ import annotations

from multiprocessing.context import SpawnContext
from typing import Any

from streamrl.bench.queue.roles import Meter, Schedule
from streamrl.bench.queue.stage import PRODUCERS, Job, Port
from streamrl.bench.queue.workload import POOL, pool

WINDOW = 8
"""Groups per producer that the queue holds."""


def check_installed() -> None:
    """Part of Python."""


def share(context: SpawnContext) -> Any:
    return context.Queue(PRODUCERS * WINDOW)


def produce(job: Job, port: Port) -> None:
    arrays = [each[:4] for each in pool(job.workload)]
    port.ready()
    schedule = Schedule(job)
    for group in schedule:
        numbers = [job.workload.number(group, index) for index in range(job.workload.group_size)]
        job.shared.put((group, [(float(number), *arrays[number % POOL]) for number in numbers]))
    port.wait_until_finished()
    port.told["put_at"] = schedule.put_at


def consume(job: Job, port: Port) -> None:
    port.ready()
    meter = Meter(job, port)
    while not meter.complete:
        batch = [job.shared.get() for _ in range(job.workload.groups_per_batch)]
        meter.arrived([group for group, _ in batch])
        for group, trajectories in batch:
            for index, (reward, *arrays) in enumerate(trajectories):
                meter.verifier.take(group, index, reward, *arrays)
        meter.settled(len(batch))
    port.wait_until_finished()
