"""Ray's object store and queue actor: an object per group in shared memory, its reference through ``ray.util.queue``.

The queue is bounded, which holds producers back. The consumer has a batch of ``get`` calls under way at all times, so
that a batch costs no round trip per group, and reads the arrays in place. Needs ``pip install 'streamrl[bench]'``.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
from typing import Any

from streamrl.bench.queue.roles import Meter, Schedule
from streamrl.bench.queue.stage import PRODUCERS, Job, Port
from streamrl.bench.queue.workload import POOL, pool
from streamrl.errors import ConfigError

WINDOW = 8
"""Groups per producer that the queue holds."""
NAME = "groups"
QUIET: dict[str, Any] = {"namespace": "streamrl-bench", "logging_level": logging.ERROR, "log_to_driver": False}
STORE_BYTES = 1 << 30
"""Of the object store; far more than is ever in it."""


def check_installed() -> None:
    """Raise ``ConfigError`` where Ray is missing."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("--peer ray: the package ray is not installed; pip install 'streamrl[bench]'")


def connect(address: str) -> None:
    """Join the cluster at ``address`` (host:port and the token, which only this run knows)."""
    where, _, token = address.partition(" ")
    _authenticate(token)
    import ray

    ray.init(where, **QUIET)


def start(folder: str) -> str:
    """A new cluster on this host, which keeps its files in ``folder``; its address, as ``connect`` wants it."""
    token = secrets.token_hex(32)
    _authenticate(token)
    import ray

    size = {"num_cpus": 1 + PRODUCERS, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    context = ray.init("local", _temp_dir=folder, **size, **QUIET)
    return f"{context.address_info['address']} {token}"


def _authenticate(token: str) -> None:
    """Ray reads these when it is imported; without them it would keep a token in the user's home folder."""
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}


def serve(job: Job, port: Port) -> None:
    address = start(job.folder)
    import ray
    from ray.util.queue import Queue

    queue = Queue(PRODUCERS * WINDOW, actor_options={"name": NAME})
    assert queue.empty()  # the actor is up
    port.tell("ready", address=address)
    port.wait_until_finished()
    ray.shutdown()


def produce(job: Job, port: Port) -> None:
    connect(job.address)
    import ray

    actor = ray.get_actor(NAME)
    arrays = [each[:4] for each in pool(job.workload)]
    port.ready()
    schedule = Schedule(job)
    for group in schedule:
        numbers = [job.workload.number(group, index) for index in range(job.workload.group_size)]
        reference = ray.put((group, [(float(number), *arrays[number % POOL]) for number in numbers]))
        ray.get(actor.put.remote([reference]))
    port.wait_until_finished()
    port.told["put_at"] = schedule.put_at
    ray.shutdown()


def consume(job: Job, port: Port) -> None:
    connect(job.address)
    import ray

    actor = ray.get_actor(NAME)
    per_batch = job.workload.groups_per_batch
    port.ready()
    meter = Meter(job, port)
    asked = [actor.get.remote() for _ in range(per_batch)]
    taken = 0
    while not meter.complete:
        references = [reference for (reference,) in ray.get(asked)]
        taken += per_batch
        asked = [actor.get.remote() for _ in range(per_batch)] if taken < job.groups else []
        batch = ray.get(references)
        meter.arrived([group for group, _ in batch])
        for group, trajectories in batch:
            for index, (reward, *arrays) in enumerate(trajectories):
                meter.verifier.take(group, index, reward, *arrays)
        meter.settled(len(batch))
    port.wait_until_finished()
    ray.shutdown()
