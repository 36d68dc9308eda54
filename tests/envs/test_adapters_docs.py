"""What docs/adapters.md shows is what happens."""

from __future__ import annotations

import asyncio
import inspect
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripted import ScriptedEngine, generation, lease, runner, settings

from streamrl.config import load_config
from streamrl.envs.adapters.mixture import RECENT
from streamrl.envs.adapters.prompts import Prompts
from streamrl.envs.environment import load_environment
from streamrl.envs.hooks import Hooks
from streamrl.envs.loading import load_function
from streamrl.errors import ConfigError
from streamrl.policy.tokenizer import character_tokenizer

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "adapters.md").read_text()
SNIPPETS = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, flags=re.DOTALL))
COMMANDS = re.findall(r"`streamrl launch ([^`]+)`", PAGE)
ELSEWHERE = ("OpenEnv", "Verifiers")
"""They need a server or a package of somebody else; their own tests play them."""
PLAYED = [command for command in COMMANDS if not any(f":{name} " in command for name in ELSEWHERE)]
TABLES = {
    ":Prompts": "## A file of prompts",
    ":TextGym": "## Gymnasium-style text environments",
    ":OpenEnv": "## OpenEnv servers",
    ":Verifiers": "## verifiers",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The snippets as files in the working directory."""
    (rows,) = re.findall(r"```jsonl\n(.*?)```", PAGE, flags=re.DOTALL)
    (mixture,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    for name, text in {**SNIPPETS, "sums.jsonl": rows, "mixture.yaml": mixture}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in SNIPPETS:
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    return tmp_path


def config_of(command: str) -> Any:
    words = shlex.split(command)
    source = words.pop(words.index("--config") + 1) if "--config" in words else None
    config = load_config(source, [word for word in words if word != "--config"])
    config.model.max_length = 512
    return config


@pytest.mark.parametrize("command", PLAYED)
def test_every_command_plays_without_a_failure(command: str) -> None:
    if "Families" in command:
        pytest.importorskip("reasoning_gym", reason="pip install 'streamrl[envs]'")
    tokenizer = character_tokenizer()
    said = [*tokenizer.encode("1", add_special_tokens=False), tokenizer.eos_token_id]
    engine = ScriptedEngine(lambda *_: generation(said))
    result = asyncio.run(runner(config_of(command), engine, tokenizer).run_group(lease()))  # type: ignore[arg-type]
    assert result.failures == []
    assert result.group is not None and len(result.group.trajectories) == 2


@pytest.mark.parametrize("command", [each for each in COMMANDS if each not in PLAYED])
def test_every_option_of_the_other_commands_exists(command: str) -> None:
    config = config_of(command)
    cls = load_function(config.env.name, "env.name")
    assert set(config.env.args) <= set(inspect.signature(cls).parameters)


@pytest.mark.parametrize("name", TABLES)
def test_every_option_stands_in_the_table_with_its_default(name: str) -> None:
    module = re.search(rf"`(streamrl\.[\w.]+{name})`", PAGE)
    assert module is not None
    section = PAGE.partition(TABLES[name])[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    listed = {each for cell in cells for each in re.findall(r"`(\w+)`(?!\))", cell)}
    parameters = inspect.signature(load_function(module[1], "env.name")).parameters
    assert listed == set(parameters)
    for cell in cells:
        shown = re.fullmatch(r" `(\w+)` \(`?([\w{}]+)`?\) ", cell)
        if shown is not None and parameters[shown[1]].default is not None:
            assert shown[2] == str(parameters[shown[1]].default).removesuffix(".0").lower()


def test_the_refusal_shown_is_what_a_missing_column_gives(folder: Path) -> None:
    (folder / "sums.jsonl").write_text(
        '{"prompt": "a", "question": "b", "answer": "c"}\n{"question": "x", "answer": "y"}\n'
    )
    with pytest.raises(ConfigError) as caught:
        Prompts("sums.jsonl", "exact")
    assert str(caught.value) in PAGE


def test_the_shares_of_the_mixture_are_as_described() -> None:
    environment = load_environment(config_of("--config mixture.yaml"))
    names = [environment.name_of(environment.task(index)) for index in range(2_000)]
    assert names.count("one") / 2_000 == pytest.approx(0.6, abs=0.05)
    assert set(names) == {"one", "two", "guess"}
    assert all(f"`reward/{name}/mean`" in PAGE for name in set(names))


def test_the_curriculum_begins_easy_and_ends_with_the_weights_as_written() -> None:
    environment = load_environment(config_of("--config mixture.yaml env.args.curriculum=steps:easy_first"))
    tasks = [environment.training_task(index) for index in range(50)]
    assert {environment.name_of(task) for task in tasks} == {"one"}
    for task in tasks:
        environment.played(task, [1.0, 1.0])
    assert {environment.name_of(environment.training_task(index)) for index in range(50)} == {"one", "two", "guess"}


def test_numbers_and_hooks_are_those_that_hold() -> None:
    assert f"the last {RECENT}\ngroups" in PAGE
    table = PAGE.partition("## Methods that any environment may have")[2]
    assert set(re.findall(r"def (\w+)\(", table)) == set(Hooks.__dataclass_fields__)


def test_the_yaml_of_the_mixture_is_a_config(folder: Path) -> None:
    parts = yaml.safe_load((folder / "mixture.yaml").read_text())["env"]["args"]["parts"]
    assert load_environment(settings("streamrl.envs.adapters.mixture:Mixture", parts=parts)).name == "mixture"
