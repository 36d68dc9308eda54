"""The loop of a tool agent: chat, carry out the calls, chat again, until there is an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from scripted import CharTokenizer, ScriptedEngine, lease, runner, settings
from transformers import PreTrainedTokenizerFast

from streamrl.envs import ContextFull, Reward, Task
from streamrl.envs.chat.capture import ChatTurn
from streamrl.envs.chat.tool_calls import ToolCall
from streamrl.envs.clipping import clip
from streamrl.envs.environment import load_environment
from streamrl.envs.tools import ToolAgent, ToolFatal, tool
from streamrl.errors import ConfigError
from streamrl.policy.tokenizer import character_tokenizer
from streamrl.types import Generation, SamplingParams, Trajectory

END = 1
"""Of the character tokenizer."""


def says(text: str, *calls: tuple[str, dict[str, Any]]) -> ChatTurn:
    made = [ToolCall(f"call{place:05d}", name, arguments, "") for place, (name, arguments) in enumerate(calls)]
    message = {"role": "assistant", "content": text, "tool_calls": [each.id for each in made]}
    return ChatTurn(text, made, "", message, "tool_calls" if made else "stop", (1,), (0.0,), ())


class ScriptedPolicy:
    """Answers with ``turns`` in order; an exception among them is raised. Remembers what it was given."""

    def __init__(self, *turns: ChatTurn | Exception) -> None:
        self._turns = list(turns)
        self.histories: list[list[dict[str, Any]]] = []
        self.tools: Sequence[dict[str, Any]] | None = None

    async def chat(self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None) -> ChatTurn:
        self.histories.append(list(messages))
        self.tools = tools
        turn = self._turns.pop(0)
        if isinstance(turn, Exception):
            raise turn
        return turn

    async def clip(self, text: str, tokens: int) -> str:
        return clip(text, tokens, CharTokenizer())


class Calculator(ToolAgent):
    system = "Use calc."
    max_turns = 3

    def task(self, index: int) -> Task:
        return Task(f"{index}+{index}?", str(2 * index))

    @tool
    def calc(self, left: int, right: int) -> int:
        """The sum."""
        return left + right

    def reward(self, task: Task, answer: str, state: Any) -> float | Reward:
        return float(answer == task.answer)


def play(agent: ToolAgent, *turns: ChatTurn | Exception, task: Task | None = None) -> tuple[Reward, ScriptedPolicy]:
    policy = ScriptedPolicy(*turns)
    return asyncio.run(agent.episode(task or Task("2+2?", "4"), policy)), policy  # type: ignore[arg-type]


CALC = ("calc", {"left": 2, "right": 2})


def test_the_policy_reads_what_its_calls_gave_and_answers() -> None:
    reward, policy = play(Calculator(), says("", CALC), says("4"))
    assert reward.value == 1.0
    opening = [{"role": "system", "content": "Use calc."}, {"role": "user", "content": "2+2?"}]
    observed = {"role": "tool", "tool_call_id": "call00000", "name": "calc", "content": "4"}
    assert policy.histories == [opening, [*opening, says("", CALC).message, observed]]


def test_the_metrics_say_how_the_conversation_went() -> None:
    reward, _ = play(Calculator(), says("", CALC, ("clac", {})), says("4"))
    assert reward.metrics == {"tool_calls": 2, "tool_errors": 1, "turns": 2, "turn_limit": 0, "context_full": 0}


def test_the_policy_is_told_of_the_tools_and_of_nothing_else() -> None:
    agent = Calculator()
    _, policy = play(agent, says("4"))
    assert policy.tools == agent.schemas
    assert [each["function"]["name"] for each in agent.schemas] == ["calc"]


def test_a_conversation_ends_at_the_turn_limit_and_its_last_calls_are_not_carried_out() -> None:
    reward, policy = play(Calculator(), *[says(f"so far {turn}", CALC) for turn in range(3)], task=Task("", "so far 2"))
    assert reward.value == 1.0
    assert reward.metrics == {"tool_calls": 2, "tool_errors": 0, "turns": 3, "turn_limit": 1, "context_full": 0}
    assert len(policy.histories) == 3


def test_a_conversation_that_fills_the_context_is_worth_what_was_said_last() -> None:
    reward, _ = play(Calculator(), says("4", CALC), ContextFull("no room"))
    assert reward.value == 1.0
    assert reward.metrics == {"tool_calls": 1, "tool_errors": 0, "turns": 1, "turn_limit": 0, "context_full": 1}


def test_a_task_that_alone_fills_the_context_is_a_failure() -> None:
    with pytest.raises(ContextFull):
        play(Calculator(), ContextFull("no room"))


class Shop(ToolAgent):
    """Its state is an object with tools of its own."""

    @dataclass
    class Basket:
        budget: int
        items: int = 0
        open: bool = True

        @tool
        def buy(self, count: int) -> str:
            if count > self.budget:
                raise ToolFatal("the shop is closed")
            self.items += count
            return f"{self.items} items"

    def __init__(self) -> None:
        self.baskets: list[Shop.Basket] = []

    def setup(self, task: Task) -> Basket:  # type: ignore[override]
        self.baskets.append(self.Basket(budget=3))
        return self.baskets[-1]

    def teardown(self, state: Basket) -> None:  # type: ignore[override]
        state.open = False

    def reward(self, task: Task, answer: str, state: Basket) -> Reward:
        return Reward(state.items, metrics={"items": state.items, "turns": 99})


def test_state_survives_between_calls_and_is_of_one_episode() -> None:
    shop = Shop()
    buy = ("buy", {"count": 1})
    first, policy = play(shop, says("", buy), says("", buy), says("done"))
    second, _ = play(shop, says("done"))
    assert (first.value, second.value) == (2, 0)
    assert [message["content"] for message in policy.histories[-1] if message["role"] == "tool"] == [
        "1 items",
        "2 items",
    ]


def test_what_setup_took_is_released_however_the_episode_ended() -> None:
    shop = Shop()
    play(shop, says("done"))
    with pytest.raises(ToolFatal, match="the shop is closed"):
        play(shop, says("", ("buy", {"count": 9})))
    assert [basket.open for basket in shop.baskets] == [False, False]


def test_a_metric_of_the_users_stands_before_one_of_the_agents() -> None:
    reward, _ = play(Shop(), says("done"))
    assert (reward.metrics["items"], reward.metrics["turns"]) == (0, 99)


def double(number: int) -> int:
    """Twice the number."""
    return 2 * number


def test_plain_functions_are_tools_beside_the_methods() -> None:
    class Both(Calculator):
        tools = [double]

    reward, _ = play(Both(), says("", ("double", {"number": 21}), CALC), says("4"))
    assert (reward.metrics["tool_calls"], reward.metrics["tool_errors"]) == (2, 0)
    assert [each["function"]["name"] for each in Both().schemas] == ["calc", "double"]


def test_methods_may_be_async() -> None:
    class Waiting(Calculator):
        async def setup(self, task: Task) -> str:
            await asyncio.sleep(0)
            return "state"

        async def reward(self, task: Task, answer: str, state: Any) -> float:  # type: ignore[override]
            await asyncio.sleep(0)
            return float(state == "state")

    assert play(Waiting(), says("4"))[0].value == 1.0


def test_a_class_with_a_function_that_cannot_be_a_tool_is_refused_where_it_is_defined() -> None:
    with pytest.raises(ConfigError, match="tool '<lambda>': parameter 'number' has no type"):

        class Wrong(Calculator):
            tools: Sequence[Callable[..., Any]] = [lambda number: number]


def test_an_agent_loads_as_any_environment_does() -> None:
    environment = load_environment(settings("test_tools_agent:Calculator"))
    assert (environment.name, environment.task(3).answer) == ("calculator", "6")


def test_options_of_an_agent_are_checked_as_those_of_any_environment() -> None:
    with pytest.raises(ConfigError, match=r"env\.args\.digits: class Calculator has no such option"):
        load_environment(settings("test_tools_agent:Calculator", digits=2))


def sampled_and_given(trajectory: Trajectory, tokenizer: PreTrainedTokenizerFast) -> list[tuple[bool, str]]:
    """The runs of sampled (True) and of context tokens, as text with special tokens."""
    runs: list[tuple[bool, list[int]]] = []
    for token, sampled in zip(trajectory.tokens.tolist(), trajectory.sampled.tolist(), strict=True):
        if not runs or runs[-1][0] != sampled:
            runs.append((sampled, []))
        runs[-1][1].append(token)
    return [(sampled, tokenizer.decode(ids)) for sampled, ids in runs]


def test_what_tools_gave_is_context_and_only_what_the_policy_sampled_is_trained() -> None:
    tokenizer = character_tokenizer()
    call = [tokenizer.convert_tokens_to_ids("<|call|>"), *tokenizer.encode("calc(left=2,right=2)"), END]
    script = [call, [*tokenizer.encode("4"), END]]

    def answer(prompt: list[int], params: SamplingParams) -> Generation:
        token_ids = script[prompt.count(tokenizer.convert_tokens_to_ids("<|tool|>"))]
        return Generation(np.array(token_ids), np.full(len(token_ids), -0.5), [(0, len(token_ids))], "stop")

    config = settings("test_tools_agent:Calculator")
    result = asyncio.run(runner(config, ScriptedEngine(answer), tokenizer).run_group(lease(2)))
    assert result.failures == [] and result.group is not None
    for trajectory in result.group.trajectories:
        (_, opening), *rest = sampled_and_given(trajectory, tokenizer)
        assert opening.startswith("<|system|>Use calc.\ncalc(left,right)<eos><|user|>")
        assert rest == [
            (True, "<|call|>calc(left=2,right=2)<eos>"),
            (False, "<|tool|>4<eos><|assistant|>"),
            (True, "4<eos>"),
        ]
        assert set(trajectory.behaviour[trajectory.sampled].tolist()) == {-0.5}
        assert set(trajectory.behaviour[~trajectory.sampled].tolist()) == {0.0}
        assert (trajectory.turns, trajectory.metrics["tool_calls"]) == (2, 1)
