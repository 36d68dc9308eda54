"""The messages between an attached process and a rollouter say the same on both sides, or are refused by name."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from streamrl.envs.attach.protocol import (
    Array,
    Call,
    Done,
    Hello,
    Leased,
    decode_from_process,
    decode_from_rollouter,
    encode,
    reward_of,
    task_in_json,
    worth,
)
from streamrl.envs.environment import Reward, Task
from streamrl.errors import EnvironmentFailed, WireError


def over_the_wire(reward: Reward) -> Reward:
    message = decode_from_process(encode(Done(1, 2, **worth(reward))))
    assert isinstance(message, Done)
    return reward_of(message)


@pytest.mark.parametrize(
    "array",
    [
        np.array([[1.5, -2.0], [3.0, np.nan]], dtype=np.float32),
        np.array([1, 2, 3], dtype=ml_dtypes.bfloat16),
        np.zeros((0, 4), dtype=np.int64),
        np.array(True),
        np.arange(6, dtype=np.uint8).reshape(2, 3).T,
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_a_column_arrives_as_it_was_sent(array: np.ndarray) -> None:
    came = over_the_wire(Reward(1.0, columns={"scores": array})).columns["scores"]
    assert (came.dtype, came.shape) == (array.dtype, array.shape)
    assert came.tobytes() == array.tobytes()


def test_a_reward_arrives_with_its_metrics_and_metadata() -> None:
    came = over_the_wire(Reward(0.25, {"tries": 2.0}, metadata={"path": ["a", None, {"b": True}]}))
    assert (came.value, came.metrics, came.metadata) == (0.25, {"tries": 2.0}, {"path": ["a", None, {"b": True}]})


def test_a_column_of_too_few_bytes_is_refused_by_name() -> None:
    message = Done(0, 0, 1.0, columns={"scores": Array("float32", [3], b"12345678")})
    with pytest.raises(EnvironmentFailed, match=r"column 'scores': float32 of shape \[3\] takes 12 bytes, got 8"):
        reward_of(message)


def test_a_column_of_an_unknown_dtype_is_refused_by_name() -> None:
    with pytest.raises(EnvironmentFailed, match="column 'scores': no dtype 'object'"):
        reward_of(Done(0, 0, 1.0, columns={"scores": Array("object", [1], b"12345678")}))


def test_a_task_whose_metadata_is_no_json_is_refused_with_the_way_out() -> None:
    with pytest.raises(EnvironmentFailed, match=r"task\(7\)\.metadata cannot be sent .* its own tasks"):
        task_in_json(Task("1+1=", metadata={"entry": object()}, index=7))


def test_a_lease_arrives_with_its_task() -> None:
    task = task_in_json(Task("1+1=", "2", {"level": 3}, index=7))
    message = decode_from_rollouter(encode(Leased(5, 9, 1, 60.0, ["sk-a", "sk-b"], task)))
    assert isinstance(message, Leased)
    assert (message.task, message.keys) == (task, ["sk-a", "sk-b"])


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "[]",
        '{"type":"unknown"}',
        '{"type":"hello","protocol":1,"agent":"a","workers":0}',
        '{"type":"hello","protocol":1,"agent":"","workers":1}',
        '{"type":"hello","protocol":1,"agent":"a b","workers":1}',
        '{"type":"call","id":1,"lease":0,"episode":0,"method":"close","args":{}}',
        '{"type":"done","lease":0,"episode":-1,"reward":1}',
        '{"type":"done","lease":0,"episode":0,"reward":null}',
        '{"type":"welcome"}',
    ],
)
def test_what_no_process_may_say_is_refused(text: str) -> None:
    with pytest.raises(WireError):
        decode_from_process(text)


def test_messages_carry_their_type() -> None:
    assert encode(Hello(1, "agent", 2)) == '{"type":"hello","protocol":1,"agent":"agent","workers":2,"own_tasks":false}'
    assert decode_from_process(encode(Call(3, 4, 5, "chat", {"messages": []}))) == Call(
        3, 4, 5, "chat", {"messages": []}
    )
