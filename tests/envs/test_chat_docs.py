"""What docs/chat.md shows is what happens."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from scripted import ScriptedEngine, lease, runner, settings

from streamrl.envs.chat.alignment import REALIGN_TOKENS
from streamrl.envs.chat.tool_calls import FORMATS
from streamrl.envs.group import GroupResult
from streamrl.policy.tokenizer import character_tokenizer
from streamrl.types import Generation, SamplingParams

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "chat.md").read_text()
SNIPPETS = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, flags=re.DOTALL))


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


def play(call: str) -> GroupResult:
    """One episode of the page's agent, whose policy makes ``call`` and then says what the tool said."""
    tokenizer = character_tokenizer()
    marker, observed = tokenizer.convert_tokens_to_ids(["<|call|>", "<|tool|>"])
    end = tokenizer.eos_token_id

    def answer(prompt: list[int], params: SamplingParams) -> Generation:
        if observed in prompt:
            said = prompt[prompt.index(observed) + 1 :]
            token_ids = said[: said.index(end) + 1]
        else:
            token_ids = [marker, *tokenizer.encode(call), end]
        return Generation(np.array(token_ids), np.zeros(len(token_ids)), [(0, len(token_ids))], "stop")

    config = settings("adding:Adding")
    config.group.min_size = 1
    return asyncio.run(runner(config, ScriptedEngine(answer), tokenizer).run_group(lease(1)))


def test_the_agent_calls_its_tool_and_is_rewarded_for_the_answer() -> None:
    task = runner(settings("adding:Adding"), ScriptedEngine(lambda *_: None), character_tokenizer()).split.train(0)  # type: ignore[arg-type, return-value]
    a, b = task.prompt.split("+")
    result = play(f"add(a={a},b={b})")
    assert result.failures == [] and result.group is not None
    (trajectory,) = result.group.trajectories
    assert (trajectory.reward, trajectory.turns) == (1.0, 2)


def test_a_call_that_cannot_be_read_is_answered_and_costs_the_reward() -> None:
    result = play("add(a=")
    assert result.failures == [] and result.group is not None
    (trajectory,) = result.group.trajectories
    assert (trajectory.reward, trajectory.turns) == (0.0, 2)


def test_every_snippet_is_played() -> None:
    assert set(SNIPPETS) == {"adding.py"} and PAGE.count("```python") == 1


def test_the_numbers_and_formats_of_the_page_are_those_that_hold() -> None:
    assert f"as long as at most {REALIGN_TOKENS}\nsampled tokens are dropped" in PAGE
    assert all(f"`{name}`" in PAGE for name in FORMATS)
