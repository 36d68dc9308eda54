"""Classes with ``reset`` and ``step``: one instance per episode, rewards of steps on their turns."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scripted import END, ScriptedEngine, generation, ids, lease, play, runner, says, settings

from streamrl.envs.environment import Task, load_environment
from streamrl.envs.group import GroupResult
from streamrl.errors import ConfigError

GAMES = """
import threading
from streamrl.envs import Task

class Countdown:
    '''Says the number; a right answer takes one off and is worth 0.5.'''
    made, closed, threads = [], [], []
    max_turns = 5
    def __init__(self, start: int = 2):
        self.start = self.left = start
        Countdown.made.append(self)
    def task(self, index):
        return Task(str(index % 3), answer="0")
    def reset(self, task):
        self.threads.append(threading.current_thread())
        return f"{self.left}="
    def step(self, action):
        self.threads.append(threading.current_thread())
        right = action == str(self.left)
        self.left -= right
        return f"<{self.left}=", 0.5 * right, self.left == 0
    def close(self):
        Countdown.closed.append(self)

class AsyncCountdown(Countdown):
    async def reset(self, task):
        return super().reset(task)
    async def step(self, action):
        return super().step(action)
    async def close(self):
        super().close()

class Talk:
    def reset(self, task):
        return [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1"}]
    def step(self, action):
        return [{"role": "user", "content": "and"}], float(action), action == "2"

class Breaks(Countdown):
    def step(self, action):
        raise ValueError("broken game")

class TwoOf(Countdown):
    def step(self, action):
        return "<", 1.0

class Infinite(Countdown):
    def step(self, action):
        return "<", float("inf"), False

class Mixes(Countdown):
    def step(self, action):
        return [{"role": "user", "content": "1"}], 0.0, False

class Blank(Countdown):
    def reset(self, task):
        return 7

class NoReset:
    def step(self, action):
        return "", 0.0, True

class Half(Countdown):
    async def reset(self, task):
        return "1="

class Takes(Countdown):
    def step(self, action, more):
        return "", 0.0, True

class NoTurns(Countdown):
    max_turns = 0

class SlowToBuild(Countdown):
    building, release = threading.Semaphore(0), threading.Event()
    def __init__(self):
        super().__init__()
        if threading.current_thread().name == "episode":
            self.threads.append(threading.current_thread())
            self.building.release()
            self.release.wait()
"""


@pytest.fixture(autouse=True)
def games(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "step_games.py").write_text(GAMES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "step_games", raising=False)
    return __import__("step_games")


def repeats_the_number() -> ScriptedEngine:
    """Answers ``…2=`` by 2."""
    return ScriptedEngine(lambda prompt, _: generation([prompt[-2], END]))


def played(name: str, *answers: str, **args: Any) -> GroupResult:
    return play(settings(f"step_games:{name}", **args), says(*answers), size=2)


@pytest.mark.parametrize("name", ["Countdown", "AsyncCountdown"])
def test_an_episode_goes_from_reset_by_steps_until_it_is_done(name: str) -> None:
    result = play(settings(f"step_games:{name}"), repeats_the_number())
    assert result.group is not None and result.failures == []
    for each in result.group.trajectories:
        assert each.tokens.tolist() == ids("2=2$<1=1$")
        assert (each.reward, each.turn_rewards, each.turns) == (1.0, [0.5, 0.5], 2)


@pytest.mark.parametrize("name", ["Countdown", "AsyncCountdown"])
def test_every_episode_has_an_instance_of_its_own_with_the_options_and_it_is_closed(name: str, games: Any) -> None:
    result = played(name, "1$", start=1)
    assert result.group is not None
    assert [each.turn_rewards for each in result.group.trajectories] == [[0.5], [0.5]]
    for thread in games.Countdown.threads:
        if name == "Countdown":
            thread.join(60)
    assert {each.start for each in games.Countdown.made} == {1}
    assert len(games.Countdown.made) == 3 and set(games.Countdown.closed) == set(games.Countdown.made[1:])


def test_plain_methods_of_an_episode_are_all_called_in_one_thread(games: Any) -> None:
    play(settings("step_games:Countdown"), repeats_the_number())
    assert len(games.Countdown.threads) == 6
    assert len({id(each) for each in games.Countdown.threads}) == 2


def test_an_episode_ends_after_max_turns() -> None:
    result = played("Countdown", "7$")
    assert result.group is not None
    assert [(each.turns, each.reward, each.truncated) for each in result.group.trajectories] == [(5, 0.0, False)] * 2


def test_messages_are_answered_by_chat_with_the_whole_history() -> None:
    """The policy is a fake here: what counts is which histories it is shown."""
    histories: list[list[dict[str, Any]]] = []
    rewards: list[float] = []

    class Chats:
        async def chat(self, messages: list[dict[str, Any]]) -> Any:
            histories.append(messages)
            text = "12"[len(histories) - 1]
            return SimpleNamespace(text=text, message={"role": "assistant", "content": text})

        def reward(self, value: float) -> None:
            rewards.append(value)

    episode = load_environment(settings("step_games:Talk")).episode
    assert asyncio.run(episode(Task(), Chats())) == 0.0
    start = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1"}]
    later = [*start, {"role": "assistant", "content": "1"}, {"role": "user", "content": "and"}]
    assert histories == [start, later]
    assert rewards == [1.0, 2.0]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Breaks", "ValueError: broken game (step_games.py:"),
        ("TwoOf", "TwoOf: step must return (observation, reward, done), got ('<', 1.0)"),
        ("Infinite", "Infinite: the reward of step must be a finite number, got inf"),
        ("Mixes", "Mixes: reset gave a text, so step must too, got [{'role'"),
        ("Blank", "Blank: expected an observation of text or a list of messages, got 7"),
    ],
)
def test_a_game_that_breaks_its_promise_fails_the_episode_and_is_closed(name: str, reason: str, games: Any) -> None:
    result = played(name, "2$")
    assert len(result.failures) == 2
    assert all(reason in each.reason for each in result.failures)
    for thread in games.Countdown.threads:
        thread.join(60)
    assert len(games.Countdown.closed) == 2 or not games.Countdown.threads


def test_an_instance_that_is_built_while_its_episode_is_cancelled_is_closed(games: Any) -> None:
    async def main() -> None:
        playing = asyncio.create_task(runner(settings("step_games:SlowToBuild"), says("1$")).run_group(lease(1)))
        await asyncio.to_thread(games.SlowToBuild.building.acquire)
        playing.cancel()
        games.SlowToBuild.release.set()
        await asyncio.wait({playing})
        assert playing.cancelled()

    asyncio.run(main())
    for thread in games.Countdown.threads:
        thread.join(30)
    assert games.Countdown.closed == games.Countdown.made[1:] != []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoReset", "class NoReset has no method `def reset(self, task)`"),
        ("Half", "Half.reset and Half.step must both be `async def`, or both plain methods"),
        ("Takes", "must be callable as Takes.step(self, action): missing a required argument: 'more'"),
        ("NoTurns", "NoTurns.max_turns=0 must be a whole number of at least 1, or None"),
    ],
)
def test_a_game_that_does_not_fit_is_refused_when_it_is_loaded(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_environment(settings(f"step_games:{name}"))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
