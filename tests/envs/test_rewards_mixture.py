"""A mixture is the weighted sum of its parts, and none of them fails unseen."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from streamrl.envs import Reward, Task
from streamrl.envs.returned import checked_reward
from streamrl.envs.rewards import load_reward
from streamrl.envs.rewards.mixture import MixtureReward, Part
from streamrl.errors import ConfigError, EnvironmentFailed


class Fixed:
    def __init__(self, returned: Any) -> None:
        self.returned = returned
        self.closed = False

    async def __call__(self, task: Task, answer: Any) -> Any:
        if isinstance(self.returned, BaseException):
            raise self.returned
        return self.returned

    async def close(self) -> None:
        self.closed = True


def mix(*parts: Part) -> Reward:
    return asyncio.run(MixtureReward(parts)(Task(), "x"))


def test_the_value_is_the_weighted_sum_and_each_part_is_in_the_metrics() -> None:
    reward = mix(Part("a", Fixed(0.5), 2.0), Part("b", Fixed(Reward(3.0, {"deep": 7.0})), -1.0))
    assert reward.value == 2.0 * 0.5 - 3.0
    assert reward.metrics == {"reward/a": 0.5, "reward/b": 3.0, "reward/b/deep": 7.0}


def test_one_failing_part_fails_the_trajectory_and_is_named() -> None:
    with pytest.raises(EnvironmentFailed, match=r"^reward 'b': no judge$"):
        mix(Part("a", Fixed(1.0)), Part("b", Fixed(EnvironmentFailed("no judge"))))


def test_any_exception_of_a_part_is_its_failure() -> None:
    with pytest.raises(EnvironmentFailed, match=r"reward 'b': ValueError: what"):
        mix(Part("a", Fixed(1.0)), Part("b", Fixed(ValueError("what"))))


def test_a_part_that_wants_to_end_the_process_has_failed() -> None:
    with pytest.raises(EnvironmentFailed, match=r"reward 'b': SystemExit: 3"):
        mix(Part("a", Fixed(1.0)), Part("b", Fixed(SystemExit(3))))


@pytest.mark.parametrize("value", [float("nan"), "1", None], ids=str)
def test_a_part_that_gives_no_finite_number_has_failed(value: Any) -> None:
    with pytest.raises(EnvironmentFailed, match=r"reward 'a': the reward must be a finite number"):
        mix(Part("a", Fixed(value)))


def test_an_optional_part_may_fail_and_says_so() -> None:
    reward = mix(Part("a", Fixed(1.0), 0.5), Part("b", Fixed(EnvironmentFailed("no judge")), 9.0, optional=True))
    assert reward.value == 0.5
    assert reward.metrics == {"reward/a": 1.0, "reward/b/failed": 1.0}
    assert reward.metadata == {"reward/b/reason": "reward 'b': no judge"}


def test_a_long_reason_of_an_optional_part_still_travels() -> None:
    reward = mix(Part("a", Fixed(1.0)), Part("b", Fixed(EnvironmentFailed("x" * 9_000)), optional=True))
    assert checked_reward(reward).value == 1.0


def test_an_optional_part_that_works_counts_like_any_other() -> None:
    reward = mix(Part("a", Fixed(1.0), 0.5, optional=True))
    assert reward.value == 0.5
    assert reward.metrics == {"reward/a": 1.0, "reward/a/failed": 0.0}


def test_when_every_optional_part_fails_there_is_no_reward() -> None:
    with pytest.raises(EnvironmentFailed, match="every part of the reward failed: reward 'a': gone"):
        mix(Part("a", Fixed(EnvironmentFailed("gone")), optional=True))


def test_columns_of_the_parts_travel_and_must_not_share_a_name() -> None:
    column = Reward(0.0, columns={"c": np.ones(1)})
    assert mix(Part("a", Fixed(column))).columns["c"] == 1.0
    with pytest.raises(EnvironmentFailed, match="reward 'b': 'c' is also given by another part"):
        mix(Part("a", Fixed(column)), Part("b", Fixed(column)))


def test_closing_a_mixture_closes_every_part() -> None:
    parts = [Fixed(0.0), Fixed(0.0)]
    asyncio.run(MixtureReward([Part(str(place), part) for place, part in enumerate(parts)]).close())
    assert [part.closed for part in parts] == [True, True]


def test_parts_are_scored_at_the_same_time() -> None:
    async def both() -> float:
        met = asyncio.Barrier(2)

        class Meets(Fixed):
            async def __call__(self, task: Task, answer: Any) -> float:
                await met.wait()
                return 1.0

        async with asyncio.timeout(30):
            return (await MixtureReward([Part("a", Meets(0)), Part("b", Meets(0))])(Task(), "x")).value

    assert asyncio.run(both()) == 2.0


def test_a_list_of_specs_is_a_mixture() -> None:
    spec = ["exact", {"name": "exact", "normalise": True, "weight": 0.5, "metric": "loose"}]
    reward = asyncio.run(load_reward(spec)(Task(answer="Yes"), "yes!"))
    assert isinstance(reward, Reward)
    assert reward.value == 0.5
    assert reward.metrics == {"reward/exact": 0.0, "reward/loose": 1.0}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (["exact", "exact"], "two parts are called 'exact'; give one another `metric`"),
        ([{"name": "exact", "weight": "high"}], r"env.args.reward\[0\]: weight='high' must be a finite number"),
        ([{"name": "exact", "optional": 1}], r"\[0\]: optional=1 must be true or false"),
        (["exact", {"name": "exat"}], r"env.args.reward\[1\]='exat': no such reward; did you mean 'exact'"),
    ],
    ids=str,
)
def test_a_mixture_that_cannot_be_is_refused(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_reward(spec)
