"""Redis streams over a unix socket: an entry per group, a consumer group with XACK, and a list that frees producers.

Needs the client (``pip install 'streamrl[bench]'``) and ``redis-server`` on the path. Nothing is written to disk.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from typing import Any

from streamrl.bench.queue.raw_zmq import HEADER, Packed
from streamrl.bench.queue.roles import Meter, Schedule
from streamrl.bench.queue.stage import Job, Port, die_with_parent
from streamrl.bench.queue.workload import POOL, pool
from streamrl.errors import ConfigError

WINDOW = 8
"""Groups that a producer may have under way without an acknowledgement."""
STREAM, READERS, CONSUMER = "groups", "trainers", "trainer-0"


def check_installed() -> None:
    """Raise ``ConfigError`` where the client or the server is missing."""
    if importlib.util.find_spec("redis") is None:
        raise ConfigError("--peer redis: the package redis is not installed; pip install 'streamrl[bench]'")
    if shutil.which("redis-server") is None:
        raise ConfigError(
            "--peer redis: redis-server is not on the path; install it, e.g. apt-get install redis-server"
        )


def serve(job: Job, port: Port) -> None:
    import redis

    path = f"{job.folder}/redis"
    command = ["redis-server", "--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no"]
    with subprocess.Popen(
        [*command, "--dir", job.folder], stdout=subprocess.PIPE, text=True, preexec_fn=die_with_parent
    ) as server:
        assert server.stdout is not None
        for line in server.stdout:
            if "ready to accept connections" in line.lower():
                break
        else:
            raise RuntimeError(f"redis-server ended with code {server.wait()}")
        with redis.Redis(unix_socket_path=path) as client:
            client.xgroup_create(STREAM, READERS, mkstream=True)
        port.tell("ready", address=path)
        port.wait_until_finished()
        server.terminate()
        server.communicate()


def produce(job: Job, port: Port) -> None:
    import redis

    parts: list[tuple[Any, ...]] = [each[:4] for each in pool(job.workload)]
    free = f"free-{job.producer}"
    with redis.Redis(unix_socket_path=job.address) as client:
        client.ping()
        port.ready()
        under_way = 0
        schedule = Schedule(job)
        for group in schedule:
            while under_way >= WINDOW:
                client.blpop(free)
                under_way -= 1
            entry: dict[Any, Any] = {}
            for index in range(job.workload.group_size):
                number = job.workload.number(group, index)
                entry[index] = b"".join((HEADER.pack(group, index, number), *parts[number % POOL]))
            client.xadd(STREAM, entry)
            under_way += 1
        port.wait_until_finished()
        port.told["put_at"] = schedule.put_at


def consume(job: Job, port: Port) -> None:
    import redis

    layout = Packed(job.workload)
    per_batch = job.workload.groups_per_batch
    with redis.Redis(unix_socket_path=job.address) as client:
        client.ping()
        port.ready()
        meter = Meter(job, port)
        batch: list[list[bytes]] = []
        while not meter.complete:
            found = client.xreadgroup(READERS, CONSUMER, {STREAM: ">"}, count=per_batch - len(batch), block=0)
            with client.pipeline(transaction=False) as pipeline:
                for identifier, entry in _entries(found):
                    batch.append(list(entry.values()))
                    group = HEADER.unpack_from(batch[-1][0])[0]
                    pipeline.xack(STREAM, READERS, identifier)
                    pipeline.xdel(STREAM, identifier)
                    pipeline.rpush(f"free-{group % job.producers}", b"")
                pipeline.execute()
            if len(batch) < per_batch:
                continue
            meter.arrived([HEADER.unpack_from(group[0])[0] for group in batch])
            for group in batch:
                for value in group:
                    number, index, reward = HEADER.unpack_from(value)
                    meter.verifier.take(number, index, reward, *layout.read([memoryview(value)]))
            meter.settled(len(batch))
            batch.clear()
        port.wait_until_finished()


def _entries(found: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """Of the one stream; redis-py answers with a list under RESP2 and with a dict under RESP3."""
    if isinstance(found, dict):
        return [entry for entries in found.values() for chunk in entries for entry in chunk]
    return [entry for _, entries in found for entry in entries]
