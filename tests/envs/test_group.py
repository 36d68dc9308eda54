"""One lease becomes one group; what fails, fails alone and says where."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
from scripted import END, ScriptedEngine, generation, ids, lease, play, runner, says, settings
from virtual_time import run_in_virtual_time

from streamrl.envs.group import GroupResult
from streamrl.schema import Config
from streamrl.types import Generation, SamplingParams

EPISODES = """
import asyncio
from streamrl.envs import ContextFull, Reward, Task

async def plain(task, policy):
    return float((await policy.complete("1=")).text)

async def raises_on_two(task, policy):
    completion = await policy.complete("1=")
    if completion.text == "2":
        broken = {}
        return broken["line 12"]
    return 1.0

async def hangs_on_two(task, policy):
    if (await policy.complete("1=")).text == "2":
        await asyncio.Event().wait()
    return 1.0

async def own_timeout(task, policy):
    await policy.complete("1=")
    raise TimeoutError("my own")

async def exits(task, policy):
    await policy.complete("1=")
    raise SystemExit(3)

async def awaits_cancelled(task, policy):
    await policy.complete("1=")
    inner = asyncio.ensure_future(asyncio.Event().wait())
    inner.cancel()
    await inner

async def awaits_nothing(task, policy):
    answer = policy.complete("1=")
    try:
        return answer.text
    finally:
        answer.close()

async def samples_nothing(task, policy):
    return 1.0

async def leaves_a_call(task, policy):
    asyncio.ensure_future(policy.complete("1="))
    await asyncio.sleep(0)
    return 1.0

async def returns(task, policy, *, value):
    await policy.complete("1=")
    return Reward(1.0, value) if isinstance(value, dict) else value

async def random_prompt(task, policy):
    await policy.complete(str(task.random.randint(0, 10**6)) + "=")
    task.metadata["seen"] = task.metadata.get("seen", 0) + 1
    return Reward(1.0, {"seen": task.metadata["seen"]})

async def talks_on(task, policy):
    while True:
        await policy.complete("1=")

async def keeps_what_it_had(task, policy):
    try:
        while True:
            await policy.complete("1=")
    except ContextFull:
        return -1.0

class Broken:
    def task(self, index):
        return Task(1 / 0)
    async def episode(self, task, policy):
        return 1.0

class WrongTask:
    def task(self, index):
        return "a text"
    async def episode(self, task, policy):
        return 1.0
"""


@pytest.fixture(autouse=True)
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "user_episodes.py"
    path.write_text(EPISODES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "user_episodes", raising=False)
    return path


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(EPISODES.splitlines(), 1) if text in line)


def config_for(name: str, **args: object) -> Config:
    return settings(f"user_episodes:{name}", **args)


def only_failure(result: GroupResult) -> str:
    assert result.group is None
    reasons = {failure.reason for failure in result.failures}
    assert len(reasons) == 1
    return reasons.pop()


def test_a_group_holds_the_trajectories_of_its_lease() -> None:
    result = asyncio.run(runner(config_for("plain"), says("3$", "4$", "5$")).run_group(lease(3, prompt=11)))
    assert result.failures == []
    assert result.group is not None
    assert (result.group.lease, result.group.prompt, result.group.env) == (7, 11, "plain")
    assert sorted(result.group.rewards.tolist()) == [3.0, 4.0, 5.0]


def test_an_exception_fails_only_its_trajectory_and_names_the_users_line() -> None:
    result = play(config_for("raises_on_two"), says("1$", "2$", "3$"), size=3)
    assert result.group is not None
    assert [chr(each.tokens[2] + ord("0")) for each in result.group.trajectories] == ["1", "3"]
    (failure,) = result.failures
    line = line_of('broken["line 12"]')
    assert failure.reason == f"KeyError: 'line 12' (user_episodes.py:{line})"
    header, first_frame, source, *_ = failure.traceback.splitlines()
    assert header == "Traceback (most recent call last):"
    assert first_frame.endswith(f'user_episodes.py", line {line}, in raises_on_two')
    assert source.strip() == 'return broken["line 12"]'


def test_a_timeout_fails_only_its_trajectory_and_says_where_it_waited() -> None:
    config = config_for("hangs_on_two")
    config.env.timeout_s = 50.0
    result = run_in_virtual_time(runner(config, says("1$", "2$", "3$")).run_group(lease(3)))
    assert result.group is not None and len(result.group.trajectories) == 2
    (failure,) = result.failures
    line = line_of("await asyncio.Event().wait()")
    assert failure.reason == f"timed out after env.timeout_s=50 (user_episodes.py:{line})"
    assert f"line {line}, in hangs_on_two" in failure.traceback


def test_a_timeout_while_the_engine_samples_names_the_users_line_and_cancels_the_request() -> None:
    async def main() -> tuple[GroupResult, int]:
        engine = says("1$")
        engine.hold = asyncio.Event()
        config = config_for("plain")
        config.env.timeout_s = 20.0
        return await runner(config, engine).run_group(lease(2)), engine.cancelled

    result, cancelled = run_in_virtual_time(main())
    line = line_of('(await policy.complete("1=")).text)')
    assert only_failure(result) == f"timed out after env.timeout_s=20 (user_episodes.py:{line})"
    assert cancelled == 2


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("own_timeout", "TimeoutError: my own ("),
        ("exits", "SystemExit: 3 ("),
        ("awaits_nothing", "AttributeError: 'coroutine' object has no attribute 'text'; is an `await` missing? ("),
        ("awaits_cancelled", "cancelled by itself: user code awaited something that was cancelled ("),
        ("samples_nothing", "the episode returned without sampling; it must await policy.complete at least once"),
    ],
)
def test_whatever_user_code_raises_is_a_failure_with_its_reason(name: str, reason: str) -> None:
    assert only_failure(play(config_for(name), says("1$"))).startswith(reason)


def test_an_episode_that_leaves_a_call_running_fails() -> None:
    async def main() -> GroupResult:
        engine = says("1$")
        engine.hold = asyncio.Event()
        return await runner(config_for("leaves_a_call"), engine).run_group(lease(2))

    assert "a call of the policy was still running" in only_failure(asyncio.run(main()))


@pytest.mark.parametrize("value", [None, "1.0", math.nan, math.inf, 1j, [1.0]])
def test_a_reward_that_is_no_finite_number_fails_with_what_was_returned(value: object) -> None:
    reason = only_failure(play(config_for("returns", value=value), says("1$")))
    assert reason == f"the reward must be a finite number or a Reward, got {value!r}"


def test_an_object_as_reward_is_named_by_its_class() -> None:
    reason = only_failure(play(config_for("returns", value=Path("a")), says("1$")))
    assert reason == "the reward must be a finite number or a Reward, got an object of class PosixPath"


def test_a_metric_that_is_no_finite_number_fails_by_name() -> None:
    reason = only_failure(play(config_for("returns", value={"depth": math.nan}), says("1$")))
    assert reason == "metric 'depth' must be a finite number, got nan"


@pytest.mark.parametrize("value", [True, 1])
def test_a_bool_or_an_int_is_a_reward(value: object) -> None:
    result = play(config_for("returns", value=value), says("1$"))
    assert result.group is not None and result.group.rewards.tolist() == [1.0, 1.0]


def test_fewer_than_two_finished_trajectories_make_no_group() -> None:
    result = play(config_for("raises_on_two"), says("1$", "2$"), size=2)
    assert result.group is None
    assert len(result.failures) == 1


def test_a_task_that_cannot_be_made_is_one_failure_with_the_users_line() -> None:
    result = play(config_for("Broken"), says("1$"))
    assert result.group is None
    (failure,) = result.failures
    line = line_of("Task(1 / 0)")
    assert failure.reason.startswith("broken: task(")
    assert failure.reason.endswith(f"raised ZeroDivisionError: division by zero (user_episodes.py:{line})")
    assert "return Task(1 / 0)" in failure.traceback


def test_a_task_of_the_wrong_type_is_named() -> None:
    assert "must return streamrl.envs.Task(prompt: str, …), got 'a text'" in only_failure(
        play(config_for("WrongTask"), says("1$"))
    )


def test_all_trajectories_of_a_group_draw_the_same_prompt_and_share_no_state() -> None:
    engine = says("1$")
    result = play(config_for("random_prompt"), engine, size=4)
    assert len({tuple(prompt) for prompt, _ in engine.requests}) == 1
    assert result.group is not None
    assert [each.metrics for each in result.group.trajectories] == [{"seen": 1.0}] * 4


def test_seeds_differ_within_a_group_and_between_attempts_and_repeat_for_the_same_lease() -> None:
    def seeds(attempt: int) -> list[int]:
        engine = says("1$")
        asyncio.run(runner(config_for("plain"), engine).run_group(lease(4, attempt=attempt)))
        return [params.seed for _, params in engine.requests]

    assert len({*seeds(0), *seeds(1)}) == 8
    assert seeds(0) == seeds(0)


def test_an_episode_that_runs_out_of_context_is_truncated_with_reward_zero() -> None:
    config = config_for("talks_on")
    config.model.max_length = 16
    result = play(config, says("1$"))
    assert result.group is not None and result.failures == []
    assert [(each.reward, each.truncated, each.turns) for each in result.group.trajectories] == [(0.0, True, 4)] * 2


def test_an_episode_may_catch_the_full_context_and_say_what_it_is_worth() -> None:
    config = config_for("keeps_what_it_had")
    config.model.max_length = 16
    result = play(config, says("1$"))
    assert result.group is not None
    assert [(each.reward, each.truncated) for each in result.group.trajectories] == [(-1.0, True)] * 2


def test_a_prompt_that_fills_the_context_is_a_failure() -> None:
    config = config_for("plain")
    config.model.max_length = 2
    assert only_failure(play(config, says("1$"))).startswith(
        "ContextFull: 2 tokens leave no room to sample in model.max_length=2 (user_episodes.py:"
    )


def test_an_error_of_the_engine_is_not_the_environments_and_propagates() -> None:
    def answer(prompt_ids: list[int], params: SamplingParams) -> Generation:
        raise MemoryError("no slot")

    with pytest.raises(MemoryError, match="no slot"):
        play(config_for("plain"), ScriptedEngine(answer))


def test_closing_the_engine_cancels_the_group_and_blames_nobody() -> None:
    def answer(prompt_ids: list[int], params: SamplingParams) -> Generation:
        raise asyncio.CancelledError

    async def main() -> None:
        with pytest.raises(asyncio.CancelledError):
            await runner(config_for("plain"), ScriptedEngine(answer)).run_group(lease(2))

    asyncio.run(main())


def test_cancelling_a_group_cancels_its_requests() -> None:
    async def main() -> int:
        engine = says("1$")
        engine.hold = asyncio.Event()
        group = asyncio.create_task(runner(config_for("plain"), engine).run_group(lease(3)))
        await engine.started.wait()
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group
        return engine.cancelled

    assert asyncio.run(main()) == 3


def test_turns_sample_with_every_setting_of_the_run() -> None:
    config, engine = config_for("plain"), says("1$")
    config.sampling.temperature, config.sampling.max_tokens = 0.7, 5
    config.sampling.top_k, config.sampling.top_p, config.sampling.min_p = 6, 0.9, 0.05
    asyncio.run(runner(config, engine).run_group(lease(1)))
    _, params = engine.requests[0]
    assert (params.temperature, params.max_tokens, params.top_k) == (0.7, 5, 6)
    assert (params.top_p, params.min_p) == (0.9, 0.05)


def test_evaluation_is_greedy_in_order_and_counts_failures_as_wrong() -> None:
    def answer(prompt_ids: list[int], params: SamplingParams) -> Generation:
        assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.0, 0, 1.0, 0.0)
        seen = len(engine.requests)
        return generation(ids("1$"), versions=[(seen % 2 + 3, 2)])

    async def main() -> None:
        result = await evaluator.evaluate(tasks)
        assert [each.prompt for each in result.answers] == [task.prompt for task in tasks]
        assert [each.text for each in result.answers] == ["1"] * len(tasks)
        right = [task.answer == "1" for task in tasks]  # 0+1 and 1+0
        assert [each.reward == 1.0 for each in result.answers] == right
        assert result.accuracy == 2 / 30
        assert result.versions == (3, 4)
        assert result.failures == []

    config = settings("streamrl.envs.strings:Addition", digits=1)
    config.sampling.top_k, config.sampling.top_p, config.sampling.min_p = 6, 0.9, 0.05
    config.engine.slots = 4
    engine = ScriptedEngine(answer)
    evaluator = runner(config, engine)
    tasks = [evaluator.split.environment.task(index) for index in range(30)]
    asyncio.run(main())


def test_a_failed_episode_is_wrong_in_the_evaluation_and_listed() -> None:
    evaluator = runner(config_for("raises_on_two"), says("1$", "2$", "1$", "1$"))
    tasks = [evaluator.split.environment.task(index) for index in range(4)]
    result = asyncio.run(evaluator.evaluate(tasks))
    assert result.accuracy == 0.75
    assert [each.reward for each in result.answers] == [1.0, 0.0, 1.0, 1.0]
    assert [failure.reason[:8] for failure in result.failures] == ["KeyError"]


def test_partial_credit_is_no_right_answer_in_the_evaluation() -> None:
    evaluator = runner(config_for("returns", value=0.99), says("1$"))
    assert asyncio.run(evaluator.evaluate([evaluator.split.environment.task(0)])).accuracy == 0.0


def test_evaluation_fills_the_engines_slots_and_no_more() -> None:
    async def main() -> int:
        config = config_for("plain")
        config.engine.slots = 3
        engine = says("1$")
        engine.hold = asyncio.Event()
        evaluator = runner(config, engine)
        tasks = [evaluator.split.environment.task(index) for index in range(10)]
        running = asyncio.create_task(evaluator.evaluate(tasks))
        await engine.started.wait()
        engine.hold.set()
        await running
        assert len(engine.requests) == 10
        return engine.most_at_once

    assert asyncio.run(main()) == 3


def test_an_evaluation_without_tasks_has_no_accuracy() -> None:
    result = asyncio.run(runner(config_for("plain"), says("1$")).evaluate([]))
    assert math.isnan(result.accuracy)
    assert END not in result.versions
