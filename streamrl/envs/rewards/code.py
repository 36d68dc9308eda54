"""Answers that are Python programs: run against the task's tests in a sandbox (``sandbox.py``).

Three kinds of tests, in ``task.metadata[tests]``, a list (or one of them alone)::

    {"input": "3 4\\n", "output": "7\\n"}                 what the program prints for an input
    {"call": "add", "args": [3, 4], "expected": 7}       what a function of it returns
    "assert add(3, 4) == 7"                              code that is run behind the answer's, and must not raise

Of the first two the expected value never enters the sandbox, so an answer cannot look it up. Asserts run in the
answer's own process, and an answer that sets out to can make them pass.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.envs.environment import Reward, Task
from streamrl.envs.rewards.protocol import Answer, text_of
from streamrl.envs.rewards.sandbox import Ended, Limits, Sandbox
from streamrl.errors import ConfigError, EnvironmentFailed

MAX_CODE_BYTES = 1 << 18
_BLOCK = re.compile(
    r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*\1[ \t]*$|\Z)", re.DOTALL | re.MULTILINE
)
_PYTHON = ("", "py", "python", "python3")
_HARNESS = Path(__file__).with_name("code_harness.py").read_text()
TOLERANCE = 1e-6
"""Relative and absolute, of numbers that a called function returns."""


@dataclass(frozen=True)
class _Tests:
    """The tests of one task, by kind."""

    prints: Sequence[tuple[str, str]]
    """(input, output)."""
    calls: Sequence[Mapping[str, Any]]
    asserts: Sequence[str]

    @property
    def count(self) -> int:
        return len(self.prints) + len(self.calls) + len(self.asserts)


class CodeReward:
    """1.0 where the answer's last Python block (its whole text, where it has no block) passes every test, else 0.0.

    With ``partial`` the share of tests that pass. ``tests`` names the key of ``task.metadata``; ``isolation``,
    ``at_once``, ``python`` and the limits are those of ``sandbox.py``. Metrics: ``passed`` (share), ``timed_out`` (1
    where a program outlived its time). Code that crashes, hangs or escapes into a limit fails its tests; a task without
    usable tests, or a sandbox that does not work, raises ``EnvironmentFailed``.
    """

    def __init__(
        self,
        tests: str = "tests",
        partial: bool = False,
        isolation: str = "auto",
        at_once: int = 0,
        python: str = "",
        wall_s: float = Limits.wall_s,
        cpu_s: float = Limits.cpu_s,
        memory_bytes: int = Limits.memory_bytes,
        disk_bytes: int = Limits.disk_bytes,
        file_bytes: int = Limits.file_bytes,
        open_files: int = Limits.open_files,
        output_bytes: int = Limits.output_bytes,
        processes: int = Limits.processes,
    ) -> None:
        limits = Limits(wall_s, cpu_s, memory_bytes, disk_bytes, file_bytes, open_files, output_bytes, processes)
        if not isinstance(at_once, int) or at_once < 0:
            raise ConfigError(f"at_once={at_once!r}: expected a number of programs, or 0 for one per processor")
        self._key = tests
        self._partial = partial
        self._sandbox = Sandbox(limits, isolation, at_once, python)
        self._sandbox.in_force()  # so that a machine that does not permit it ends the launch, and not the night

    async def __call__(self, task: Task, answer: Answer) -> Reward:
        tests = _tests_of(task, self._key)
        code = extract_code(text_of(answer))
        if len(code.encode(errors="replace")) > MAX_CODE_BYTES:
            return Reward(0.0, {"passed": 0.0, "timed_out": 0.0})
        passed, timed_out = 0, False
        for given, wanted in tests.prints:
            ended = await self._sandbox.run(_encodable(code), given.encode())
            timed_out |= ended.timed_out
            passed += _printed(ended, wanted)
            if timed_out and not self._partial:
                break  # lost already, and each further test may take as long
        if tests.calls or tests.asserts:
            ended, right = await self._harness(_encodable(code), tests)
            timed_out |= ended.timed_out
            passed += right
        share = passed / tests.count
        value = share if self._partial else float(passed == tests.count)
        return Reward(value, {"passed": share, "timed_out": float(timed_out)})

    async def close(self) -> None:
        """Nothing is held: every program ends with its call."""

    async def _harness(self, code: str, tests: _Tests) -> tuple[Ended, int]:
        """How the program with its tests ended, and how many of calls and asserts were right."""
        token = secrets.token_hex(16)
        job = {
            "code": code,
            "calls": [{key: test[key] for key in ("call", "args", "kwargs") if key in test} for test in tests.calls],
            "asserts": tests.asserts,
            "token": token,
        }
        ended = await self._sandbox.run(_HARNESS, json.dumps(job).encode())
        results = _results(ended.output, token)
        wanted = [test["expected"] for test in tests.calls] + [None] * len(tests.asserts)
        found = (results.get(place, (False, None)) for place in range(len(wanted)))
        return ended, sum(ok and same(value, want) for (ok, value), want in zip(found, wanted, strict=True))


def _results(output: bytes, token: str) -> dict[int, tuple[bool, Any]]:
    """(whether it ran without raising, value) by the place of the test; lines that nobody could have meant are none."""
    results: dict[int, tuple[bool, Any]] = {}
    for line in output.decode(errors="replace").split("\n"):
        name, _, reply = line.partition(" ")
        if name != token:
            continue
        try:
            place, ok, value = json.loads(reply)
            results[int(place)] = (ok is True, value)
        except (ValueError, TypeError, OverflowError, RecursionError):
            continue  # the answer got hold of the token, and of nothing else
    return results


def extract_code(text: str) -> str:
    """The last fenced block of Python in ``text``; without one the last of any kind, else the whole text."""
    blocks = [(match[2].lower(), match[3]) for match in _BLOCK.finditer(text)]
    python = [code for language, code in blocks if language in _PYTHON]
    return (python or [code for _, code in blocks] or [text])[-1]


def same(given: Any, wanted: Any) -> bool:
    """Whether two JSON values are equal; numbers within ``TOLERANCE``, and a tuple is a list."""
    if isinstance(wanted, bool) or isinstance(given, bool):
        return given is wanted
    if isinstance(wanted, int | float) and isinstance(given, int | float):
        return given == wanted or _close(given, wanted)
    if isinstance(wanted, list | tuple):
        return isinstance(given, list) and len(given) == len(wanted) and all(map(same, given, wanted))
    if isinstance(wanted, Mapping):
        return isinstance(given, Mapping) and given.keys() == wanted.keys() and all(
            same(given[key], wanted[key]) for key in wanted
        )  # fmt: skip
    return type(given) is type(wanted) and given == wanted


def _close(given: float, wanted: float) -> bool:
    try:
        return math.isclose(given, wanted, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:  # an int that no float can hold
        return False


def _printed(ended: Ended, wanted: str) -> bool:
    """Equal but for spaces at the ends of lines and lines at the end."""
    if ended.code != 0 or ended.timed_out or ended.too_much_output:
        return False
    return _lines(ended.output.decode(errors="replace")) == _lines(wanted)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _encodable(code: str) -> str:
    return code.encode(errors="replace").decode()


def _tests_of(task: Task, key: str) -> _Tests:
    where = f"task {task.index}: metadata[{key!r}]"
    if key not in task.metadata:
        raise EnvironmentFailed(f"{where}: the reward 'code' needs tests there; it has {', '.join(task.metadata)}")
    given = task.metadata[key]
    listed = [given] if isinstance(given, str | Mapping) else list(given)
    if not listed:
        raise EnvironmentFailed(f"{where}: expected at least one test")
    prints, calls, asserts = [], [], []
    for place, test in enumerate(listed):
        if isinstance(test, str):
            asserts.append(test)
        elif isinstance(test, Mapping) and {"input", "output"} == test.keys():
            prints.append((str(test["input"]), str(test["output"])))
        elif isinstance(test, Mapping) and {"call", "expected"} <= test.keys() <= {
            "call",
            "args",
            "kwargs",
            "expected",
        }:
            calls.append(test)
        else:
            raise EnvironmentFailed(
                f"{where}[{place}]: expected code, input and output, or call and expected, got {test!r:.80}"
            )
    return _Tests(prints, calls, asserts)
