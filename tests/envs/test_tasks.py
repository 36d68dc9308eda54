"""The environments that come with streamrl: prompts, answers, rewards."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from scripted import ids, play, says, settings

from streamrl.envs.environment import Completion, Environment, Task, load_environment
from streamrl.envs.split import Split
from streamrl.envs.strings import Reverse
from streamrl.errors import ConfigError
from streamrl.schema import Config
from streamrl.types import Trajectory

GYM = "streamrl.envs.reasoning_gym:ReasoningGym"
TWO_DIGITS = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}


def load(name: str, **args: Any) -> Environment:
    return load_environment(settings(name, **args))


def reward_of(config: Config, *answers: str) -> Trajectory:
    """What the first of two trajectories gets when its task is that of lease 0 and it answers so."""
    result = play(config, says(*[answer for answer in answers for _ in range(2)]))
    assert result.group is not None, result.failures
    return result.group.trajectories[0]


def first_task(config: Config) -> Task:
    return Split(load_environment(config), config.seed, held_out=0.0).train(0)


def test_reasoning_gym_renders_the_template_and_carries_the_answer() -> None:
    environment = load(GYM, family="chain_sum", template="{expression}=", **TWO_DIGITS)
    assert environment.name == "chain_sum"
    for index in range(50):
        task = environment.task(index)
        left, operator, right = task.prompt.removesuffix("=").split(" ")
        assert int(task.answer or "") == (int(left) + int(right) if operator == "+" else int(left) - int(right))
        assert 10 <= int(left) <= 99 and 10 <= int(right) <= 99


def test_compact_removes_the_spaces_of_the_prompt() -> None:
    spaced = load(GYM, family="chain_sum", template="{expression} =")
    compact = load(GYM, family="chain_sum", template="{expression} =", compact=True)
    assert compact.task(3).prompt == spaced.task(3).prompt.replace(" ", "")
    assert " " in spaced.task(3).prompt


def test_the_question_is_the_default_prompt() -> None:
    task = load(GYM, family="basic_arithmetic").task(0)
    assert task.prompt == task.metadata["question"]
    assert task.prompt.startswith("Calculate ")


def test_entries_depend_on_seed_and_index_alone_and_are_drawn_lazily() -> None:
    first, again, other = (load(GYM, seed=seed) for seed in (5, 5, 6))
    assert first.size == 1_000_000
    assert first.task(999_999) == again.task(999_999)
    assert first.task(1).prompt == other.task(0).prompt != first.task(0).prompt


def test_a_family_that_builds_its_entries_ahead_gets_a_smaller_size() -> None:
    assert load(GYM, family="word_ladder").size == 20_000


@pytest.mark.parametrize(
    ("given", "expected"),
    [("{}$", 1.0), (" {} $", 1.0), ("0{}.0$", 1.0), ("{}", 1.0), ("x$", 0.0), ("$", 0.0), ("x{}$", "partial")],
)
def test_the_familys_scorer_gives_the_reward(given: str, expected: float | str) -> None:
    config = settings(GYM, family="chain_sum", template="{expression}=", **TWO_DIGITS)
    config.seed = next(seed for seed in range(99) if _with_seed(config, seed).answer.isdecimal())  # type: ignore[union-attr]
    config.sampling.max_tokens = 16
    answer = first_task(config).answer or ""
    trajectory = reward_of(config, given.format(answer))
    assert trajectory.reward == (len(answer) / (len(answer) + 1) if expected == "partial" else expected)
    assert trajectory.metrics == {"scorer_raised": 0.0}


def _with_seed(config: Config, seed: int) -> Task:
    config.seed = seed
    return first_task(config)


def test_a_scorer_that_raises_is_a_wrong_answer_and_counted() -> None:
    config = settings(GYM, family="prime_factorization", template="{number}=")
    trajectory = reward_of(config, "x$")
    assert (trajectory.reward, trajectory.metrics) == (0.0, {"scorer_raised": 1.0})


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"family": "chain_sums"}, "reasoning-gym has no such family; did you mean 'chain_sum'"),
        ({"min_digit": 2}, "env.args.min_digit: family chain_sum has no such option; did you mean 'min_digits'"),
        ({"min_terms": 5, "max_terms": 2}, "chain_sum refuses these options: max_terms must be >= min_terms"),
        ({"size": 0}, "chain_sum refuses these options: "),
        ({"template": "{expresion}="}, "chain_sum has no field 'expresion'; did you mean 'expression'?"),
        ({"template": "{expression="}, "env.args.template='{expression=': "),
        ({"template": "{expression.length}="}, "cannot be filled in: "),
        ({"template": "go"}, "it must use a field, such as {question}"),
    ],
)
def test_reasoning_gym_refuses_what_the_family_does_not_know(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(GYM, **args)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_addition_asks_every_pair_once() -> None:
    environment = load("streamrl.envs.strings:Addition")
    prompts = {environment.task(index).prompt for index in range(environment.size or 0)}
    assert prompts == {f"{a}+{b}=" for a in range(10, 100) for b in range(10, 100)}
    assert environment.task(0) == Task("10+10=", "20")


def test_addition_rewards_the_exact_answer_only() -> None:
    config = settings("streamrl.envs.strings:Addition")
    answer = first_task(config).answer
    assert [reward_of(config, f"{text}$").reward for text in (answer, f"{answer}0", "")] == [1.0, 0.0, 0.0]


def test_reverse_asks_for_strings_of_log_uniform_length() -> None:
    environment = load("streamrl.envs.strings:Reverse")
    tasks = [environment.task(index) for index in range(4_000)]
    assert all(task.prompt == f"{(task.answer or '')[::-1]}>" for task in tasks)
    lengths = Counter(len(task.answer or "") for task in tasks)
    assert (min(lengths), max(lengths)) == (1, 64)
    for low, high in ((1, 3), (4, 15), (16, 64)):
        share = sum(lengths[length] for length in range(low, high + 1)) / len(tasks)
        assert share == pytest.approx(math.log((high + 1) / low) / math.log(65), abs=0.03)


@pytest.mark.parametrize(
    ("given", "partial", "exact"),
    [("cba", 1.0, 1.0), ("cbx", 2 / 3, 0.0), ("cb", 2 / 3, 0.0), ("cbaxyz", 0.5, 0.0), ("", 0.0, 0.0)],
)
def test_reverse_pays_for_right_positions_unless_told_otherwise(given: str, partial: float, exact: float) -> None:
    class Policy:
        async def complete(self, text: str, max_tokens: Any = None, stop: Any = None) -> Completion:
            return Completion(given, (), "stop")

    task = Task("abc>", "cba")
    assert asyncio.run(Reverse().episode(task, Policy())) == partial
    assert asyncio.run(Reverse(partial=False).episode(task, Policy())) == exact


def guess_config() -> tuple[Config, int, int]:
    """A config whose first task hides a number above the lowest of its range; that number, and the lowest."""
    for seed in range(99):
        config = settings("streamrl.envs.guess:Guess")
        config.seed = seed
        task = first_task(config)
        low = int(task.prompt.partition("-")[0])
        if int(task.answer or "") > low:
            return config, int(task.answer or ""), low
    raise AssertionError("no such task")


def test_guess_rewards_the_first_try_more_than_the_second() -> None:
    config, hidden, low = guess_config()
    assert reward_of(config, f"{hidden}$").reward == 1.0
    assert reward_of(config, f"{low}$", f"{hidden}$").reward == 0.5
    assert reward_of(config, f"{low}$", f"{low}$").reward == 0.0


@pytest.mark.parametrize(("offset", "hint"), [(-1, ">"), (1, "<")])
def test_a_wrong_guess_is_answered_by_a_hint(offset: int, hint: str) -> None:
    config, hidden, _ = guess_config()
    engine = says(f"{hidden + offset}$")
    result = play(config, engine)
    assert result.group is not None
    assert [each.turns for each in result.group.trajectories] == [2, 2]
    assert engine.requests[2][0] == ids(f"{first_task(config).prompt}{hidden + offset}${hint}")


def test_a_guess_that_is_no_number_is_answered_by_a_question_mark() -> None:
    config, hidden, _ = guess_config()
    trajectory = reward_of(config, "x$", f"{hidden}$")
    assert trajectory.reward == 0.5


def test_guess_hides_every_number_of_its_range() -> None:
    environment = load("streamrl.envs.guess:Guess")
    tasks = [environment.task(index) for index in range(environment.size or 0)]
    offsets = Counter(int(task.answer or "") - int(task.prompt.partition("-")[0]) for task in tasks)
    assert set(offsets) == {0, 1, 2}
    assert len({task.prompt for task in tasks}) == 98


@pytest.mark.parametrize(
    ("name", "args"),
    [("strings:Addition", {"digits": 0}), ("strings:Reverse", {"longest": 0}), ("guess:Guess", {"span": 0})],
)
def test_options_out_of_range_are_refused(name: str, args: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="env.args"):
        load(f"streamrl.envs.{name}", **args)


@pytest.mark.parametrize("name", ["Larger", "echo"])
def test_the_ten_line_example_loads_by_name_and_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))
    result = play(settings(f"examples.ten_lines:{name}"), says("1$"), size=4)
    assert result.failures == []
    assert result.group is not None and result.group.env == name.lower()
