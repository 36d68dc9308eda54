"""Held-out prompts never train, and both sets are the same every time."""

from __future__ import annotations

from typing import Any

import pytest
from scripted import settings

from streamrl.envs.environment import Environment, Task, load_environment
from streamrl.envs.split import Split
from streamrl.errors import ConfigError


async def no_episode(task: Task, policy: Any) -> float:
    raise NotImplementedError


def made_of(prompts: list[str]) -> Environment:
    return Environment("made", no_episode, lambda index: Task(prompts[index]), len(prompts))


def chain_sum() -> Environment:
    return load_environment(
        settings(
            "streamrl.envs.reasoning_gym:ReasoningGym",
            family="chain_sum",
            template="{expression}=",
            compact=True,
            min_terms=2,
            max_terms=2,
            min_digits=2,
            max_digits=2,
        )
    )


def test_no_held_out_prompt_of_chain_sum_occurs_in_training() -> None:
    split = Split(chain_sum(), seed=3)
    held_out = {task.prompt for task in split.held_out(1_000)}
    trained = {split.train(index).prompt for index in range(5_000)}
    assert len(held_out) == 1_000
    assert len(trained) > 3_000
    assert not held_out & trained


def test_the_training_sequence_depends_on_seed_and_index_alone() -> None:
    first, again, other = (Split(chain_sum(), seed) for seed in (1, 1, 2))
    sequence = [first.train(index) for index in range(50)]
    assert [again.train(index) for index in reversed(range(50))] == sequence[::-1]
    assert len({task.prompt for task in sequence} & {other.train(index).prompt for index in range(50)}) < 5


def test_the_held_out_set_is_the_same_for_every_seed_and_distinct() -> None:
    tasks = Split(chain_sum(), seed=1).held_out(100)
    assert tasks == Split(chain_sum(), seed=2).held_out(100)
    assert len({task.prompt for task in tasks}) == 100


def test_about_a_tenth_of_the_prompts_is_held_out() -> None:
    environment = made_of([f"{number}?" for number in range(5_000)])
    share = sum(Split(environment, 0).is_held_out(environment.task(index)) for index in range(5_000)) / 5_000
    assert share == pytest.approx(0.1, abs=4 * (0.1 * 0.9 / 5_000) ** 0.5)


def test_a_small_environment_gives_all_the_held_out_prompts_it_has() -> None:
    environment = made_of([f"{number % 60}?" for number in range(200)])
    split = Split(environment, 0, held_out=0.2)
    every = {environment.task(index).prompt for index in range(200)}
    kept = {prompt for prompt in every if split.is_held_out(Task(prompt))}
    assert {task.prompt for task in split.held_out(64)} == kept
    assert {split.train(index).prompt for index in range(2_000)} == every - kept


def test_held_out_tasks_of_an_ordered_environment_come_from_all_of_it() -> None:
    environment = load_environment(settings("streamrl.envs.strings:Addition"))
    first_numbers = [int(task.prompt.partition("+")[0]) for task in Split(environment, 0).held_out(256)]
    assert min(first_numbers) < 20 and max(first_numbers) > 89
    assert sum(first_numbers) / 256 == pytest.approx(54.5, abs=4 * 26 / 16)


def test_tasks_without_a_prompt_are_split_by_their_index() -> None:
    split = Split(Environment("bare", no_episode), seed=0)
    held_out = {task.index for task in split.held_out(300)}
    trained = {split.train(index).index for index in range(3_000)}
    assert len(held_out) == 300
    assert not held_out & trained
    assert not any(split.is_held_out(Task(index=index)) for index in trained)


def test_a_single_prompt_cannot_both_train_and_be_held_out() -> None:
    prompts = [f"{number}?" for number in range(40)]
    chosen = {Split(made_of([prompt]), 0).is_held_out(Task(prompt)): prompt for prompt in prompts}
    with pytest.raises(ConfigError, match="too few distinct prompts to split; .*eval.tasks=0"):
        Split(made_of([chosen[True]]), 0).train(0)
    with pytest.raises(ConfigError, match="none of 1 tasks is held out for evaluation; .*eval.tasks=0"):
        Split(made_of([chosen[False]]), 0).held_out(8)


def test_without_evaluation_every_prompt_trains() -> None:
    config = settings("streamrl.envs.strings:Addition", digits=1)
    config.eval.tasks = 0
    split = Split.of(load_environment(config), config)
    assert split.held_out(0) == []
    assert len({split.train(index).prompt for index in range(2_000)}) == 100


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_share_outside_of_zero_to_one_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="must lie in"):
        Split(made_of(["1"]), 0, held_out=share)
