"""A mixture is its parts in the shares of their weights, and a curriculum moves those while training only."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from scripted import CharTokenizer, lease, says, settings

from streamrl.envs.adapters.mixture import Mixture, PartStats, learnable
from streamrl.envs.environment import Environment, load_environment
from streamrl.envs.group import GroupRunner
from streamrl.envs.split import Split
from streamrl.errors import ConfigError, EnvironmentFailed

NAME = "streamrl.envs.adapters.mixture:Mixture"
CODE = """
from streamrl.envs import Reward, Task

CLOSED, PLAYED = [], []

class Letters:
    def __init__(self, letter="a"):
        self.name = self.letter = letter
    def task(self, index):
        return Task(f"{self.letter}{index}", str(index), {"own": index})
    async def episode(self, task, policy):
        assert task.prompt == f"{self.letter}{task.index}" and task.metadata == {"own": task.index}
        await policy.complete(task.prompt)
        return Reward(1.0 if self.letter == "a" else 0.0, metadata={"of": self.letter})
    def played(self, task, rewards):
        PLAYED.append((self.letter, task.index, list(rewards)))
    async def close(self):
        CLOSED.append(self.letter)

class Few(Letters):
    def __len__(self):
        return 5

def plain(task, policy):
    policy.complete("x")
    return 0.5

class NotAsync(Letters):
    def close(self):
        pass

class NoRewards(Letters):
    def played(self, task):
        pass

def only_b(parts):
    return {"b": 1.0}

def switch(parts):
    return {"b": 1.0} if parts["a"].groups else {"a": 1.0}

def nonsense(parts):
    return {"c": 1.0}

def nothing(parts):
    return {}
"""


@pytest.fixture(autouse=True)
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "letters_env.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "letters_env", raising=False)
    import letters_env  # type: ignore[import-not-found]

    return letters_env


def part(letter: str, weight: float = 1.0, kind: str = "Letters") -> dict[str, Any]:
    return {"name": f"letters_env:{kind}", "args": {"letter": letter}, "weight": weight}


def mixture(*parts: dict[str, Any], **options: Any) -> Environment:
    return load_environment(settings(NAME, parts=list(parts), **options))


def shares(environment: Environment, count: int = 4_000, training: bool = False) -> dict[str, float]:
    make = environment.training_task if training else environment.task
    counts = Counter(environment.name_of(make(index)) for index in range(count))
    return {label: counts[label] / count for label in counts}


def played(environment: Environment, prompt: int = 0) -> Any:
    split = Split(environment, seed=0, held_out=0.0)
    runner = GroupRunner(split, says("1$"), CharTokenizer(), settings(NAME))
    return asyncio.run(runner.run_group(lease(prompt=prompt)))


def test_the_parts_come_in_the_shares_of_their_weights() -> None:
    got = shares(mixture(part("a", 3.0), part("b", 1.0)))
    assert got["a"] == pytest.approx(0.75, abs=4 * (0.75 * 0.25 / 4_000) ** 0.5)  # four standard deviations


def test_a_task_depends_on_its_index_alone() -> None:
    first, again = (mixture(part("a"), part("b", 2.0), part("c")) for _ in range(2))
    assert [first.task(index) for index in range(200)] == [again.task(index) for index in reversed(range(200))][::-1]


def test_an_episode_plays_its_part_with_the_part_s_own_task() -> None:
    results = [played(mixture(part("a"), part("b")), prompt) for prompt in range(12)]
    assert all(result.failures == [] for result in results)
    assert {(each.group.env, *each.group.rewards.tolist()) for each in results} == {("a", 1.0, 1.0), ("b", 0.0, 0.0)}


def test_a_part_with_few_tasks_is_asked_for_those_it_has() -> None:
    environment = mixture(part("a", kind="Few"))
    assert {environment.task(index).prompt for index in range(200)} == {"a0", "a1", "a2", "a3", "a4"}


def test_a_part_may_be_a_plain_function() -> None:
    result = played(mixture({"name": "letters_env:plain"}))
    assert result.failures == []
    assert result.group.env == "plain"
    assert result.group.rewards.tolist() == [0.5, 0.5]


def test_mixtures_can_be_nested() -> None:
    inner = {"name": NAME, "args": {"parts": [part("a"), part("b")]}, "label": "inner"}
    results = [played(mixture(inner, part("c")), prompt) for prompt in range(12)]
    assert {result.group.env for result in results} == {"inner", "c"}
    assert all(result.failures == [] for result in results)


def test_what_a_part_holds_out_never_trains() -> None:
    split = Split(mixture(part("a", 5.0), part("b")), seed=1)
    held_out = {task.prompt for task in split.held_out(300)}
    assert {prompt[0] for prompt in held_out} == {"a", "b"}
    assert not held_out & {split.train(index).prompt for index in range(3_000)}


def test_a_held_out_prompt_does_not_train_under_a_curriculum_either() -> None:
    split = Split(mixture(part("a", kind="Few"), part("b"), curriculum="letters_env:switch"), seed=1, held_out=0.5)
    assert {split.train(index).prompt[0] for index in range(50)} == {"a"}
    assert not any(split.is_held_out(split.train(index)) for index in range(50))


def test_a_curriculum_moves_training_tasks_and_leaves_the_others() -> None:
    environment = mixture(part("a", 3.0), part("b"), curriculum="letters_env:only_b")
    assert shares(environment, training=True) == {"b": 1.0}
    assert shares(environment)["a"] > 0.7


def test_a_curriculum_sees_what_was_played_and_the_choice_stands_in_the_trajectory() -> None:
    environment = mixture(part("a"), part("b"), curriculum="letters_env:switch")
    first, second = played(environment), played(environment)
    assert [first.group.env, second.group.env] == ["a", "b"]
    for group in (first.group, second.group):
        recorded = group.trajectories[0].metadata
        assert recorded == {"of": group.env, "task": {"part": group.env, "index": recorded["task"]["index"]}}


def test_an_evaluation_does_not_move_a_curriculum() -> None:
    environment = mixture(part("a"), part("b"), curriculum="letters_env:switch")
    runner = GroupRunner(Split(environment, 0, 0.0), says("1$"), CharTokenizer(), settings(NAME))
    asyncio.run(runner.evaluate([environment.task(0)]))
    assert shares(environment, training=True) == {"a": 1.0}


def test_a_part_hears_what_was_played_of_it(user_code: Any) -> None:
    group = played(mixture(part("a"))).group
    ((letter, index, rewards),) = user_code.PLAYED
    assert (letter, rewards) == ("a", [1.0, 1.0])
    assert group.trajectories[0].metadata == {"of": "a"}
    assert isinstance(index, int)


def test_closing_a_mixture_closes_its_parts(user_code: Any) -> None:
    asyncio.run(mixture(part("a"), part("b")).close())
    assert user_code.CLOSED == ["a", "b"]


def test_the_curriculum_of_a_mixture_within_a_mixture_is_asked_for_training_tasks() -> None:
    inner = {"parts": [part("a"), part("b")], "curriculum": "letters_env:only_b"}
    outer = mixture({"name": "streamrl.envs.adapters.mixture:Mixture", "args": inner, "label": "inner"})
    trained = {outer.training_task(index).metadata["metadata"]["part"] for index in range(50)}
    held_out = {outer.task(index).metadata["metadata"]["part"] for index in range(50)}
    assert (trained, held_out) == ({"b"}, {"a", "b"})


def test_statistics_are_means_over_the_last_groups() -> None:
    own = Mixture([part("a"), part("b", 3.0)])
    task = next(task for task in map(own.task, range(50)) if own.env_of(task) == "a")
    for reward in (0.0, 0.5, 1.0):
        own.played(task, [reward, reward])
    seen: list[Any] = []
    own._curriculum = lambda parts: seen.append(dict(parts)) or {"a": 1.0}  # type: ignore[func-returns-value]
    own.training_task(0)
    assert seen == [{"a": PartStats(0.25, 3, 0.5), "b": PartStats(0.75, 0, None)}]


def test_learnable_prefers_parts_that_are_neither_solved_nor_hopeless() -> None:
    stats = {"new": PartStats(0.25, 0, None), "half": PartStats(0.25, 9, 0.5), "solved": PartStats(0.5, 9, 1.0)}
    assert learnable(stats) == {"new": 0.0625, "half": 0.0625, "solved": 0.0125}


@pytest.mark.parametrize(
    ("curriculum", "reason"), [("nonsense", "gave a weight to 'c'"), ("nothing", "every part the weight 0")]
)
def test_weights_that_cannot_be_used_fail_the_group_with_a_reason(curriculum: str, reason: str) -> None:
    with pytest.raises(EnvironmentFailed, match=reason):
        mixture(part("a"), part("b"), curriculum=f"letters_env:{curriculum}").training_task(0)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([], r"env\.args\.parts: expected a list"),
        (["a"], r"env\.args\.parts\[0\]: expected \{name"),
        ([part("a"), part("a")], r"env\.args\.parts\[1\]: a second part is called 'a'; give each a label"),
        ([{**part("a"), "label": "a b"}], r"env\.args\.parts\[0\]\.label: name 'a b' must be letters"),
        ([part("a", 0.0)], r"env\.args\.parts\[0\]\.weight=0\.0: expected a number above 0"),
        ([part("a", float("nan"))], r"env\.args\.parts\[0\]\.weight=nan"),
        ([{**part("a"), "wieght": 2}], r"env\.args\.parts\[0\]: env\.args\.wieght: a part has no .* 'weight'\?"),
        ([{**part("a"), "name": "letters_env:Leters"}], r"parts\[0\]: env\.name=.* did you mean 'Letters'\?"),
        ([part("a", kind="NotAsync")], r"NotAsync\.close must be `async def close\(self\)`"),
        ([part("a", kind="NoRewards")], r"NoRewards\.played must be `def played\(self, task, rewards\)`"),
    ],
)
def test_parts_that_cannot_be_used_are_refused_by_their_place(parts: list[Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        mixture(*parts)


def test_a_label_tells_two_parts_of_the_same_name_apart() -> None:
    environment = mixture(part("a"), {**part("a"), "label": "second"})
    assert set(shares(environment, 50)) == {"a", "second"}


def test_families_of_reasoning_gym_mix_by_weight() -> None:
    pytest.importorskip("reasoning_gym", reason="pip install 'streamrl[envs]'")
    environment = load_environment(
        settings(
            "streamrl.envs.adapters.families:Families",
            families={"chain_sum": 3, "spell_backward": {"weight": 1, "max_word_len": 4}},
            common={"size": 1000},
        )
    )
    assert environment.name == "families"
    assert shares(environment, 400)["chain_sum"] == pytest.approx(0.75, abs=0.09)
