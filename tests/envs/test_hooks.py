"""Optional methods of an environment's class: called where they are there, and their mistakes named."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from scripted import play, says, settings

from streamrl.envs.environment import Environment, load_environment

CODE = """
from streamrl.envs import Task

class Plain:
    def task(self, index):
        return Task(f"{index}?")
    async def episode(self, task, policy):
        await policy.complete(task.prompt)
        return 1.0

class PlayedRaises(Plain):
    def played(self, task, rewards):
        raise KeyError("history")

class Named(Plain):
    def env_of(self, task):
        return "odd" if task.index % 2 else "even"
"""


@pytest.fixture(autouse=True)
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hooked_env.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "hooked_env", raising=False)


def load(name: str) -> Environment:
    return load_environment(settings(f"hooked_env:{name}"))


def test_without_hooks_training_tasks_are_tasks_and_closing_does_nothing() -> None:
    environment = load("Plain")
    task = environment.training_task(3)
    assert task == environment.task(3)
    assert environment.name_of(task) == "plain"
    environment.played(task, [1.0])
    asyncio.run(environment.close())


def test_a_group_has_the_name_of_its_task() -> None:
    environment = load("Named")
    assert [environment.name_of(environment.task(index)) for index in (2, 3)] == ["even", "odd"]
    group = play(settings("hooked_env:Named"), says("1$")).group
    assert group is not None and group.env in ("even", "odd")


def test_a_hook_that_raises_fails_the_group_and_is_named() -> None:
    result = play(settings("hooked_env:PlayedRaises"), says("1$"))
    assert result.group is None
    assert [failure.reason for failure in result.failures] == ["KeyError: 'history' (hooked_env.py:13)"]
