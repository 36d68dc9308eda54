"""The baseline: blocking pyzmq sockets, DEALER to ROUTER, an acknowledgement per group, and nothing else.

One message per trajectory; ``options``: ``transport`` (``ipc``, ``tcp``) and ``frames``: ``arrays`` (a header and a
frame for each array), ``packed`` (all in one frame, which costs a copy and saves more than that) or ``narrow`` (packed,
with the representation of streamrl: int32 tokens, log-probs and mask for every token, versions as run lengths).
"""

from __future__ import annotations

import struct
from collections import defaultdict
from typing import Any

import numpy as np
import zmq

from streamrl.bench.queue.roles import Meter, Schedule
from streamrl.bench.queue.stage import Job, Port
from streamrl.bench.queue.workload import POOL, Arrays, Workload, pool
from streamrl.types import VersionSpans

WINDOW = 8
"""Groups that a producer may have under way without an acknowledgement."""

HEADER = struct.Struct("<qqd")
"""Group, index in the group, reward."""
SPANS = struct.Struct("<qqqq")


def produce(job: Job, port: Port) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(job.address)
        layout = _LAYOUTS[job.options["frames"]](job.workload)
        parts = [layout.parts(arrays) for arrays in pool(job.workload)]
        port.ready()
        under_way = 0
        schedule = Schedule(job)
        for group in schedule:
            while under_way >= WINDOW:
                socket.recv()
                under_way -= 1
            for index in range(job.workload.group_size):
                number = job.workload.number(group, index)
                message = [HEADER.pack(group, index, number), *parts[number % POOL]]
                if layout.frames == 1:
                    socket.send(b"".join(message), copy=False)
                else:
                    socket.send_multipart(message, copy=False)
            under_way += 1
        port.wait_until_finished()
        port.told["put_at"] = schedule.put_at


def consume(job: Job, port: Port) -> None:
    workload = job.workload
    layout = _LAYOUTS[job.options["frames"]](workload)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        socket.bind("tcp://127.0.0.1:*" if job.options["transport"] == "tcp" else f"ipc://{job.folder}/raw")
        port.ready(address=socket.get_string(zmq.LAST_ENDPOINT))
        meter = Meter(job, port)
        collected: defaultdict[int, list[list[memoryview]]] = defaultdict(list)
        complete: list[int] = []
        while not meter.complete:
            sender, *frames = socket.recv_multipart(copy=False)
            views = [frame.buffer for frame in frames]
            group = HEADER.unpack_from(views[0])[0]
            collected[group].append(views)
            if len(collected[group]) < workload.group_size:
                continue
            socket.send(sender.bytes, zmq.SNDMORE)
            socket.send(b"")
            complete.append(group)
            if len(complete) < workload.groups_per_batch:
                continue
            meter.arrived(complete)
            for group in complete:
                for views in collected.pop(group):
                    _, index, reward = HEADER.unpack_from(views[0])
                    meter.verifier.take(group, index, reward, *layout.read(views))
            meter.settled(len(complete))
            complete.clear()
        port.wait_until_finished()


class PerArray:
    """A header and a frame for each array."""

    frames = 5

    def __init__(self, workload: Workload) -> None:
        pass

    def parts(self, arrays: Arrays) -> list[Any]:
        return [arrays.ids, arrays.logprobs, arrays.versions, arrays.mask]

    def read(self, views: list[memoryview]) -> tuple[np.ndarray, np.ndarray, np.ndarray | VersionSpans, np.ndarray]:
        _, ids, logprobs, versions, mask = views
        return (
            np.frombuffer(ids, np.int64),
            np.frombuffer(logprobs, np.float32),
            np.frombuffer(versions, np.int32),
            np.frombuffer(mask, np.uint8),
        )


class Packed(PerArray):
    """The header and all arrays in one frame."""

    frames = 1

    def __init__(self, workload: Workload) -> None:
        self._tokens, self._answer = workload.tokens, workload.answer

    def read(self, views: list[memoryview]) -> tuple[np.ndarray, np.ndarray, np.ndarray | VersionSpans, np.ndarray]:
        (frame,) = views
        logprobs = HEADER.size + 8 * self._tokens
        versions = logprobs + 4 * self._answer
        return (
            np.frombuffer(frame, np.int64, self._tokens, HEADER.size),
            np.frombuffer(frame, np.float32, self._answer, logprobs),
            np.frombuffer(frame, np.int32, self._answer, versions),
            np.frombuffer(frame, np.uint8, self._tokens, versions + 4 * self._answer),
        )


class Narrow(Packed):
    """Like ``Packed``, with 9 bytes a token."""

    def parts(self, arrays: Arrays) -> list[Any]:
        logprobs = np.zeros(self._tokens, dtype=np.float32)
        logprobs[self._tokens - self._answer :] = arrays.logprobs
        spans = SPANS.pack(*(number for span in arrays.spans for number in span))
        return [spans, arrays.ids.astype(np.int32), logprobs, arrays.mask.astype(np.bool_)]

    def read(self, views: list[memoryview]) -> tuple[np.ndarray, np.ndarray, np.ndarray | VersionSpans, np.ndarray]:
        (frame,) = views
        first, first_count, second, second_count = SPANS.unpack_from(frame, HEADER.size)
        ids = HEADER.size + SPANS.size
        logprobs = ids + 4 * self._tokens
        return (
            np.frombuffer(frame, np.int32, self._tokens, ids),
            np.frombuffer(frame, np.float32, self._tokens, logprobs)[self._tokens - self._answer :],
            [(first, first_count), (second, second_count)],
            np.frombuffer(frame, np.bool_, self._tokens, logprobs + 4 * self._tokens),
        )


_LAYOUTS = {"arrays": PerArray, "packed": Packed, "narrow": Narrow}
