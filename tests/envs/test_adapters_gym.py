"""Gymnasium-style text environments are played in threads, a seed per task, a reward per turn."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedEngine as Engine
from scripted import generation, ids, play, says, settings

from streamrl.envs.adapters.text_gym import TextGym
from streamrl.envs.environment import load_environment
from streamrl.errors import ConfigError

NAME = "streamrl.envs.adapters.text_gym:TextGym"
CODE = """
import random, threading

SEEN = []

class Doors:
    "Say the number of the door; up to three tries, each worth what it is worth."
    def __init__(self, doors=4):
        self.doors = doors
        self.closed = False
    def reset(self, seed=None):
        self.door = random.Random(seed).randrange(self.doors)
        self.tries = 0
        SEEN.append((seed, threading.current_thread()))
        return f"0-{self.doors - 1}?", {"door": self.door}
    def step(self, action):
        self.tries += 1
        right = int(action) == self.door
        return f"not {action}", float(right), right, self.tries == 3, {}
    def close(self):
        SEEN.append("closed")

class Numbers(Doors):
    def reset(self, seed=None):
        super().reset(seed)
        return 7, {}

class OldStyle(Doors):
    def reset(self, seed=None):
        return "0-3?"

class ShortStep(Doors):
    def step(self, action):
        return "x", 1.0, True, {}

class NanReward(Doors):
    def step(self, action):
        return "x", float("nan"), True, False, {}

class Raises(Doors):
    def step(self, action):
        raise KeyError("door")

class CannotBeMade(Doors):
    def __init__(self):
        raise OSError("no licence")

def spoken(observation):
    return f"number {observation}."

def first_digit(text):
    return next(character for character in text if character.isdigit())

def digit_or_error(text):
    return int(text[0])
"""


@pytest.fixture(autouse=True)
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "doors_env.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "doors_env", raising=False)
    import doors_env  # type: ignore[import-not-found]

    return doors_env


def gym(kind: str = "Doors", **options: Any) -> TextGym:
    return TextGym(f"doors_env:{kind}", **options)


def played(engine: Any, kind: str = "Doors", size: int = 2, **options: Any) -> Any:
    return play(settings(NAME, id=f"doors_env:{kind}", **options), engine, size)


def never_right(*_: Any) -> Any:
    return generation(ids("9$"))


def test_the_observations_are_the_prompts_and_the_answers_the_actions() -> None:
    result = played(Engine(never_right), turn="{observation}?")
    assert result.failures == []
    trajectory = result.group.trajectories[0]
    assert trajectory.tokens.tolist() == ids("0-3?9$not 9?9$not 9?9$")
    assert trajectory.turns == 3


def test_rewards_of_steps_are_those_of_the_turns() -> None:
    said = ids("0123")
    result = played(Engine(lambda prompt, _: generation([said[(len(prompt) - 4) // 7], *ids("$")])), max_turns=3)
    trajectory = result.group.trajectories[0]
    assert trajectory.turns > 1, "the seed must not make the first guess right, or nothing is shown"
    right = trajectory.metrics["cut"] == 0.0
    assert trajectory.turn_rewards == [0.0] * (trajectory.turns - 1) + [float(right)]
    assert trajectory.reward == float(right)


def test_every_episode_of_a_group_has_an_environment_with_the_same_seed_of_its_own(user_code: Any) -> None:
    user_code.SEEN.clear()
    played(Engine(never_right), size=3, seed=100)
    seeds = {seed for seed, _ in (each for each in user_code.SEEN[2:] if each != "closed")}
    assert len(seeds) == 1 and min(seeds) >= 100
    assert user_code.SEEN.count("closed") == 4  # one was made to see whether it can be
    assert all(thread is not threading.main_thread() for _, thread in [e for e in user_code.SEEN[2:] if e != "closed"])


def test_an_episode_that_is_cut_says_so() -> None:
    trajectory = played(Engine(never_right)).group.trajectories[0]
    assert trajectory.metrics == {"turns": 3.0, "invalid_action": 0.0, "cut": 1.0}
    trajectory = played(Engine(never_right), max_turns=2).group.trajectories[0]
    assert trajectory.metrics == {"turns": 2.0, "invalid_action": 0.0, "cut": 1.0}


def test_an_action_that_cannot_be_read_ends_the_episode_and_is_counted() -> None:
    trajectory = played(says("x$"), action="int", invalid_reward=-1.0).group.trajectories[0]
    assert trajectory.metrics == {"turns": 1.0, "invalid_action": 1.0, "cut": 0.0}
    assert (trajectory.reward, trajectory.turn_rewards) == (-1.0, [-1.0])


def test_an_action_hook_reads_the_text() -> None:
    trajectory = played(says("a9b$"), action="doors_env:first_digit").group.trajectories[0]
    assert trajectory.tokens.tolist() == ids("0-3?a9b$not 9a9b$not 9a9b$")


def test_observations_that_are_no_text_need_a_function() -> None:
    with pytest.raises(ConfigError, match=r"env\.args\.id: .*got int; env\.args\.observe names a function"):
        gym("Numbers")
    trajectory = played(Engine(never_right), "Numbers", observe="doors_env:spoken", max_turns=1).group.trajectories[0]
    assert trajectory.tokens.tolist() == ids("number 7.9$")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("OldStyle", r"reset must return \(observation, info\), got '0-3\?'"),
        ("CannotBeMade", r"cannot be made and reset: OSError: no licence \(doors_env\.py:\d+\)"),
    ],
)
def test_what_cannot_be_made_or_reset_is_refused_at_launch(kind: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        gym(kind)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("ShortStep", "step must return (observation, reward, terminated, truncated, info), got ('x', 1.0, True, {})"),
        ("NanReward", "step must return a finite number as reward, got nan"),
        ("Raises", "KeyError: 'door' (doors_env.py:"),
    ],
)
def test_a_step_that_cannot_be_used_fails_the_episode_with_a_reason(kind: str, reason: str) -> None:
    failure = played(says("1$"), kind).failures[0]
    assert reason in failure.reason


def test_the_seed_decides_what_is_held_out() -> None:
    environment = load_environment(settings(NAME, id="doors_env:Doors"))
    assert environment.task(3).prompt == ""
    assert environment.task(3).metadata == {"seed": 3}


def test_options_reach_the_environment() -> None:
    trajectory = played(Engine(never_right), args={"doors": 8}, max_turns=1).group.trajectories[0]
    assert trajectory.tokens.tolist() == ids("0-7?9$")


def test_a_gymnasium_id_is_made_by_gymnasium(user_code: Any) -> None:
    gymnasium = pytest.importorskip("gymnasium", reason="pip install 'streamrl[gym]'")

    class Registered(user_code.Doors, gymnasium.Env):  # type: ignore[misc, name-defined]
        action_space = gymnasium.spaces.Text(8)
        observation_space = gymnasium.spaces.Text(64, charset="0123456789-?not ")

        def reset(self, seed: int | None = None, options: Any = None) -> Any:
            return user_code.Doors.reset(self, seed)

    gymnasium.register("Doors-v0", entry_point=Registered)
    try:
        result = play(settings(NAME, id="Doors-v0", max_turns=1, args={"doors": 2}), Engine(never_right))
        assert load_environment(settings(NAME, id="Doors-v0")).name == "doors-v0"
    finally:
        gymnasium.registry.pop("Doors-v0")
    assert result.failures == []
    assert result.group.trajectories[0].tokens.tolist() == ids("0-1?9$")


def test_an_unknown_gymnasium_id_is_refused() -> None:
    pytest.importorskip("gymnasium", reason="pip install 'streamrl[gym]'")
    with pytest.raises(ConfigError, match=r"env\.args\.id: nosuchenv-v9 cannot be made and reset"):
        TextGym("NoSuchEnv-v9")


def test_a_missing_gymnasium_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ConfigError, match=r"pip install 'streamrl\[gym\]'"):
        TextGym("Doors-v0")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"first": "{obs}"}, r"env\.args\.first='\{obs\}': the one field is \{observation\}, not 'obs'"),
        ({"turn": "{"}, r"env\.args\.turn='\{'"),
        ({"system": "Hi"}, r"env\.args\.system: .* env\.args\.chat=true"),
        ({"max_turns": 0}, r"env\.args\.max_turns=0"),
        ({"action": "word"}, r"env\.args\.action='word': expected package\.module:Name"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        gym(**options)
