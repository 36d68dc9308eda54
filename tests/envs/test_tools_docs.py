"""What docs/tools.md shows is what happens."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from scripted import ScriptedEngine, lease, runner, settings

from streamrl.envs.environment import load_environment
from streamrl.envs.group import GroupResult
from streamrl.envs.tools import ToolAgent
from streamrl.envs.tools.mcp_server import McpServer
from streamrl.policy.tokenizer import character_tokenizer
from streamrl.types import Generation, SamplingParams

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tools.md").read_text()
SNIPPETS = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, flags=re.DOTALL))
COMMANDS = re.findall(r"`streamrl launch env=([\w.]+:\w+)", PAGE)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The snippets as files in the working directory."""
    for name, code in SNIPPETS.items():
        (tmp_path / name).write_text(f"# {name}\n{code}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in SNIPPETS:
        sys.modules.pop(name.removesuffix(".py"), None)


def play(name: str, *turns: str) -> GroupResult:
    """One episode whose policy says ``turns``, after one observation each; what begins with ``!`` is a call."""
    tokenizer = character_tokenizer()
    call, observed = tokenizer.convert_tokens_to_ids(["<|call|>", "<|tool|>"])

    def answer(prompt: list[int], params: SamplingParams) -> Generation:
        text = turns[prompt.count(observed)]
        given = tokenizer.encode(text.removeprefix("!")) + [tokenizer.eos_token_id]
        token_ids = [call, *given] if text.startswith("!") else given
        return Generation(np.array(token_ids), np.zeros(len(token_ids)), [(0, len(token_ids))], "stop")

    async def main() -> GroupResult:
        config = settings(name)
        config.group.min_size = 1
        played = runner(config, ScriptedEngine(answer), tokenizer)
        try:
            return await played.run_group(lease(1))
        finally:
            await played.split.environment.close()

    return asyncio.run(main())


def task_of(name: str) -> tuple[str, str]:
    """Prompt and answer of what ``play`` plays."""
    task = runner(settings(name), ScriptedEngine(lambda *_: None), character_tokenizer()).split.train(0)  # type: ignore[arg-type, return-value]
    return task.prompt, task.answer or ""


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_names_an_environment_that_loads(name: str) -> None:
    assert load_environment(settings(name)).task(0).prompt


def test_the_calculator_adds_and_is_rewarded() -> None:
    prompt, answer = task_of("calculator:Calculator")
    a, b = prompt.removesuffix("?").split("+")
    result = play("calculator:Calculator", f"!add(a={a},b={b})", answer)
    assert result.failures == [] and result.group is not None
    (trajectory,) = result.group.trajectories
    assert (trajectory.reward, trajectory.metrics["tool_calls"], trajectory.metrics["tool_errors"]) == (1.0, 1, 0)


def test_the_notebook_keeps_what_was_written() -> None:
    _, answer = task_of("notebook:Notebook")
    result = play("notebook:Notebook", f'!write(line="{answer}")', "done")
    assert result.group is not None
    assert [(each.reward, each.metrics["lines"]) for each in result.group.trajectories] == [(1.0, 1)]


def test_the_loop_of_ones_own_answers_after_its_call() -> None:
    prompt, answer = task_of("twice:Twice")
    number = prompt.removeprefix("Twice ").removesuffix("?")
    result = play("twice:Twice", f"!double(number={number})", answer)
    assert result.group is not None and result.group.trajectories[0].reward == 1.0


def test_the_agent_with_an_mcp_server_asks_it() -> None:
    pytest.importorskip("mcp", reason="the extra 'mcp' is not installed")
    prompt, answer = task_of("clocks:Clocks")
    result = play("clocks:Clocks", f"!hour(minutes={prompt.split()[0]})", answer)
    assert result.failures == [] and result.group is not None
    (trajectory,) = result.group.trajectories
    assert (trajectory.reward, trajectory.metrics["tool_errors"]) == (1.0, 0)


def test_the_bounds_of_the_page_are_those_that_hold() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", PAGE, flags=re.MULTILINE))
    assert {name: float(value) for name, value in rows.items()} == {
        name: getattr(ToolAgent, name) for name in ("max_turns", "max_parallel", "tool_timeout_s", "max_result_tokens")
    }
    assert f"`start_timeout_s` ({McpServer('x').start_timeout_s:g})" in PAGE


def test_no_snippet_is_left_untried() -> None:
    assert set(SNIPPETS) == {"clock_server.py", "clocks.py", *(f"{name.split(':')[0]}.py" for name in COMMANDS)}
    assert len(SNIPPETS) == PAGE.count("```python")
