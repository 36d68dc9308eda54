"""Answers that are programs are worth what their tests say, and cannot talk their way round them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from streamrl.envs import Reward, Task
from streamrl.envs.rewards import load_reward
from streamrl.envs.rewards.code import _results, extract_code, same
from streamrl.errors import ConfigError, EnvironmentFailed

SYSTEM_PYTHON = "/usr/bin/python3"
NEEDS_IT = os.getuid() == 0 and Path(SYSTEM_PYTHON).exists()
ADD = "Sure:\n```python\ndef add(a, b):\n    return a + b\n```\nThat is all."
SUM = "```py\nprint(sum(map(int, input().split())))\n```"


def score(tests: Any, answer: str, **options: Any) -> Reward:
    options = {"python": SYSTEM_PYTHON if NEEDS_IT else "", "wall_s": 60} | options
    reward = load_reward({"name": "code", **options})
    returned = asyncio.run(reward(Task(metadata={"tests": tests}), answer))
    assert isinstance(returned, Reward)
    return returned


CALLS = [
    {"call": "add", "args": [3, 4], "expected": 7},
    {"call": "add", "args": ["a"], "kwargs": {"b": "b"}, "expected": "ab"},
]
PRINTS = [{"input": "3 4\n", "output": "7"}, {"input": "1 1 1\n", "output": "3\n"}]


@pytest.mark.parametrize(
    ("tests", "answer"),
    [(CALLS, ADD), (PRINTS, SUM), (["assert add(3, 4) == 7"], ADD), ("assert add(1, 1) == 2", ADD)],
    ids=["calls", "prints", "asserts", "one alone"],
)
def test_a_right_answer_is_worth_one(tests: Any, answer: str) -> None:
    assert score(tests, answer) == Reward(1.0, {"passed": 1.0, "timed_out": 0.0})


@pytest.mark.parametrize(("partial", "value"), [(False, 0.0), (True, 2 / 3)])
def test_some_passed_tests_are_worth_their_share_only_where_asked_for(partial: bool, value: float) -> None:
    tests = [*CALLS, "assert add(1, 1) == 3"]
    assert score(tests, ADD, partial=partial) == Reward(value, {"passed": 2 / 3, "timed_out": 0.0})


def test_tests_of_all_kinds_count_alike() -> None:
    answer = "```\nif __name__ == '__main__': print(int(input()) + 1)\ndef f(x): return x\n```"
    tests = [{"input": "1", "output": "2"}, {"call": "f", "args": [2], "expected": 2}, "assert f(1) == 2"]
    assert score(tests, answer, partial=True).value == 2 / 3


@pytest.mark.parametrize(
    "answer",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "def add(a, b): raise SystemExit",
        "print('passed [0, true, 7]')",
        "import os\nos.write(1, b'[0, true, 7]\\n')",
        "class Everything:\n    def __eq__(self, other): return True\ndef add(*args): return Everything()",
        "not python at all",
        "def add(a, b):\n    x = []\n    x.append(x)\n    return x",
        "x = " + "1" * (1 << 18),
    ],
    ids=["exit", "sys.exit", "raise", "forged words", "forged output", "equal to all", "syntax", "cycle", "too long"],
)
def test_tricks_and_broken_answers_are_worth_nothing(answer: str) -> None:
    assert score(CALLS, answer, partial=True).value == 0.0


@pytest.mark.parametrize("reply", ["[Infinity, true, 1]", "[NaN, true, 1]", "[[], true, 1]", "[1, true]", "["])
def test_a_reply_that_nobody_could_have_meant_is_none(reply: str) -> None:
    assert _results(f"token {reply}\ntoken [0, true, 7]\n".encode(), "token") == {0: (True, 7)}


def test_an_answer_that_hangs_is_worth_nothing_and_counted() -> None:
    assert score(PRINTS, "while True: pass", wall_s=1) == Reward(0.0, {"passed": 0.0, "timed_out": 1.0})


def test_calls_before_one_that_hangs_keep_their_worth_where_parts_count() -> None:
    answer = "def add(a, b):\n    while a == 0: pass\n    return a + b"
    tests = [{"call": "add", "args": [1, 1], "expected": 2}, {"call": "add", "args": [0, 1], "expected": 1}]
    assert score(tests, answer, wall_s=8, partial=True) == Reward(0.5, {"passed": 0.5, "timed_out": 1.0})


def test_too_much_output_is_wrong_whatever_it_begins_with() -> None:
    answer = "print(7)\nwhile True: print('x' * 1000)"
    assert score([{"input": "", "output": "7"}], answer, output_bytes=100).value == 0.0


def test_expected_values_never_enter_the_sandbox() -> None:
    spy = """
import gc, sys

def found():
    needle = str(int("31330") + 7)
    seen = [str(each) for each in gc.get_objects()] + [str(sys._getframe(1).f_locals)]
    return any(needle in each for each in seen)
"""
    tests = [{"call": "found", "expected": True}, {"call": "other", "expected": 31337}]
    assert score(tests, spy, partial=True).value == 0.0


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ([], "expected at least one test"),
        ([{"input": "1"}], r"metadata\['tests'\]\[0\]: expected code, input and output, or call and expected"),
        ([{"call": "f", "expected": 1, "argument": 2}], "expected code, input and output, or call and expected"),
        ([7], r"\[0\]: expected code"),
    ],
    ids=str,
)
def test_tests_that_cannot_be_used_are_a_failure(tests: Any, message: str) -> None:
    with pytest.raises(EnvironmentFailed, match=message):
        score(tests, ADD)


def test_a_task_without_tests_is_a_failure() -> None:
    with pytest.raises(
        EnvironmentFailed, match=r"task 5: metadata\['tests'\]: the reward 'code' needs tests there; it has a"
    ):
        asyncio.run(load_reward("code")(Task(metadata={"a": 1}, index=5), ADD))


def test_limits_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="reward 'code': memory_bytes=-1: must be a positive number"):
        load_reward({"name": "code", "memory_bytes": -1})


# Blocks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("x = 1", "x = 1"),
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```\nx = 1\n```\nno:\n```python3\nx = 2\n```", "x = 2\n"),
        ("```python\nx = 1\n```\nOutput:\n```text\n1\n```", "x = 1\n"),
        ("```text\n1\n```", "1\n"),
        ("```python\nx = '```'\n```", "x = '```'\n"),
        ("~~~py\nx = 1\n~~~", "x = 1\n"),
        ("```python\nx = 1\ny =", "x = 1\ny ="),
        ("1. So:\n   ```python\n   x = 1\n   ```", "   x = 1\n"),
    ],
    ids=["none", "one", "last", "python first", "any", "quoted", "tildes", "unclosed", "indented"],
)
def test_the_last_python_block_is_the_code(text: str, code: str) -> None:
    assert extract_code(text) == code


@pytest.mark.parametrize(
    ("given", "wanted", "equal"),
    [
        (1, 1, True), (1.0, 1, True), (0.1 + 0.2, 0.3, True), (1, 2, False), (True, 1, False), (1, True, False),
        ("1", 1, False), ([1, 2], (1, 2), True), ([1], [1, 2], False), ({"a": [1.0]}, {"a": [1]}, True),
        ({}, {"a": 1}, False),
        (None, None, True), (None, 0, False), (float("nan"), float("nan"), False), (10**400, 1.0, False),
    ],
)  # fmt: skip
def test_values_are_compared_as_json_with_a_tolerance_for_numbers(given: Any, wanted: Any, equal: bool) -> None:
    assert same(given, wanted) is equal
