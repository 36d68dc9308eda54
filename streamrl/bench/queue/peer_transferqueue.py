"""TransferQueue (of verl) with its own storage units: a put per group, a batch by sampling, then the data.

Its controller samples whole groups, answers at once when there are too few (``polling_mode``; the alternative sleeps
for seconds inside the controller), and the consumer asks again after ``POLL_S``. The controller and two storage units
are Ray actors, as it ships. Nothing bounds the queue. Needs ``pip install 'streamrl[bench]'``.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from typing import Any

from streamrl.bench.queue import peer_ray
from streamrl.bench.queue.roles import Meter, Schedule
from streamrl.bench.queue.stage import Job, Port
from streamrl.bench.queue.workload import POOL, Arrays, pool
from streamrl.errors import ConfigError

POLL_S = 0.001
"""Between two questions of the consumer while there is no whole batch."""
PARTITION, TASK = "train", "train"
FIELDS = ["ids", "logprobs", "versions", "mask", "reward", "place"]
"""Columns; ``place`` is (group, index)."""


def check_installed() -> None:
    """Raise ``ConfigError`` where TransferQueue is missing."""
    for package in ("transfer_queue", "ray"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"--peer transferqueue: the package {package} is not installed; pip install 'streamrl[bench]'"
            )


def serve(job: Job, port: Port) -> None:
    os.environ["TQ_PRE_ALLOC_SAMPLE_NUM"] = str(job.workload.group_size)  # so that rows of a group are neighbours
    address = peer_ray.start(job.folder)
    queue = _transfer_queue()
    import ray
    from omegaconf import OmegaConf

    sampler = queue.GRPOGroupNSampler(n_samples_per_prompt=job.workload.group_size)
    settings = {"controller": {"sampler": sampler, "polling_mode": True}}
    queue.init(OmegaConf.create(settings, flags={"allow_objects": True}))
    port.tell("ready", address=address)
    port.wait_until_finished()
    queue.close()
    ray.shutdown()


def produce(job: Job, port: Port) -> None:
    client = _client(job)
    import torch
    from tensordict import TensorDict

    torch.set_num_threads(1)
    arrays = pool(job.workload)
    port.ready()
    schedule = Schedule(job)
    for group in schedule:
        numbers = [job.workload.number(group, index) for index in range(job.workload.group_size)]
        columns = _columns([arrays[number % POOL] for number in numbers])
        columns["reward"] = torch.tensor(numbers, dtype=torch.float64).unsqueeze(1)
        columns["place"] = torch.tensor([(group, index) for index in range(len(numbers))])
        client.put(TensorDict(columns, batch_size=len(numbers)), partition_id=PARTITION)
    port.wait_until_finished()
    port.told["put_at"] = schedule.put_at
    _close()


def _columns(trajectories: list[Arrays]) -> dict[str, Any]:
    """Of one group, ``[G, T]`` or ``[G, A]`` each: all are of one length, so nothing needs padding."""
    import torch

    return {
        name: torch.stack([torch.from_numpy(getattr(arrays, name)) for arrays in trajectories])
        for name in ("ids", "logprobs", "versions", "mask")
    }


def consume(job: Job, port: Port) -> None:
    client = _client(job)
    import torch

    torch.set_num_threads(1)
    size = job.workload.groups_per_batch * job.workload.group_size
    port.ready()
    meter = Meter(job, port)
    while not meter.complete:
        while not (rows := client.get_meta(FIELDS, size, PARTITION, mode="fetch", task_name=TASK)).size:
            time.sleep(POLL_S)
        data = client.get_data(rows)
        columns = [[row.numpy() for row in data[name].unbind()] for name in FIELDS]  # nested tensors, if of one length
        meter.arrived(sorted({int(place[0]) for place in columns[-1]}))
        for *arrays, reward, place in zip(*columns, strict=True):
            meter.verifier.take(int(place[0]), int(place[1]), float(reward[0]), *arrays)
        client.clear_samples(rows)
        meter.settled(job.workload.groups_per_batch)
    port.wait_until_finished()
    _close()


def _transfer_queue() -> Any:
    logging.disable(logging.WARNING)
    import transfer_queue

    return transfer_queue


def _client(job: Job) -> Any:
    peer_ray.connect(job.address)
    queue = _transfer_queue()
    queue.init()
    return queue.get_client()


def _close() -> None:
    import ray

    ray.shutdown()
