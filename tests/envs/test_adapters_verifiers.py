"""An environment of the real verifiers package plays through an endpoint and its rubric is the reward.

The package needs openai<3, so it is seldom installed beside the other test dependencies; where it is not, only the
refusal is tested.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from scripted import ScriptedEngine, lease, settings

from streamrl.envs.adapters.verifiers import Verifiers
from streamrl.envs.environment import Reward, load_environment
from streamrl.envs.gateway import Gateway
from streamrl.envs.group import GroupRunner
from streamrl.envs.split import Split
from streamrl.errors import ConfigError, EnvironmentFailed
from streamrl.policy.tokenizer import character_tokenizer
from streamrl.types import Generation

CODE = """
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

ROWS = [("France", "Paris"), ("Japan", "Tokyo"), ("Kenya", "Nairobi")]


class CapitalData(vf.TaskData):
    answer: str


class CapitalTask(vf.Task[CapitalData, vf.State]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        if trace.last_reply == "crash":
            raise RuntimeError("the rubric fell over")
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.metric
    async def letters(self, trace) -> float:
        return float(len(trace.last_reply))


class Capitals(vf.Taskset[CapitalTask, vf.TasksetConfig]):
    def load(self):
        for country, city in ROWS:
            yield CapitalTask(CapitalData(prompt=f"Capital of {country}?", answer=city), self.config.task)


class Asking(vf.Harness[vf.HarnessConfig]):
    "Asks once, and once more where it is answered with a question mark, in this process."

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **kwargs):
        import openai

        messages = [{"role": "user", "content": data.prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            while True:
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                said = answer.choices[0].message.content
                if said != "?":
                    return ProgramResult(exit_code=0, stdout="", stderr="")
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Guess."}]


__all__ = ["Capitals", "Asking"]
"""


class Endpoint:
    """Answers by key, in order; remembers who asked what."""

    def __init__(self, **answers: list[str]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, list[dict[str, Any]]]] = []
        self.hold: asyncio.Event | None = None
        self.began = asyncio.Event()

    async def chat(self, request: web.Request) -> web.Response:
        key = request.headers["Authorization"].removeprefix("Bearer ")
        self.asked.append((key, (await request.json())["messages"]))
        self.began.set()
        if self.hold is not None:
            await self.hold.wait()
        if not self.answers.get(key):
            return web.json_response({"error": {"message": "this episode has ended"}}, status=410)
        message = {"role": "assistant", "content": self.answers[key].pop(0)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        head = {"id": "x", "object": "chat.completion", "created": 0, "model": "policy"}
        return web.json_response({**head, "choices": [choice], "usage": usage})

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.chat)
        runner = web.AppRunner(app, shutdown_timeout=0.01)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        finally:
            await runner.cleanup()


@pytest.fixture
def capitals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("verifiers.v1", reason="the verifiers package is not installed")
    (tmp_path / "capitals_taskset.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "capitals_taskset", raising=False)
    return "capitals_taskset"


def play_tasks(env: Verifiers, endpoint: Endpoint, *numbers: int) -> list[Any]:
    """Episodes of these tasks at once; the key of an episode is ``k`` and its place."""

    async def run() -> list[Any]:
        async with endpoint.serving() as url:
            policies = [SimpleNamespace(base_url=url, api_key=f"k{place}") for place in range(len(numbers))]
            episodes = [env.episode(env.task(number), each) for number, each in zip(numbers, policies, strict=True)]  # type: ignore[arg-type]
            return await asyncio.gather(*episodes, return_exceptions=True)

    return asyncio.run(run())


def test_tasks_are_those_of_the_taskset(capitals: str) -> None:
    env = Verifiers(capitals)
    assert len(env) == 3
    assert env.name == "capitals_taskset"
    assert [(env.task(i).prompt, env.task(i).answer) for i in (1, 3)] == [
        ("Capital of Japan?", "Tokyo"),
        ("Capital of France?", "Paris"),
    ]
    assert len(Verifiers(capitals, size=2)) == 2


def test_the_rubric_of_the_task_is_the_reward(capitals: str) -> None:
    rewards = play_tasks(Verifiers(capitals), Endpoint(k0=["Paris"], k1=["Paris"]), 0, 1)
    assert rewards == [
        Reward(2.0, {"letters": 5.0, "reward_right": 2.0, "turns": 1.0}),
        Reward(0.0, {"letters": 5.0, "reward_right": 0.0, "turns": 1.0}),
    ]


def test_every_turn_of_an_episode_comes_with_its_own_key(capitals: str) -> None:
    endpoint = Endpoint(k0=["?", "Paris"], k1=["Tokyo"])
    rewards = play_tasks(Verifiers(capitals), endpoint, 0, 1)
    assert [(reward.value, reward.metrics["turns"]) for reward in rewards] == [(2.0, 2.0), (2.0, 1.0)]
    by_key = [[message["content"] for message in messages] for key, messages in endpoint.asked if key == "k0"]
    assert by_key == [["Capital of France?"], ["Capital of France?", "?", "Guess."]]


def test_no_key_stays_in_the_environment(capitals: str) -> None:
    before = dict(os.environ)
    play_tasks(Verifiers(capitals), Endpoint(k0=["Paris"]), 0)
    assert dict(os.environ) == before


def test_an_episode_that_was_not_completed_fails_with_the_reason(capitals: str) -> None:
    ended, crashed = play_tasks(Verifiers(capitals), Endpoint(k0=[], k1=["crash"]), 0, 0)
    assert isinstance(ended, EnvironmentFailed) and "this episode has ended" in str(ended)
    assert isinstance(crashed, EnvironmentFailed) and "the rubric fell over" in str(crashed)
    assert "\n" not in str(ended) + str(crashed)


def test_a_cancelled_episode_leaves_no_task_and_no_server(capitals: str) -> None:
    async def run() -> None:
        endpoint = Endpoint(k0=["Paris"])
        endpoint.hold = asyncio.Event()
        env = Verifiers(capitals)
        async with endpoint.serving() as url:
            policy: Any = SimpleNamespace(base_url=url, api_key="k0")
            episode = asyncio.create_task(env.episode(env.task(0), policy))
            await endpoint.began.wait()
            episode.cancel()
            with pytest.raises(asyncio.CancelledError):
                await episode
            endpoint.hold.set()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_the_tokens_of_an_episode_are_recorded_by_the_rollouter_s_endpoint(capitals: str) -> None:
    tokenizer = character_tokenizer()
    said = [*tokenizer.encode("Paris", add_special_tokens=False), tokenizer.eos_token_id]
    config = settings("streamrl.envs.adapters.verifiers:Verifiers", taskset=capitals, size=1)

    async def run() -> Any:
        gateway = Gateway(config.gateway, 0)
        await gateway.start()
        try:
            split = Split(load_environment(config), 0, held_out=0.0)
            engine = ScriptedEngine(
                lambda *_: Generation(
                    np.array(said, np.int32), np.full(len(said), -0.5, np.float32), [(0, len(said))], "stop"
                )
            )
            return await GroupRunner(split, engine, tokenizer, config, gateway).run_group(lease())
        finally:
            await gateway.stop()

    result = asyncio.run(run())
    assert result.failures == []
    for trajectory in result.group.trajectories:
        assert trajectory.reward == 2.0
        assert trajectory.tokens[trajectory.sampled].tolist() == said
        assert "Capital of France?" in tokenizer.decode(trajectory.tokens[~trajectory.sampled])


def test_an_unknown_taskset_is_refused_in_one_line(capitals: str) -> None:
    with pytest.raises(ConfigError, match=r"env\.args\.taskset=no_such_taskset: ") as caught:
        Verifiers("no_such_taskset")
    assert "\n" not in str(caught.value)


def test_an_unknown_option_is_refused_in_one_line(capitals: str) -> None:
    with pytest.raises(ConfigError, match=r"env\.args\.taskset=capitals_taskset: .*no_such_option") as caught:
        Verifiers(capitals, options={"no_such_option": 1})
    assert "\n" not in str(caught.value)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ConfigError, match=r"pip install 'streamrl\[verifiers\]'"):
        Verifiers("anything")
