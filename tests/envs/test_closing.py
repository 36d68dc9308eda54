"""A group is closed without its stragglers, or waits for them; a trajectory in it is whole."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import ScriptedEngine, generation, ids, lease, runner, settings
from virtual_time import run_in_virtual_time

from streamrl.envs.closing import ClosingPolicy, Played, Straggler
from streamrl.envs.failure import Failure
from streamrl.envs.group import GroupResult
from streamrl.envs.guard import GRACE_S
from streamrl.schema import Config
from streamrl.types import Generation, SamplingParams, Trajectory

EPISODES = """
import asyncio

async def takes(task, policy):
    seconds = float((await policy.complete("1=")).text)
    await asyncio.sleep(seconds)
    if seconds == 13:
        raise ValueError("unlucky")
    return seconds

async def samples(task, policy):
    completion = await policy.complete("1=")
    return float(completion.text)

async def two_turns(task, policy):
    first = float((await policy.complete("1=")).text)
    second = float((await policy.complete("<")).text)
    return first + second

async def answers_when_cancelled(task, policy):
    seconds = float((await policy.complete("1=")).text)
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        return -1.0
    return seconds

async def goes_on_when_cancelled(task, policy):
    seconds = float((await policy.complete("1=")).text)
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        await policy.complete("<")
    return seconds

async def waits_when_cancelled(task, policy):
    seconds = float((await policy.complete("1=")).text)
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        await asyncio.Event().wait()
    return seconds
"""


@pytest.fixture(autouse=True)
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_episodes.py").write_text(EPISODES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "user_episodes", raising=False)


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(EPISODES.splitlines(), 1) if text in line)


def closing(name: str = "takes", min_size: int = 2, straggler_s: float = 3.0) -> Config:
    config = settings(f"user_episodes:{name}")
    config.env.timeout_s = 1_000.0
    config.group.on_straggler = "close"
    config.group.min_size = min_size
    config.group.straggler_s = straggler_s
    return config


class SlowEngine(ScriptedEngine):
    """The n-th request is answered by the n-th text; an answer ``12`` may take 12 seconds."""

    def __init__(self, *texts: str, sampling: bool = False) -> None:
        super().__init__(lambda *_: generation(ids(texts[len(self.requests) - 1] + "$")))
        self._sampling = sampling

    async def generate(self, prompt_ids: object, params: SamplingParams) -> Generation:
        answer = await super().generate(prompt_ids, params)  # type: ignore[arg-type]
        if self._sampling:
            try:
                await asyncio.sleep(float("".join(map(str, answer.token_ids[:-1]))))
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        return answer


def play_slowly(config: Config, engine: SlowEngine, size: int) -> tuple[GroupResult, float]:
    """The result, and at which second it was there."""

    async def main() -> tuple[GroupResult, float]:
        result = await runner(config, engine).run_group(lease(size))
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return result, asyncio.get_running_loop().time()

    return run_in_virtual_time(main())


def rewards(result: GroupResult) -> list[float]:
    assert result.group is not None
    return result.group.rewards.tolist()


def test_a_group_is_closed_so_many_seconds_after_it_was_large_enough() -> None:
    result, at = play_slowly(closing(), SlowEngine("20", "4", "1", "6", "9"), size=5)
    assert at == 4.0 + 3.0
    assert rewards(result) == [4.0, 1.0, 6.0]
    line = line_of("await asyncio.sleep(seconds)")
    reason = "still running group.straggler_s=3 after group.min_size=2 of 5 episodes finished"
    assert result.stragglers == [Straggler(f"{reason} (user_episodes.py:{line})")] * 2
    assert result.failures == []


def test_by_default_a_group_waits_for_all() -> None:
    config = closing(straggler_s=1.0)
    config.group.on_straggler = Config().group.on_straggler
    result, at = play_slowly(config, SlowEngine("20", "4", "1"), size=3)
    assert (rewards(result), at, result.stragglers) == ([20.0, 4.0, 1.0], 20.0, [])


def test_a_group_whose_trajectories_all_finish_early_is_not_held() -> None:
    result, at = play_slowly(closing(straggler_s=100.0), SlowEngine("2", "4", "1"), size=3)
    assert (rewards(result), at, result.stragglers) == ([2.0, 4.0, 1.0], 4.0, [])


def test_a_failure_does_not_start_the_deadline() -> None:
    result, at = play_slowly(closing(), SlowEngine("13", "1", "15", "99"), size=4)
    assert at == 15.0 + 3.0
    assert rewards(result) == [1.0, 15.0]
    assert [failure.reason[:19] for failure in result.failures] == ["ValueError: unlucky"]
    assert len(result.stragglers) == 1


def test_a_group_that_failures_left_too_small_is_ended_at_once() -> None:
    result, at = play_slowly(closing(min_size=3), SlowEngine("13", "1", "13", "99"), size=4)
    assert at == 13.0
    assert result.group is None
    assert len(result.failures) == 2
    line = line_of("await asyncio.sleep(seconds)")
    assert result.stragglers == [
        Straggler(f"cancelled: failures left fewer than group.min_size=3 of 4 episodes (user_episodes.py:{line})")
    ]


def test_a_group_that_waits_needs_its_least_size_too() -> None:
    config = closing(min_size=3)
    config.group.on_straggler = "wait"
    small, _ = play_slowly(config, SlowEngine("13", "1", "13", "2"), size=4)
    assert small.group is None and len(small.failures) == 2
    enough, _ = play_slowly(config, SlowEngine("13", "1", "3", "2"), size=4)
    assert rewards(enough) == [1.0, 3.0, 2.0]


def test_closing_cancels_the_stragglers_requests_and_names_the_users_line() -> None:
    engine = SlowEngine("1", "90", "2", "80", sampling=True)
    result, at = play_slowly(closing("samples"), engine, size=4)
    assert (rewards(result), at, engine.cancelled) == ([1.0, 2.0], 5.0, 2)
    place = f"(user_episodes.py:{line_of('completion = await')})"
    assert [straggler.reason.endswith(place) for straggler in result.stragglers] == [True, True]


def test_a_straggler_in_its_second_turn_leaves_nothing_of_its_first() -> None:
    engine = SlowEngine("1", "2", "3", "1", "1", "90", sampling=True)
    result, at = play_slowly(closing("two_turns"), engine, size=3)
    assert (rewards(result), at) == ([2.0, 3.0], 6.0)
    assert len(result.stragglers) == 1
    assert result.group is not None
    assert [each.turns for each in result.group.trajectories] == [2, 2]


@pytest.mark.parametrize("name", ["answers_when_cancelled", "goes_on_when_cancelled"])
def test_an_answer_given_because_of_the_cancellation_is_no_trajectory(name: str) -> None:
    engine = SlowEngine("1", "2", "90")
    result, at = play_slowly(closing(name), engine, size=3)
    assert (rewards(result), at) == ([1.0, 2.0], 5.0)
    reason = "still running group.straggler_s=3 after group.min_size=2 of 3 episodes finished"
    assert result.stragglers == [Straggler(reason)]
    assert len(engine.requests) == 3
    assert result.failures == []


def test_an_episode_that_waits_on_when_cancelled_holds_the_group_for_a_moment_only() -> None:
    result, at = play_slowly(closing("waits_when_cancelled"), SlowEngine("1", "2", "90"), size=3)
    assert (rewards(result), at, result.failures) == ([1.0, 2.0], 5.0 + GRACE_S, [])
    assert len(result.stragglers) == 1


def test_a_trajectory_that_finishes_at_the_very_deadline_is_whole_or_absent() -> None:
    """Its timer and the deadline's fire in the same turn of the loop."""
    result, at = play_slowly(closing(), SlowEngine("1", "2", "5", "90"), size=4)
    assert at == 5.0
    assert rewards(result) in ([1.0, 2.0], [1.0, 2.0, 5.0])
    assert len(rewards(result)) + len(result.stragglers) == 4
    assert result.group is not None
    for each, reward in zip(result.group.trajectories, ["1", "2", "5"], strict=False):
        assert each.tokens.tolist() == ids(f"1={reward}$")
        assert each.sampled_count == 2


def test_an_error_of_the_engine_ends_a_group_that_is_being_closed() -> None:
    class FailsWhenCancelled(SlowEngine):
        async def generate(self, prompt_ids: object, params: SamplingParams) -> Generation:
            try:
                return await super().generate(prompt_ids, params)
            except asyncio.CancelledError:
                raise MemoryError("no slot") from None

    with pytest.raises(MemoryError, match="no slot"):
        play_slowly(closing(), FailsWhenCancelled("1", "2", "90", sampling=True), size=3)


def test_an_error_of_the_engine_does_not_wait_for_the_deadline() -> None:
    class FailsOnce(SlowEngine):
        async def generate(self, prompt_ids: object, params: SamplingParams) -> Generation:
            answer = await super().generate(prompt_ids, params)
            if len(answer.token_ids) == 3:
                raise MemoryError("no slot")
            return answer

    async def main() -> float:
        engine = FailsOnce("1", "20", "90", sampling=True)
        with pytest.raises(MemoryError, match="no slot"):
            await runner(closing(straggler_s=1_000.0), engine).run_group(lease(3))
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(main()) == 20.0


def test_an_engine_that_is_closed_cancels_the_group_and_blames_nobody() -> None:
    class Closes(SlowEngine):
        async def generate(self, prompt_ids: object, params: SamplingParams) -> Generation:
            await super().generate(prompt_ids, params)
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        play_slowly(closing(), Closes("1", "2", "90", sampling=True), size=3)


def test_cancelling_a_group_before_it_is_closed_cancels_every_episode() -> None:
    async def main() -> int:
        engine = SlowEngine("1", "2", "90", "90", sampling=True)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(4.0):
                await runner(closing(), engine).run_group(lease(4))
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return engine.cancelled

    assert run_in_virtual_time(main()) == 2


outcomes = st.lists(st.tuples(st.integers(0, 12), st.booleans()), min_size=2, max_size=8)


@given(episodes=outcomes, enough=st.integers(2, 8), straggler_s=st.integers(0, 12))
def test_every_episode_is_in_exactly_one_of_the_lists(
    episodes: list[tuple[int, bool]], enough: int, straggler_s: int
) -> None:
    """Against the rule worked out from the ending times; half a second keeps ends and deadline apart."""
    enough = min(enough, len(episodes))
    good = sorted(seconds for seconds, fails in episodes if not fails)
    if len(good) >= enough:
        closed_at = good[enough - 1] + straggler_s + 0.5
    else:  # lost with the failure that makes the rest too few
        bad = sorted(seconds for seconds, fails in episodes if fails)
        closed_at = bad[len(episodes) - enough]

    class FakeEpisode:
        def close(self) -> bool:
            return True

    async def episode(place: int, seconds: int, fails: bool) -> Played | Failure:
        await asyncio.sleep(seconds)
        if fails:
            return Failure(str(place), "")
        empty = np.zeros(0)
        return Played([Trajectory(empty, empty, empty, [], reward=place)])

    async def main() -> list[Played | Failure | Straggler]:
        running = [episode(place, *each) for place, each in enumerate(episodes)]
        fakes = [FakeEpisode() for _ in episodes]
        ended = await ClosingPolicy(enough, straggler_s + 0.5).play(fakes, running)  # type: ignore[arg-type]
        assert asyncio.get_running_loop().time() == min(closed_at, max(seconds for seconds, _ in episodes))
        return ended

    for place, (outcome, (seconds, fails)) in enumerate(zip(run_in_virtual_time(main()), episodes, strict=True)):
        if seconds > closed_at:
            assert isinstance(outcome, Straggler)
        elif fails:
            assert isinstance(outcome, Failure) and outcome.reason == str(place)
        else:
            assert isinstance(outcome, Played) and outcome.reward == place
