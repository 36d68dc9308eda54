"""``streamrl bench queue``: measures the sections that are asked for and prints one table.

::

    throughput   trajectories/s, CPU seconds per 1,000 and resident memory, as fast as it goes, batches of 64
    latency      put → batch ready, at 100 trajectories/s offered on a fixed schedule, batches of one group
    sizes        MB/s of the ZeroMQ and the NIXL backend for trajectories of 64 KB to 16 MB, batches of 4
    memory       resident growth of the processes while the consumer stands still, against ``buffer.max_bytes``

4 producers and 1 consumer, all in processes of their own. The baseline is the fastest of the plain pyzmq variants that
carry the field's bytes. CPU seconds and memory are those of all processes of a contender together. What the consumer
does to verify (``workload.py``) is inside the measured time of every contender.
"""

from __future__ import annotations

import signal
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from streamrl.bench.queue.contenders import (
    NIXL,
    RAW,
    RAW_NARROW,
    ZMQ,
    ZMQ_JOURNAL,
    ours,
    peers,
    with_nixl,
    with_options,
)
from streamrl.bench.queue.rounds import for_seconds, in_turn, on_schedule
from streamrl.bench.queue.stage import Contender, Job, Outcome
from streamrl.bench.queue.workload import Workload
from streamrl.bench.report import Row, publish, summarise
from streamrl.errors import StreamRLError

OFFERED_PER_S = 100.0
"""Trajectories, in the latency section."""
LATENCY_FACTOR = 5.0
"""A run of the latency section takes so many times ``seconds``: quantiles need groups."""
SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
"""Bytes of a trajectory, in the sizes section."""
HELD_BATCHES = 6
"""That the byte limit has room for, in the sizes section."""
MEMORY_LIMIT_BYTES = 256 << 20
STOPPED_S = 6.0
"""That the consumer stands still: several times what producers need to reach the limit."""

UNPACED = 1 << 16
"""``max_lag`` of the memory section, so that bytes and not leases run out."""
IDLE_S = 1.0
"""That a producer must have been held back for at the end of that time."""


def throughput(chosen: Sequence[Contender], runs: int, seconds: float) -> Iterator[Row]:
    measured = in_turn([*RAW, RAW_NARROW, *ours(), *chosen], runs, for_seconds(Workload(), seconds))
    rates = {name: [outcome.rate for outcome in outcomes] for name, outcomes in measured.items()}
    cpu = {name: [outcome.cpu_per_1000 for outcome in outcomes] for name, outcomes in measured.items()}
    baseline = max((contender.name for contender in RAW), key=lambda name: statistics.median(rates[name]))
    for name, outcomes in measured.items():
        against = None if name == baseline else baseline
        where = f"throughput/{name}"
        yield summarise(f"{where}/rate", "trajectories/s", rates[name], rates[against] if against else None)
        yield summarise(f"{where}/cpu", "CPU s/1,000", cpu[name], cpu[against] if against else None)
        yield summarise(f"{where}/memory", "MB", [outcome.memory_bytes / 1e6 for outcome in outcomes])
    yield summarise(
        "throughput/journal on against off/rate", "trajectories/s", rates[ZMQ_JOURNAL.name], rates[ZMQ.name]
    )


def latency(chosen: Sequence[Contender], runs: int, seconds: float) -> Iterator[Row]:
    workload = Workload(groups_per_batch=1)
    schedule = on_schedule(workload, OFFERED_PER_S / workload.group_size, seconds * LATENCY_FACTOR)
    baseline = RAW[0]
    measured = in_turn([baseline, *ours(), *chosen], runs, schedule)
    for quantile in (50, 99):
        values = {
            name: [float(np.percentile(latencies_ms(outcome), quantile)) for outcome in outcomes]
            for name, outcomes in measured.items()
        }
        for name, each in values.items():
            yield summarise(
                f"latency/{name}/p{quantile}", "ms", each, None if name == baseline.name else values[baseline.name]
            )


def latencies_ms(outcome: Outcome) -> list[float]:
    """Put → batch ready of every group after the warm-up, by the one monotonic clock of the host."""
    put_at = {group: when for told in outcome.told.values() for group, when in told.get("put_at", {}).items()}
    ready_at = outcome.told["consumer"]["ready_at"]
    return [1e3 * (ready_at[group] - put_at[group]) for group in ready_at if int(group) >= outcome.job.warm_up]


def sizes(runs: int, seconds: float) -> Iterator[Row]:
    if not with_nixl(NIXL):
        return
    faster: dict[int, bool] = {}
    for size in SIZES:
        workload = Workload(prompt=64, answer=192, group_size=2, groups_per_batch=2, router_bytes=size)
        batch_bytes = workload.groups_per_batch * workload.group_size * workload.trajectory_bytes
        limit = max(32 << 20, HELD_BATCHES * batch_bytes)
        contenders = [with_options(contender, limit_bytes=limit) for contender in (ZMQ, NIXL)]
        measured = in_turn(contenders, runs, for_seconds(workload, seconds))
        by_value, by_reference = (
            [outcome.rate * workload.router_bytes / 1e6 for outcome in measured[contender.name]]
            for contender in contenders
        )
        yield summarise(f"sizes/{size >> 10} KB/{ZMQ.name}", "MB/s", by_value)
        yield summarise(f"sizes/{size >> 10} KB/{NIXL.name}", "MB/s", by_reference, by_value)
        faster[size] = statistics.median(by_reference) >= statistics.median(by_value)
    print(crossover(faster))


def crossover(faster: dict[int, bool]) -> str:
    """``faster``: by size in bytes, ascending, whether NIXL was at least as fast as ZeroMQ."""
    start = None
    for size, is_faster in faster.items():
        start = (start or size) if is_faster else None
    if start is None:
        return f"NIXL is slower than ZeroMQ at {max(faster) >> 10} KB a trajectory, the largest size measured"
    return f"NIXL is at least as fast as ZeroMQ from {start >> 10} KB a trajectory on"


def memory(runs: int) -> Iterator[Row]:
    def make_job(_: Outcome | None) -> Job:
        return Job(Workload(), groups=1 << 20, warm_up=0)  # more than will ever be sent

    contenders = [
        with_options(contender, limit_bytes=MEMORY_LIMIT_BYTES, max_lag=UNPACED, stopped=STOPPED_S)
        for contender in (ZMQ, ZMQ_JOURNAL, *with_nixl(NIXL))
    ]
    limit = [MEMORY_LIMIT_BYTES / 1e6]
    for name, outcomes in in_turn(contenders, runs, make_job).items():
        for outcome in outcomes:
            _check_held_back(name, outcome)
        grown = [{process: told["grown_bytes"] / 1e6 for process, told in outcome.told.items()} for outcome in outcomes]
        server = [each["server"] for each in grown]
        producers = [sum(value for process, value in each.items() if process.startswith("producer")) for each in grown]
        yield summarise(f"memory/{name}/buffer grows", "MB", server, limit)
        yield summarise(f"memory/{name}/4 producers grow", "MB", producers)


def _check_held_back(name: str, outcome: Outcome) -> None:
    busy = [process for process, told in outcome.told.items() if told.get("idle_s", IDLE_S) < IDLE_S]
    if busy:
        raise StreamRLError(
            f"{name}: after {outcome.seconds:.0f} s without a consumer, {', '.join(busy)} still delivered"
        )


def run(json_path: Path | None, names: Sequence[str], runs: int, only: str | None, seconds: float) -> list[Row]:
    """Measure, print the table, write the rows to ``json_path`` if given.

    Raises ``ConfigError`` where a peer is not installed, ``StreamRLError`` where a trajectory was lost, altered or
    delivered twice, or a process failed; no process is left behind.
    """
    chosen = peers(names)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends like Ctrl-C: processes and folders are cleaned up
    sections: dict[str, Callable[[], Iterator[Row]]] = {
        "throughput": lambda: throughput(chosen, runs, seconds),
        "latency": lambda: latency(chosen, runs, seconds),
        "sizes": lambda: sizes(runs, seconds),
        "memory": lambda: memory(runs),
    }
    rows = [
        replace(row, name=f"queue/{row.name}")
        for name, measure in sections.items()
        if only in (None, name)
        for row in measure()
    ]
    publish(rows, json_path)
    return rows
