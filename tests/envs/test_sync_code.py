"""User code without async runs in threads; neither that nor code that swallows its cancellation can hold the run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedEngine, ids, lease, play, runner, says, settings
from skipped_time import HOUR_S, run_with_skips, skip_an_hour

from streamrl.envs import guard, threads
from streamrl.envs.group import GroupResult
from streamrl.envs.guard import left_behind
from streamrl.errors import EnvironmentFailed
from streamrl.schema import Config

EPISODES = """
import asyncio
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from streamrl.envs import Reward, Task

RELEASE = threading.Event()
HANGING = threading.Semaphore(0)
MEETING = threading.Barrier(2)
THREADS = set()

def plain(task, policy):
    THREADS.add(threading.current_thread())
    return float(policy.complete("1=").text)

class Riddles:
    def task(self, index):
        return Task("2=")
    def episode(self, task, policy):
        return float(policy.complete(task.prompt).text)

def waits_for_the_other(task, policy):
    MEETING.wait()
    return float(policy.complete("1=").text)

def raises(task, policy):
    policy.complete("1=")
    return {}["nothing here"]

def hangs(task, policy):
    policy.complete("1=")
    HANGING.release() or RELEASE.wait()
    return 1.0

def hangs_in_the_policy(task, policy):
    try:
        policy.complete("1=")
    except Exception:
        return 1.0

def tries_again_and_again(task, policy):
    while True:
        try:
            policy.complete("1=")
        except BaseException:
            pass

def branches(task, policy):
    policy.complete("1=")
    parts = [policy.branch(), policy.branch()]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda part: part.complete("<"), parts))
    parts[0].reward(0.5)
    parts[1].finish(4)
    return 1.0

def decorated(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)
    return wrapper

@decorated
async def hidden(task, policy):
    return 1.0

def exits(task, policy):
    policy.complete("1=")
    raise SystemExit(3)

def fills_the_context(task, policy):
    while True:
        policy.complete("1=")

async def swallows(task, policy):
    await policy.complete("1=")
    HANGING.release()
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass

async def swallows_hot(task, policy):
    while True:
        try:
            await policy.complete("1=")
        except (Exception, asyncio.CancelledError):
            pass

async def waits_for_what_swallows(task, policy):
    await policy.complete("1=")
    released = asyncio.ensure_future(asyncio.to_thread(RELEASE.wait))
    async def inner():
        while not released.done():
            try:
                await asyncio.shield(released)
            except asyncio.CancelledError:
                pass
    HANGING.release()
    await asyncio.ensure_future(inner())
"""


@pytest.fixture(autouse=True)
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "sync_episodes.py").write_text(EPISODES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "sync_episodes", raising=False)
    monkeypatch.setattr(left_behind, "_places", {})
    known = set(threading.enumerate())
    yield
    modules = __import__("sys").modules
    if "sync_episodes" in modules:
        modules["sync_episodes"].RELEASE.set()
    for thread in {*threading.enumerate()} - known:
        thread.join(0.5)  # one that holds every exception stays for good


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """For code that does not end: there is nothing to wait for."""
    monkeypatch.setattr(threads, "THREAD_GRACE_S", 0.2)
    monkeypatch.setattr(guard, "GRACE_S", 0.5)


def played_until(reached: Callable[[ScriptedEngine], Coroutine[Any, Any, object]], name: str) -> GroupResult:
    """A group whose episodes time out when ``reached`` has returned; it leaves no task behind."""

    async def main() -> GroupResult:
        config = config_for(name, timeout_s=HOUR_S)
        config.model.max_length = 8
        engine = says("3$")
        group = asyncio.create_task(runner(config, engine).run_group(lease(2)))
        await reached(engine)
        skip_an_hour()
        result = await group
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return result

    return run_with_skips(main())


async def both_hang(_: object) -> None:
    import sync_episodes  # type: ignore[import-not-found]

    for _each in range(2):
        await asyncio.to_thread(sync_episodes.HANGING.acquire)


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(EPISODES.splitlines(), 1) if text in line)


def config_for(name: str, timeout_s: float = 600.0) -> Config:
    config = settings(f"sync_episodes:{name}")
    config.env.timeout_s = timeout_s
    return config


def test_a_plain_function_is_an_environment() -> None:
    result = play(config_for("plain"), says("3$", "4$"))
    assert result.group is not None and result.failures == []
    assert sorted(result.group.rewards.tolist()) == [3.0, 4.0]
    assert {tuple(each.tokens[each.sampled].tolist()) for each in result.group.trajectories} == {
        tuple(ids("3$")),
        tuple(ids("4$")),
    }


def test_a_plain_method_is_an_episode() -> None:
    result = play(config_for("Riddles"), says("3$"))
    assert result.group is not None
    assert result.group.trajectories[0].tokens.tolist() == ids("2=3$")


def test_plain_episodes_of_a_group_run_at_the_same_time_and_off_the_event_loop() -> None:
    result = play(config_for("waits_for_the_other"), says("3$"))
    assert result.group is not None and len(result.group.trajectories) == 2


def test_the_thread_of_an_episode_ends_with_it() -> None:
    play(config_for("plain"), says("3$"))
    import sync_episodes

    for thread in sync_episodes.THREADS:
        thread.join(60)
    assert not [each for each in sync_episodes.THREADS if each.is_alive()]
    assert len(left_behind) == 0


def test_what_plain_code_raises_is_named_by_its_line() -> None:
    result = play(config_for("raises"), says("3$"))
    place = f"(sync_episodes.py:{line_of('nothing here')})"
    assert {each.reason for each in result.failures} == {f"KeyError: 'nothing here' {place}"}


def test_an_exit_from_plain_code_fails_its_episode_only() -> None:
    result = play(config_for("exits"), says("3$"))
    assert [each.reason[:13] for each in result.failures] == ["SystemExit: 3"] * 2


def test_branches_may_be_sampled_from_further_threads() -> None:
    result = play(config_for("branches"), says("3$"))
    assert result.group is not None and result.failures == []
    assert [each.reward for each in result.group.trajectories] == [1.0, 1.5, 4.0] * 2
    assert [each.episode for each in result.group.trajectories] == [0, 0, 0, 1, 1, 1]


def test_a_full_context_ends_plain_code_as_it_ends_async_code() -> None:
    config = config_for("fills_the_context")
    config.model.max_length = 12
    result = play(config, says("3$"))
    assert result.group is not None and result.failures == []
    assert [(each.reward, each.truncated) for each in result.group.trajectories] == [(0.0, True)] * 2


def test_a_coroutine_that_a_plain_function_returns_is_refused() -> None:
    result = play(config_for("hidden"), says("3$"))
    assert "returned a coroutine; write `async def`" in result.failures[0].reason


@pytest.mark.usefixtures("short_grace")
def test_a_hanging_thread_is_left_behind_and_its_place_named() -> None:
    result = played_until(both_hang, "hangs")
    place = f"(sync_episodes.py:{line_of('RELEASE.wait()')})"
    expected = f"timed out after env.timeout_s=3600; its thread hangs and was left behind {place}"
    assert [each.reason for each in result.failures] == [expected] * 2
    assert "RELEASE.wait()" in result.failures[0].traceback
    assert len(left_behind) == 2


@pytest.mark.usefixtures("short_grace")
def test_a_thread_that_ends_after_all_is_no_longer_left_behind() -> None:
    before = set(threading.enumerate())
    played_until(both_hang, "hangs")
    import sync_episodes

    hanging = {each for each in threading.enumerate() if each.name == "episode"} - before
    assert len(hanging) == len(left_behind) == 2
    sync_episodes.RELEASE.set()
    for thread in hanging:
        thread.join(60)
    assert len(left_behind) == 0


@pytest.mark.usefixtures("short_grace")
def test_too_many_hanging_threads_end_the_run_and_name_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MOST_LEFT", 1)
    message = rf"2 episodes hang and cannot be ended, the last one \(sync_episodes\.py:{line_of('RELEASE.wait()')}\)"
    with pytest.raises(EnvironmentFailed, match=message):
        played_until(both_hang, "hangs")


def test_a_call_of_the_policy_ends_with_its_episode_and_its_request_too() -> None:
    engines: list[ScriptedEngine] = []

    async def asked(engine: ScriptedEngine) -> None:
        engines.append(engine)
        engine.hold = asyncio.Event()
        await engine.asked(2)

    result = played_until(asked, "hangs_in_the_policy")
    line = EPISODES.splitlines().index("def hangs_in_the_policy(task, policy):") + 3
    assert [each.reason for each in result.failures] == [
        f"timed out after env.timeout_s=3600 (sync_episodes.py:{line})"
    ] * 2
    assert engines[0].cancelled == 2
    assert len(left_behind) == 0


@pytest.mark.usefixtures("short_grace")
def test_a_thread_that_holds_every_exception_is_stopped_and_counted() -> None:
    result = played_until(lambda engine: engine.asked(2), "tries_again_and_again")
    assert [each.reason.partition(";")[0] for each in result.failures] == ["timed out after env.timeout_s=3600"] * 2
    assert len(left_behind) == 2


@pytest.mark.usefixtures("short_grace")
@pytest.mark.parametrize("name", ["swallows", "swallows_hot"])
def test_async_code_that_swallows_its_cancellation_is_ended_and_counted_as_failed(name: str) -> None:
    async def stuck(engine: ScriptedEngine) -> None:
        await (both_hang(engine) if name == "swallows" else engine.asked(2))

    result = played_until(stuck, name)
    assert [each.reason[:34] for each in result.failures] == ["timed out after env.timeout_s=3600"] * 2
    assert len(left_behind) == 0


@pytest.mark.usefixtures("short_grace")
def test_async_code_that_waits_for_what_never_ends_is_left_behind_until_it_ends() -> None:
    async def main() -> tuple[int, int]:
        config = config_for("waits_for_what_swallows", timeout_s=HOUR_S)
        group = asyncio.create_task(runner(config, says("3$")).run_group(lease(2)))
        await both_hang(None)
        skip_an_hour()
        assert len((await group).failures) == 2
        left = len(left_behind)
        import sync_episodes

        sync_episodes.RELEASE.set()
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})
        return left, len(left_behind)

    assert run_with_skips(main()) == (2, 0)


def test_cancelling_a_group_of_plain_episodes_ends_their_requests() -> None:
    async def main() -> int:
        engine = says("3$")
        engine.hold = asyncio.Event()
        group = asyncio.create_task(runner(config_for("plain"), engine).run_group(lease(2)))
        await engine.asked(2)
        group.cancel()
        await asyncio.wait({group})
        assert group.cancelled()
        return engine.cancelled

    assert asyncio.run(main()) == 2
