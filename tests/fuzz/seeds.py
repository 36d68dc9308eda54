"""Messages from which fuzzing starts: groups with every kind of column, other bodies, a bundle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from streamrl.buffers.wire import codec
from streamrl.buffers.wire.dtypes import DTYPES
from streamrl.buffers.wire.groups import pack_group
from streamrl.buffers.wire.messages import Body, FailRequest, LeaseRequest, PutRequest, Refusal, Status, StoreRequest
from streamrl.buffers.wire.payload import Frame
from streamrl.types import Group, Trajectory


def trajectory(prompt: int, answer: int, columns: dict[str, np.ndarray] | None = None) -> Trajectory:
    length = prompt + answer
    return Trajectory(
        tokens=np.arange(length, dtype=np.int32),
        sampled=np.arange(length) >= prompt,
        behaviour=np.full(length, -0.5, dtype=np.float32),
        versions=[(4, answer - 1), (5, 1)] if answer > 1 else [(4, answer)] if answer else [],
        reward=1.0,
        metrics={"hops": 2.0},
        columns=columns or {},
        metadata={"task": "sums", "steps": [1, {"deep": None}]},
    )


def groups() -> list[Group]:
    of_every_dtype = {name: np.zeros((1, 2), np.uint8).repeat(16, 1).view(dtype) for name, dtype in DTYPES.items()}
    router = {"router": np.arange(12, dtype=np.uint8).reshape(3, 2, 2)}
    return [
        Group(0, 0, "sums", []),
        Group(1, 2, "", [trajectory(0, 0)]),
        Group(1, 2, "sums", [trajectory(3, 2), trajectory(3, 4)]),
        Group(
            1, 2, "ü", [trajectory(3, 1, router), trajectory(2, 0), trajectory(3, 1, {"r\U0001f600": np.array(1.0)})]
        ),
        Group(1, 2, "sums", [trajectory(1, 1, of_every_dtype)]),
        Group(
            1,
            2,
            "sums",
            [
                replace(trajectory(3, 2), episode=0, turn_rewards=[0.25]),
                replace(trajectory(3, 4), episode=0),
                replace(trajectory(3, 1), episode=1),
            ],
        ),
        Group(1, 2, "sums", [trajectory(1, 1, {"x": np.zeros((2, 0, 3)), "y": np.array(3)})]),
    ]


def messages() -> list[list[Frame]]:
    puts = []
    for number, group in enumerate(groups()):
        meta, payload = pack_group(group)
        puts.append(codec.encode(PutRequest(meta), number, 1.5, payload.frames, checksum=number % 2 == 1))
    meta, payload = pack_group(groups()[3])
    others: list[tuple[Body, list[Frame]]] = [
        (LeaseRequest(3), []),
        (FailRequest(3, "why", "where"), []),
        (StoreRequest(4, meta.columns), payload.frames),
        (Status("accepted"), []),
        (Refusal("why", True), []),
    ]
    single = [codec.encode(body, 9, 0.5, frames) for body, frames in others]
    return [*puts, *single, [*single[0], *puts[2], *single[-1]]]
