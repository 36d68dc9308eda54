"""What docs/environments.md shows is what happens."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from scripted import play, says, settings

from streamrl.envs.environment import load_environment
from streamrl.envs.group import GroupResult
from streamrl.envs.guard import GRACE_S, MOST_LEFT
from streamrl.envs.returned import MAX_COLUMNS, METADATA_BYTES, METADATA_DEPTH, RESERVED
from streamrl.errors import ConfigError
from streamrl.schema import Config

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "environments.md").read_text()
SNIPPETS = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, flags=re.DOTALL))
COMMANDS = re.findall(r"`streamrl launch ([^`]+)`", PAGE)
REFUSALS = [line for line in PAGE.splitlines() if line.startswith("env.name=")]
SHIPPED = re.findall(r"^\| `(streamrl\.envs\.[\w.]+:\w+)`", PAGE, flags=re.MULTILINE)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The snippets as files in the working directory."""
    for name, code in SNIPPETS.items():
        (tmp_path / name).write_text(f"# {name}\n{code}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in SNIPPETS:
        monkeypatch.delitem(__import__("sys").modules, name.removesuffix(".py"), raising=False)
    return tmp_path


def run(command: str, answer: str) -> GroupResult:
    name = "streamrl.envs.reasoning_gym:ReasoningGym"
    args: dict[str, Any] = {}
    for word in shlex.split(command):
        key, _, value = word.partition("=")
        if key == "env":
            name = value
        else:
            args[key.removeprefix("env.args.")] = value if "{" in value else yaml.safe_load(value)
    return play(settings(name, **args), says(answer), size=3)


def test_every_snippet_is_used_by_a_command() -> None:
    assert {f"{name}.py" for name in re.findall(r"env=(\w+):", " ".join(COMMANDS))} == set(SNIPPETS)
    assert len(SNIPPETS) == PAGE.count("```python")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_runs_without_a_failure(command: str) -> None:
    result = run(command, "1$")
    assert result.failures == []
    assert result.group is not None and {each.episode for each in result.group.trajectories} == {0, 1, 2}


def test_the_two_turn_snippet_plays_two_turns() -> None:
    result = run("env=guessing:Guessing", "x$")
    assert result.group is not None
    assert [(each.turns, each.metrics) for each in result.group.trajectories] == [(2, {"second_tries": 1.0})] * 3


def test_the_branching_snippet_gives_a_trajectory_for_every_attempt() -> None:
    result = run("env=attempts:Attempts", "1$")
    assert result.group is not None
    assert [each.episode for each in result.group.trajectories] == [0] * 4 + [1] * 4 + [2] * 4


def test_the_snippets_with_rewards_of_turns_give_them() -> None:
    spelled, stairs = run("env=spelled:Spelled", "1$"), run("env=stairs:Stairs env.args.height=3", "1$")
    assert spelled.group is not None and stairs.group is not None
    assert {abs(each) for one in spelled.group.trajectories for each in one.turn_rewards} == {0.5}
    assert [(each.turn_rewards, each.reward) for each in stairs.group.trajectories] == [([0.5] * 3, 1.5)] * 3


@pytest.mark.parametrize("line", REFUSALS)
def test_every_refusal_reads_as_shown(line: str, folder: Path) -> None:
    name = line.removeprefix("env.name=").partition(": ")[0]
    option = re.search(r"env\.args\.(\w+)", line)
    with pytest.raises(ConfigError) as caught:
        load_environment(settings(name, **({option[1]: 1} if option else {})))
    assert str(caught.value) == line.replace("/home/you", str(folder))


def test_the_failure_shown_is_what_a_mistake_in_the_snippet_gives(folder: Path) -> None:
    code = (folder / "riddles.py").read_text().replace("completion.text == task.answer", 'task.metadata["answer"]')
    (folder / "riddles.py").write_text(code)
    result = run("env=riddles:Riddles", "1$")
    line = 1 + code.splitlines().index('        return float(task.metadata["answer"])')
    assert result.failures[0].reason == f"KeyError: 'answer' (riddles.py:{line})"
    assert result.failures[0].reason in PAGE


@pytest.mark.parametrize("name", SHIPPED)
def test_every_environment_of_the_table_loads(name: str) -> None:
    assert load_environment(settings(name)).task(0).prompt


def test_the_snippet_with_columns_brings_them_along() -> None:
    result = run("env=spelling:Spelling", "1$")
    assert result.group is not None
    for trajectory in result.group.trajectories:
        assert trajectory.columns["right"].dtype == np.bool_
        assert trajectory.metadata["lengths"] == [1, len(trajectory.metadata["answer"])]


def test_the_bounds_and_names_of_the_page_are_those_that_hold() -> None:
    assert f"At most {MAX_COLUMNS}." in PAGE
    assert f"more than {MOST_LEFT} of them in one process end the run" in PAGE
    assert PAGE.count(f"ended after {GRACE_S:g} seconds") == 2
    assert f"nested up to {METADATA_DEPTH} deep and up to {METADATA_BYTES >> 10} KiB" in PAGE
    names = re.search(r"The names\s+`(\w+)`, `(\w+)` and `(\w+)` are taken", PAGE)
    assert names is not None and set(names.groups()) == RESERVED
    assert f"({Config().group.min_size} by default)" in PAGE
