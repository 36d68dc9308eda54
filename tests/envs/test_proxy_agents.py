"""An agent framework that knows nothing of streamrl, through the proxy, with a real session behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from proxy_server import serving
from scripted import ScriptedEngine

from streamrl.envs.codec import Codec
from streamrl.envs.environment import Reward
from streamrl.envs.episode import Episode, Limits
from streamrl.envs.session import Session
from streamrl.policy.tokenizer import EOS, character_tokenizer
from streamrl.types import Generation, Trajectory

agents = pytest.importorskip("agents", reason="openai-agents is not installed")

TOKENIZER = character_tokenizer()
CALL, END = TOKENIZER.convert_tokens_to_ids(["<|call|>", EOS])


def tokens(text: str) -> list[int]:
    """``^`` begins a call, ``$`` is the end token."""
    special = {"^": CALL, "$": END}
    return [special[each] if each in special else TOKENIZER.convert_tokens_to_ids(each) for each in text]


def engine(*answers: str) -> ScriptedEngine:
    left = list(answers)

    def answer(_: Sequence[int], __: Any) -> Generation:
        ids = np.array(tokens(left.pop(0)), dtype=np.int32)
        return Generation(ids, np.full(len(ids), -0.25, dtype=np.float32), [(3, len(ids))], "stop")

    return ScriptedEngine(answer)


def played(answers: Sequence[str], responses: bool, stream: bool) -> tuple[str, list[Trajectory]]:
    """What the agent said in the end, and the trajectories of its episode."""

    @agents.function_tool
    def add(a: int, b: int) -> str:
        """Adds two numbers."""
        return str(a + b)

    async def run() -> tuple[str, list[Trajectory]]:
        episode = Episode(engine(*answers), Codec(TOKENIZER), Limits(1.0, 0, 1.0, 64, 512), (0, 0, 0, 0))
        async with asyncio.timeout(60), serving(Session(episode)) as served:
            # the framework keeps its default HTTP client across event loops: each test has its own
            provider = agents.OpenAIProvider(openai_client=served.openai, use_responses=responses)
            settings = agents.RunConfig(model_provider=provider, tracing_disabled=True)
            agent = agents.Agent(name="adder", instructions="Add.", model="policy", tools=[add])
            if stream:
                running = agents.Runner.run_streamed(agent, "3+4?", run_config=settings)
                async for _ in running.stream_events():
                    pass
                said = running.final_output
            else:
                said = (await agents.Runner.run(agent, "3+4?", run_config=settings)).final_output
        episode.close()
        return said, episode.trajectories(Reward(1.0), 0)

    return asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("responses", [False, True])
def test_an_unmodified_agent_makes_one_exact_trajectory(responses: bool, stream: bool):
    said, trajectories = played(["^add(a=3,b=4)$", "7!$"], responses, stream)
    assert said == "7!"
    assert len(trajectories) == 1
    trajectory = trajectories[0]
    sampled = tokens("^add(a=3,b=4)$") + tokens("7!$")
    assert trajectory.tokens[trajectory.sampled].tolist() == sampled
    assert trajectory.turns == 2
    assert trajectory.behaviour[trajectory.sampled].tolist() == [-0.25] * len(sampled)
    assert not trajectory.behaviour[~trajectory.sampled].any()
    text = TOKENIZER.decode(trajectory.tokens)
    assert text == (
        f"<|system|>Add.\nadd(a,b){EOS}<|user|>3+4?{EOS}<|assistant|><|call|>add(a=3,b=4){EOS}"
        f"<|tool|>7{EOS}<|assistant|>7!{EOS}"
    )


def test_parallel_calls_of_an_unmodified_agent_stay_in_one_trajectory():
    said, trajectories = played(["^add(a=3,b=4)^add(a=1,b=1)$", "done$"], responses=True, stream=False)
    assert said == "done"
    assert [trajectory.turns for trajectory in trajectories] == [2]
    assert TOKENIZER.decode(trajectories[0].tokens).count("<|tool|>") == 2
