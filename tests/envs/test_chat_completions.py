"""Clients that send the whole text, or all token ids, every time are matched by what it begins with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from scripted import END, PAIR, CharTokenizer, ScriptedEngine, generation, ids, says

from streamrl.envs.codec import Codec
from streamrl.envs.environment import Reward
from streamrl.envs.episode import Episode, Limits
from streamrl.envs.session import Session
from streamrl.types import Trajectory

LIMITS = Limits(temperature=1.0, top_k=0, top_p=1.0, max_tokens=8, max_length=100)
Script = Callable[[Session], Coroutine[Any, Any, None]]


def played(engine: ScriptedEngine, script: Script) -> tuple[list[str], dict[str, int]]:
    """What each trajectory reads, sampled parts in brackets, and the counts."""
    episode = Episode(engine, Codec(CharTokenizer()), LIMITS, (0, 0, 0, 0))
    policy = Session(episode)
    asyncio.run(script(policy))
    return [marked(each) for each in episode.trajectories(Reward(0.0), 0)], dict(episode.matched)


def marked(trajectory: Trajectory) -> str:
    text, inside = "", False
    for token, sampled in zip(trajectory.tokens.tolist(), trajectory.sampled.tolist(), strict=True):
        text += "[" * (sampled and not inside) + "]" * (inside and not sampled) + CharTokenizer().decode([token])
        inside = sampled
    return text + "]" * inside


def asks(*prompts: str | list[int], stop: str | None = None) -> Script:
    async def script(policy: Session) -> None:
        for prompt in prompts:
            await policy.resume(prompt, stop=stop)

    return script


@pytest.mark.parametrize(
    ("replies", "prompts", "trajectories", "counts"),
    [
        (["3$", "7$"], ["1+2=", "1+2=3, 3+4="], ["1+2=[3$], 3+4=[7$]"], {"start": 1, "extend": 1}),
        (["3$", "7$"], ["1+2=", "3+4="], ["1+2=[3$]", "3+4=[7$]"], {"start": 1, "fork": 1}),
        (["3$", "4$"], ["1+2=", "1+2="], ["1+2=[3$]", "1+2=[4$]"], {"start": 1, "fork": 1}),
        (
            ["3$", "4$", "5$"],
            ["1=", "1=3>", "1=3<"],
            ["1=[3$]>[4$]", "1=3$<[5$]"],
            {"start": 1, "extend": 1, "fork": 1},
        ),
        (["3$", "4"], ["1=", "1=3"], ["1=[3$4]"], {"start": 1, "extend": 1}),
        (["3$", "4$"], [ids("1="), [*ids("1=3$>")]], ["1=[3$]>[4$]"], {"start": 1, "extend": 1}),
        (["3$", "4$"], [ids("1="), [*ids("1=4$>")]], ["1=[3$]", "1=4$>[4$]"], {"start": 1, "fork": 1}),
        (["3$", "4$"], ["1=", [*ids("1=3$>")]], ["1=[3$]>[4$]"], {"start": 1, "extend": 1}),
    ],
)
def test_a_prompt_goes_on_where_it_begins_like_an_earlier_one_with_its_answer(
    replies: list[str], prompts: list[str | list[int]], trajectories: list[str], counts: dict[str, int]
) -> None:
    assert played(says(*replies), asks(*prompts)) == (trajectories, counts)


@pytest.mark.parametrize(
    ("second", "trajectory", "counts"),
    [
        ("1=3.5>", "1=[3.5]>[7$]", {"start": 1, "extend": 1}),
        ("1=3>", "1=[3]>[7$]", {"start": 1, "realign": 1}),
    ],
)
def test_after_a_stop_string_the_client_may_write_it_or_leave_it_out(
    second: str, trajectory: str, counts: dict[str, int]
) -> None:
    assert played(says("3.5", "7$"), asks("1=", second, stop=".5")) == ([trajectory], counts)


def test_tokens_stay_as_sampled() -> None:
    engine = ScriptedEngine(lambda *_: generation([PAIR, END]))
    (text,), counts = played(engine, asks("1=", "1=ab>"))
    assert (text, counts) == ("1=[ab$]>[ab$]", {"start": 1, "extend": 1})
    assert engine.requests[1][0] == [*ids("1="), PAIR, END, *ids(">")]


def test_the_same_prompt_at_the_same_time_makes_a_trajectory_each() -> None:
    async def script(policy: Session) -> None:
        turns = await asyncio.gather(*(policy.resume("1=") for _ in range(3)))
        assert [turn.prompt_token_ids for turn in turns] == [tuple(ids("1="))] * 3

    assert played(says("3$", "4$", "5$"), script) == (
        ["1=[3$]", "1=[4$]", "1=[5$]"],
        {"start": 1, "fork": 2},
    )
