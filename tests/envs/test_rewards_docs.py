"""What docs/rewards.md shows is what happens."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripted import play, says, settings

from streamrl.envs.rewards import load_reward
from streamrl.envs.rewards.code import CodeReward
from streamrl.envs.rewards.judge import JudgeReward
from streamrl.envs.rewards.mathematics import MathReward
from streamrl.envs.rewards.model import ScorerAddress, use_scorer

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "rewards.md").read_text()
SNIPPETS = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, flags=re.DOTALL))
COMMANDS = re.findall(r"`streamrl launch ([^`]+)`", PAGE)
KINDS = {"code": CodeReward, "judge": JudgeReward, "math": MathReward}
YAML = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snippets as files in the working directory."""
    for name, code in SNIPPETS.items():
        (tmp_path / name).write_text(code)
        monkeypatch.delitem(__import__("sys").modules, name.removesuffix(".py"), raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("command", [each for each in COMMANDS if "reward_model" not in each])
def test_every_command_runs_without_a_failure(command: str) -> None:
    if "=math" in command:
        pytest.importorskip(
            "math_verify", reason="the reward 'math' needs math-verify: pip install 'streamrl[rewards]'"
        )
    words = dict(word.split("=", 1) for word in shlex.split(command))
    result = play(settings(words["env"], reward=yaml.safe_load(words["env.args.reward"])), says("1$"))
    assert result.failures == []
    assert result.group is not None


def test_the_command_with_a_reward_model_loads_its_reward() -> None:
    (command,) = [each for each in COMMANDS if "reward_model" in each]
    words = dict(word.split("=", 1) for word in shlex.split(command))
    use_scorer(ScorerAddress("ipc:///nowhere", "test"))
    try:
        load_reward(yaml.safe_load(words["env.args.reward"]))
    finally:
        use_scorer(None)


@pytest.mark.parametrize("text", YAML, ids=["judge", "mixture"])
def test_every_yaml_block_is_a_reward(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp", reason="the reward 'judge' needs aiohttp: pip install 'streamrl[rewards]'")
    pytest.importorskip("math_verify", reason="the reward 'math' needs math-verify: pip install 'streamrl[rewards]'")
    monkeypatch.setenv("JUDGE_API_KEY", "k")
    tree: dict[str, Any] = yaml.safe_load(text)
    load_reward(tree["reward"] if "reward" in tree else tree["env"]["args"]["reward"])


@pytest.mark.parametrize("name", KINDS)
def test_every_option_is_in_its_section_with_its_default(name: str) -> None:
    parameters = inspect.signature(KINDS[name]).parameters
    section = PAGE.split(f"\n## {name}\n")[1].split("\n## ")[0]
    missing = [option for option in parameters if not re.search(rf"\b{option}\b", section)]
    assert missing == []
    stated = {
        option: int(number.replace(",", "")) * (1 << 20 if unit else 1)
        for option, number, unit in re.findall(r"`(\w+)`\s\((\d[\d,]*)(?: (MiB))?[):]", section)
    }
    assert stated
    assert {option: parameters[option].default for option in stated} == stated
