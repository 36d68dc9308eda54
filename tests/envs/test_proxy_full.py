"""An agent that talks until there is no room ends as ``policy.chat`` would end it, whatever its client raises."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted import ScriptedEngine, lease, settings

from streamrl.envs.environment import load_environment
from streamrl.envs.gateway import Gateway
from streamrl.envs.group import GroupResult, GroupRunner
from streamrl.envs.split import Split
from streamrl.policy.tokenizer import EOS, character_tokenizer
from streamrl.types import Generation

AGENTS = """
from streamrl.envs import ContextFull

async def openai_agent(task, policy):
    from openai import AsyncOpenAI
    history = []
    async with AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
        while True:
            history.append({"role": "user", "content": "more"})
            answer = await client.chat.completions.create(model="policy", messages=history)
            history.append(answer.choices[0].message)

def anthropic_agent(task, policy):
    from anthropic import Anthropic
    history = []
    with Anthropic(base_url=policy.base_url, api_key=policy.api_key) as client:
        while True:
            history.append({"role": "user", "content": "more"})
            answer = client.messages.create(model="policy", messages=history, max_tokens=4)
            history.append({"role": "assistant", "content": answer.content[0].text})

async def full_at_once(task, policy):
    from openai import AsyncOpenAI
    async with AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "m" * 100}])

async def full_elsewhere(task, policy):
    await policy.chat([{"role": "user", "content": "a"}])
    try:
        await policy.chat([{"role": "user", "content": "a" * 100}])
    except ContextFull:
        await policy.chat([{"role": "user", "content": "b"}])
    raise ValueError("the judge said: context_length_exceeded")
"""
TOKENIZER = character_tokenizer()


@pytest.fixture(autouse=True)
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "talking_agents.py").write_text(AGENTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "talking_agents", raising=False)


def play(name: str) -> GroupResult:
    def answer(_: Sequence[int], __: Any) -> Generation:
        ids = np.array(TOKENIZER.convert_tokens_to_ids(["7", EOS]), dtype=np.int32)
        return Generation(ids, np.full(2, -0.5, dtype=np.float32), [(0, 2)], "stop")

    async def run() -> GroupResult:
        config = settings(f"talking_agents:{name}")
        config.model.max_length = 40
        config.env.timeout_s = 600.0  # a busy machine takes its time to import an SDK
        gateway = Gateway(config.gateway, 0)
        await gateway.start()
        try:
            split = Split(load_environment(config), config.seed, held_out=0.0)
            return await GroupRunner(split, ScriptedEngine(answer), TOKENIZER, config, gateway).run_group(lease(2))
        finally:
            await gateway.stop()

    return asyncio.run(run())


@pytest.mark.parametrize("name", ["openai_agent", "anthropic_agent"])
def test_an_agent_whose_client_was_told_that_there_is_no_room_is_kept_as_truncated(name: str) -> None:
    pytest.importorskip(name.partition("_")[0], reason="the SDK is not installed")
    result = play(name)
    assert result.failures == [] and result.group is not None
    assert [(each.truncated, each.reward) for each in result.group.trajectories] == [(True, 0.0)] * 2
    # <|user|>more<eos><|assistant|> and 7<eos>: nine tokens a turn
    assert {each.turns for each in result.group.trajectories} == {40 // 9}


def test_an_agent_whose_first_request_is_too_long_fails() -> None:
    pytest.importorskip("openai", reason="the SDK is not installed")
    result = play("full_at_once")
    assert result.group is None
    assert all(each.reason.startswith("BadRequestError: Error code: 400") for each in result.failures)


def test_a_context_that_is_full_elsewhere_is_a_failure() -> None:
    result = play("full_elsewhere")
    assert result.group is None
    assert all("the judge said" in each.reason for each in result.failures)
