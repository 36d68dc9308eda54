"""``env.name`` finds user code; everything that is wrong with it is one clear line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripted import play, says, settings

from streamrl.envs.environment import Environment, Task, load_environment
from streamrl.errors import ConfigError

USER_CODE = """
import functools
from streamrl.envs import Task

NUMBER = 3

class Riddles:
    def __init__(self, level: int = 1, topic: str = "sums"):
        if level > 9:
            raise ValueError("level is at most\\n9")
        self.level = level
    def task(self, index):
        return Task(f"{index}+{self.level}=", str(index + self.level))
    async def episode(self, task, policy):
        return float((await policy.complete(task.prompt)).text == task.answer)

class Named(Riddles):
    name = "my-riddles"

class BadName(Riddles):
    name = "my/riddles"

class Empty(Riddles):
    def __len__(self):
        return 0

class Needs:
    def __init__(self, path):
        pass
    async def episode(self, task, policy):
        return 0.0

class TakesAll:
    def __init__(self, **options):
        self.options = options
    async def episode(self, task, policy):
        return 0.0

class NoEpisode:
    pass

class SyncEpisode:
    def episode(self, task, policy):
        return 0.0

class AsyncTask(Riddles):
    async def task(self, index):
        return Task("1")

class TaskWithoutIndex(Riddles):
    def task(self):
        return Task("1")

class EpisodeOfOne:
    async def episode(self, task):
        return 0.0

async def episode(task, policy, highest=9):
    return float((await policy.complete(f"{highest}=")).text)

async def of_one(task):
    return 0.0

def plain(task, policy):
    return 0.0

async def generator(task, policy):
    yield 0.0

of_three = functools.partial(episode, highest=3)
"""


@pytest.fixture(autouse=True)
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with user code, as ``streamrl launch`` is started in it."""
    for name, text in {
        "my_env.py": USER_CODE,
        "broken_env.py": "x = 1\nraise RuntimeError('no\\nluck')\n",
        "leaves_env.py": "raise SystemExit('bye')\n",
        "needs_env.py": "import surely_not_installed\n",
        "typo_env.py": "def f(:\n",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    for name in ("my_env", "broken_env", "needs_env"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def load(name: str, **args: Any) -> Environment:
    return load_environment(settings(name, **args))


def test_a_class_beside_the_run_is_loaded_with_its_options() -> None:
    environment = load("my_env:Riddles", level=4)
    assert environment.name == "riddles"
    assert environment.size is None
    assert environment.task(3) == Task("3+4=", "7", index=3)


def test_a_class_may_name_itself() -> None:
    assert load("my_env:Named").name == "my-riddles"


def test_a_class_that_takes_any_option_gets_them() -> None:
    assert load("my_env:TakesAll", anything=1).name == "takesall"


def test_an_async_function_is_an_environment_whose_tasks_have_no_prompt() -> None:
    environment = load("my_env:episode")
    assert environment.name == "episode"
    assert environment.task(5) == Task(index=5)
    assert environment.task(5).random.random() == environment.task(5).random.random()
    assert environment.task(5).random.random() != environment.task(6).random.random()


def test_options_of_a_function_are_its_further_parameters() -> None:
    engine = says("1$")
    play(settings("my_env:episode", highest=5), engine)
    assert {tuple(prompt)[0] for prompt, _ in engine.requests} == {5}


def test_a_partial_of_an_async_function_is_named_by_its_variable() -> None:
    engine = says("1$")
    result = play(settings("my_env:of_three"), engine)
    assert result.group is not None and result.group.env == "of_three"
    assert {tuple(prompt)[0] for prompt, _ in engine.requests} == {3}


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("my_env", {}, "env.name='my_env': expected package.module:Name, such as my_env:Riddles"),
        ("my_env:", {}, "env.name='my_env:': expected package.module:Name, such as my_env:Riddles"),
        ("my_evn:Riddles", {}, "no module 'my_evn' on the path or in {cwd}; did you mean 'my_env'?"),
        ("streamrl.envs.gues:Guess", {}, "no module 'streamrl.envs.gues' on the path or in {cwd}; did you mean "),
        ("nowhere.at.all:X", {}, "no module 'nowhere' on the path or in {cwd}"),
        ("needs_env:X", {}, "needs_env imports 'surely_not_installed', which is not installed"),
        ("broken_env:X", {}, "importing broken_env raised RuntimeError: no luck (broken_env.py:2)"),
        ("leaves_env:X", {}, "importing leaves_env raised SystemExit: bye (leaves_env.py:1)"),
        ("typo_env:X", {}, "importing typo_env raised SyntaxError: "),
        ("my_env:Ridles", {}, "my_env has no 'Ridles'; did you mean 'Riddles'?"),
        ("my_env:NUMBER", {}, "expected a function or a class, got int"),
        ("my_env:NoEpisode", {}, "class NoEpisode has no method `episode(self, task, policy)`, nor `reset` and `step`"),
        ("my_env:generator", {}, "generator is a generator; it must return a number or a Reward, and yield nothing"),
        ("my_env:AsyncTask", {}, "AsyncTask.task must be a plain method `def task(self, index) -> Task`"),
        ("my_env:TaskWithoutIndex", {}, "must be callable as TaskWithoutIndex.task(self, index): too many "),
        ("my_env:of_one", {}, "must be callable as of_one(task, policy): too many positional arguments"),
        ("my_env:EpisodeOfOne", {}, "must be callable as EpisodeOfOne.episode(self, task, policy): too many "),
        ("my_env:Riddles", {"lvel": 1}, "env.args.lvel: class Riddles has no such option; did you mean 'level'?"),
        ("my_env:Riddles", {"depth": 1}, "env.args.depth: class Riddles has no such option; there are: level, topic"),
        ("my_env:NoEpisode", {"a": 1}, "class NoEpisode has no method"),
        ("my_env:episode", {"hihest": 1}, "function episode has no such option; did you mean 'highest'?"),
        ("my_env:Needs", {}, "class Needs needs the option 'path'; set env.args.path=…"),
        ("my_env:Riddles", {"level": 10}, "Riddles(level=10) raised ValueError: level is at most 9 (my_env.py:10)"),
        ("my_env:BadName", {}, "name 'my/riddles' must be letters, digits"),
        ("my_env:Empty", {}, "len(Empty) is 0; an environment needs at least one task"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(name: str, args: dict[str, Any], message: str, run_folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(name, **args)
    text = str(caught.value)
    assert message.replace("{cwd}", str(run_folder)) in text
    assert text.startswith("env.name=")
    assert "\n" not in text


def test_environments_need_no_torch() -> None:
    root = Path(__file__).resolve().parents[2]
    code = (
        "import sys; from streamrl.schema import Config; from streamrl.envs.environment import load_environment;"
        "import streamrl.envs.group, streamrl.envs.strings, streamrl.envs.guess; load_environment(Config());"
        "assert 'reasoning_gym' in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(root)}, timeout=60)
