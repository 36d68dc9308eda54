"""streamrl's own queue with all that a run has: leases, byte limit, deadlines, checksums, acknowledgements, events.

``options``: ``backend`` (``zmq``, ``nixl``), ``transport`` (``ipc``, ``tcp`` with its keys), ``journal`` (with the
default fsync policy, in the folder of the run), ``limit_bytes`` (``buffer.max_bytes``, and with NIXL of the arenas
together), ``max_lag``, ``stopped``: the consumer stands still for so many seconds and takes nothing.

Producers learn the published version through shared memory, as rollouters do by a weight update.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import uvloop

from streamrl.actors.planning import estimators
from streamrl.bench.queue.roles import Meter, Schedule
from streamrl.bench.queue.stage import Job, Port
from streamrl.bench.queue.workload import POOL, Arrays, Workload, pool, router_column
from streamrl.buffers.journaling import open_journal
from streamrl.buffers.links.link_keys import LinkKeys
from streamrl.buffers.queue.arena_place import ArenaPlace, ArenaSource
from streamrl.buffers.queue.clients import QueueConsumer, QueueProducer
from streamrl.buffers.queue.server import QueueServer
from streamrl.buffers.replay_buffer import ReplayBuffer
from streamrl.clock import RealClock
from streamrl.errors import StreamRLError
from streamrl.schema import Config
from streamrl.types import Group, Lease, RankBatch, Trajectory, VersionSpans, append_version

WINDOW = 8
"""Groups that a producer may have under way without an acknowledgement."""
LIMIT_BYTES = 32 << 20
"""``buffer.max_bytes`` unless the options say otherwise: 20 batches, small enough for the caches of a server."""
MAX_LAG = 256
"""``max_lag`` unless the options say otherwise: the byte limit and not pacing holds producers back, and a process that
the machine leaves aside for a while does not make its groups too old."""
ROUTER = "router"
GIVING_WAY = ("lease_evicted", "lease_reissued", "group_refused")
"""Events of groups whose columns found no room, which is how the byte limit is kept."""


def settings(job: Job) -> Config:
    config = Config()
    config.group.size = job.workload.group_size
    config.group.per_step = job.workload.groups_per_batch
    config.model.max_length = job.workload.tokens
    config.max_lag = job.options.get("max_lag", MAX_LAG)
    config.queue.backend = job.options["backend"]
    config.queue.transport = job.options["transport"]
    config.queue.checksum = True
    config.buffer.max_bytes = job.options.get("limit_bytes", LIMIT_BYTES)
    config.buffer.journal = job.options["journal"]
    config.queue.arena_bytes = config.buffer.max_bytes // job.producers
    return config


def share(context: SpawnContext) -> Any:
    """The published version."""
    return context.RawValue("q", 0)


def serve(job: Job, port: Port) -> None:
    uvloop.run(_serve(job, port))


async def _serve(job: Job, port: Port) -> None:
    config = settings(job)
    events: list[str] = []
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_event(name: str, fields: dict[str, Any]) -> None:
        events.append(f"{name} {fields}")

    buffer = ReplayBuffer(config, *estimators(config))
    clock = RealClock()
    journal = None
    if config.buffer.journal:
        journal = open_journal(Path(job.folder, "journal"), buffer, clock.now(), on_event)
    endpoint = "tcp://127.0.0.1:*" if config.queue.transport == "tcp" else f"ipc://{job.folder}/queue"
    keys = _keys(job)
    server = QueueServer(endpoint, buffer, clock, on_event, ended.set_exception, journal=journal, keys=keys)
    serving = asyncio.create_task(server.run())
    await asyncio.sleep(0)  # it binds in its first step
    resident = _Resident(port)
    port.tell("ready", address=server.endpoint)
    await _until_finished(port, serving, ended)
    resident.tell()
    await _end(serving)
    faults = [event for event in events if not event.startswith(GIVING_WAY)]
    if faults:
        raise StreamRLError(f"a run without faults had {len(faults)} events, the first of them {faults[0]}")


def produce(job: Job, port: Port) -> None:
    uvloop.run(_produce(job, port))


async def _produce(job: Job, port: Port) -> None:
    config = settings(job)
    name = f"producer-{job.producer}"
    place = ArenaPlace(name, config.queue.arena_bytes) if config.queue.backend == "nixl" else None
    producer = QueueProducer(job.address, name, keys=_keys(job), checksum=config.queue.checksum, place=place)
    trajectories = [_columns(job.workload, arrays) for arrays in pool(job.workload)]
    resident = _Resident(port)
    port.ready()
    schedule = Schedule(job)
    last_put = time.monotonic()

    window = asyncio.Semaphore(WINDOW)

    async def deliver(lease: Lease) -> None:
        if schedule.paced:
            await asyncio.sleep(schedule.due(lease.prompt) - time.monotonic())
        group = _group(job, lease, trajectories)
        schedule.put(lease.prompt)
        status = await producer.put(group)
        if status not in ("accepted", "late"):  # late: it gave way to larger groups, and is issued again
            raise StreamRLError(f"group {lease.prompt} was {status}")
        nonlocal last_put
        last_put = time.monotonic()
        window.release()

    async def deliver_all() -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                await window.acquire()
                wanted = 1
                while not window.locked():
                    await window.acquire()
                    wanted += 1
                leases = await producer.lease(wanted)
                for lease in leases:
                    if lease.prompt >= job.groups:
                        return
                    tasks.create_task(deliver(lease))
                for _ in range(wanted - len(leases)):
                    window.release()

    delivering = asyncio.create_task(deliver_all())
    await _until_finished(port, delivering)
    resident.tell()
    port.told["idle_s"] = time.monotonic() - last_put
    port.told["put_at"] = schedule.put_at
    await _end(delivering)
    producer.close()


def consume(job: Job, port: Port) -> None:
    uvloop.run(_consume(job, port))


async def _consume(job: Job, port: Port) -> None:
    source = ArenaSource("consumer") if settings(job).queue.backend == "nixl" else None
    consumer = QueueConsumer(job.address, 0, 1, keys=_keys(job), source=source)
    await consumer.published(job.shared.value)
    resident = _Resident(port)
    port.ready()
    if "stopped" in job.options:
        port.tell("begin")
        await asyncio.sleep(job.options["stopped"])
        port.tell("end", seconds=job.options["stopped"])
    else:
        await _train(job, port, consumer)
    await asyncio.to_thread(port.wait_until_finished)
    resident.tell()
    consumer.close()


async def _train(job: Job, port: Port, consumer: QueueConsumer) -> None:
    meter = Meter(job, port)
    columns = (ROUTER,) if job.workload.router_bytes else ()
    version = 0  # one step each
    coming = asyncio.ensure_future(consumer.next_batch(version, version, columns))
    while not meter.complete:
        batch = await coming
        trajectories = [t for parts in batch.micro_batches for part in parts for t in part.trajectories]
        groups = {int(trajectory.reward) // job.workload.group_size for trajectory in trajectories}
        meter.arrived(sorted(groups))
        _verify(job.workload, meter, batch)
        done = [asyncio.ensure_future(consumer.acknowledge(version, version))]
        version += 1
        job.shared.value = version  # producers first: a lease that this frees must not get tokens of an older version
        done.append(asyncio.ensure_future(consumer.published(version)))
        # Requests of one consumer are carried out in their order, so it need not wait for one to make the next.
        coming = asyncio.ensure_future(consumer.next_batch(version, version, columns))
        await asyncio.gather(*done)
        meter.settled(len(groups))
    coming.cancel()


def _verify(workload: Workload, meter: Meter, batch: RankBatch) -> None:
    """Each reward is the trajectory's number in the run, which says what it must hold."""
    for parts in batch.micro_batches:
        for part in parts:
            for trajectory in part.trajectories:
                meter.verifier.take(
                    *divmod(int(trajectory.reward), workload.group_size),
                    trajectory.reward,
                    trajectory.tokens,
                    trajectory.behaviour[workload.prompt :],
                    _spans_as_sent(workload, trajectory),
                    trajectory.sampled,
                    trajectory.columns[ROUTER] if workload.router_bytes else None,
                )


def _spans_as_sent(workload: Workload, trajectory: Trajectory) -> VersionSpans:
    """As in the pool, from 0. What was made under version 0 has no older version, and thus no second span."""
    if trajectory.versions == [(0, workload.answer)]:
        return pool(workload)[int(trajectory.reward) % POOL].spans
    oldest = trajectory.oldest_version
    return [(version - oldest, count) for version, count in trajectory.versions]


def _columns(workload: Workload, arrays: Arrays) -> Trajectory:
    behaviour = np.zeros(workload.tokens, dtype=np.float32)
    behaviour[workload.prompt :] = arrays.logprobs
    columns = {ROUTER: router_column(workload)} if workload.router_bytes else {}
    return Trajectory(
        arrays.ids.astype(np.int32), arrays.mask.astype(np.bool_), behaviour, arrays.spans, columns=columns
    )


def _group(job: Job, lease: Lease, trajectories: list[Trajectory]) -> Group:
    """Its first tokens are of the version before the published one, as if an update had come in between."""
    published = job.shared.value
    members = []
    for index in range(job.workload.group_size):
        number = job.workload.number(lease.prompt, index)
        like = trajectories[number % POOL]
        spans: VersionSpans = []
        for newer, count in like.versions:  # of the pool: 0, then 1
            append_version(spans, max(0, published - 1 + newer), count)
        members.append(
            Trajectory(like.tokens, like.sampled, like.behaviour, spans, float(number), columns=like.columns)
        )
    return Group(lease.id, lease.prompt, "bench", members)


def _keys(job: Job) -> LinkKeys | None:
    """Of the run; the server, which starts first, makes them."""
    if job.options["transport"] != "tcp":
        return None
    path = Path(job.folder, "keys")
    if not path.exists():
        LinkKeys.new().save(path)
    return LinkKeys.load(path)


async def _until_finished(port: Port, *tasks: asyncio.Future[Any]) -> None:
    """Until the bench says so; a task that fails earlier ends it, one that still runs is left alone."""
    finished = asyncio.ensure_future(asyncio.to_thread(port.wait_until_finished))
    waiting: set[asyncio.Future[Any]] = {finished, *tasks}
    while finished in waiting:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


class _Resident:
    """Growth of this process's resident memory, for ``port.told``."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._before = psutil.Process().memory_info().rss

    def tell(self) -> None:
        self._port.told["grown_bytes"] = psutil.Process().memory_info().rss - self._before
