"""``streamrl env check`` finds what would go wrong in training, and lets through what would not."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console
from scripted import CharTokenizer, ScriptedEngine, generation, ids, settings

from streamrl.checking import check, check_left_running
from streamrl.envs.check import episodes, stalls, tasks
from streamrl.envs.check.findings import Finding, Level
from streamrl.envs.check.stalls import LoopWatch
from streamrl.envs.check.view import show_trajectory
from streamrl.envs.environment import load_environment
from streamrl.envs.split import Split
from streamrl.policy.tokenizer import character_tokenizer
from streamrl.schema import Config
from streamrl.types import Trajectory

HEADER = """
import asyncio, os, random, time
from streamrl.envs import Reward, Task

class Base:
    def task(self, index):
        return Task(f"{index % 1000}=", str(index % 1000))

    async def episode(self, task, policy):
        answer = await policy.complete(task.prompt)
        return float(answer.text == task.answer)
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Config]:
    """Settings for class ``Mine`` with the given body, derived from a good environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def environment(body: str = "pass") -> Config:
        code = f"{HEADER}\nclass Mine(Base):\n{textwrap.indent(textwrap.dedent(body), '    ')}\n"
        (tmp_path / "checked.py").write_text(code)
        monkeypatch.delitem(sys.modules, "checked", raising=False)
        return settings("checked:Mine")

    return environment


def played(config: Config, engine: Any, groups: int = 2, size: int = 2) -> tuple[episodes.Played, episodes.Stage]:
    stage = stage_of(config, groups)
    return asyncio.run(stage.play(engine, size)), stage


def stage_of(config: Config, groups: int = 2) -> episodes.Stage:
    return episodes.Stage(Split.of(load_environment(config), config), CharTokenizer(), config, groups)


def says_seeds() -> ScriptedEngine:
    """Answers with a character that depends on the seed of the request."""
    return ScriptedEngine(lambda _, params: generation([*ids(str(params.seed % 10)), *ids("$")]))


def made(config: Config) -> tuple[Split, list[Any]]:
    split = Split.of(load_environment(config), config)
    return split, tasks.training_tasks(split)


def is_fine(finding: Finding | None) -> bool:
    return finding is not None and finding.level is Level.FINE


# -- tasks ----------------------------------------------------------------------------------------------------------


def test_tasks_that_come_from_their_index_are_the_same_everywhere(write: Any) -> None:
    config = write()
    _, own = made(config)
    assert tasks.check_repeated(config, own) is None
    assert is_fine(asyncio.run(tasks.check_in_another_process(config, own)))


def test_what_an_environment_prints_is_not_taken_for_its_tasks(write: Any) -> None:
    config = write('print("loading the data set")')
    _, own = made(config)
    assert is_fine(asyncio.run(tasks.check_in_another_process(config, own)))


def test_tasks_that_depend_on_what_was_asked_before_are_a_problem(write: Any) -> None:
    config = write(
        """
        count = 0
        def task(self, index):
            self.count += 1
            return Task(f"{index % 1000}+{self.count}=")
        """
    )
    found = tasks.check_repeated(config, made(config)[1])
    assert found is not None and found.level is Level.PROBLEM
    assert "in a second instance" in found.detail and "random.Random(index)" in found.consequence


def test_tasks_that_depend_on_the_process_are_a_problem(write: Any) -> None:
    config = write(
        """
        def task(self, index):
            return Task(f"{index % 1000}=", metadata={"pid": os.getpid()})
        """
    )
    _, own = made(config)
    assert tasks.check_repeated(config, own) is None
    found = asyncio.run(tasks.check_in_another_process(config, own))
    assert found.level is Level.PROBLEM and "in another process" in found.detail


def test_tasks_that_another_process_cannot_make_are_a_problem(write: Any) -> None:
    config = write(
        f"""
        def task(self, index):
            assert os.getpid() == {__import__("os").getpid()}, "not here"
            return Task(f"{{index % 1000}}=")
        """
    )
    found = asyncio.run(tasks.check_in_another_process(config, made(config)[1]))
    assert found.level is Level.PROBLEM and "not here" in found.detail


@pytest.mark.parametrize(
    ("distinct", "tasks_held_out", "level"), [(1, 8, "problem"), (12, 0, "warning"), (1000, 8, "ok")]
)
def test_the_split_needs_prompts_to_hold_out_and_others_to_train(
    write: Any, distinct: int, tasks_held_out: int, level: str
) -> None:
    config = write(f'def task(self, index):\n    return Task(f"{{index % {distinct}}}=")')
    config.eval.tasks = tasks_held_out
    split, own = made(config)
    assert [each.level.value for each in tasks.check_split(split, config, own)] == [level]


@pytest.mark.parametrize(("max_length", "level"), [(4, "problem"), (64, "warning"), (68, "ok")])
def test_prompts_must_leave_room_for_an_answer(write: Any, max_length: int, level: str) -> None:
    config = write()
    config.model.max_length = max_length  # the longest prompt has 4 tokens, an answer up to 64
    found = tasks.check_texts(made(config)[1], CharTokenizer(), config)
    assert [each.level.value for each in found] == [level]


def test_characters_that_the_tokenizer_lacks_are_named(write: Any) -> None:
    config = write('def task(self, index):\n    return Task(f"{index % 1000}€")')
    _, found = tasks.check_texts(made(config)[1], character_tokenizer(), config)
    assert found.level is Level.WARNING and "such as ['€']" in found.detail


# -- episodes -------------------------------------------------------------------------------------------------------


def test_a_good_environment_is_fine_in_every_respect(write: Any) -> None:
    config = write()
    first, stage = played(config, says_seeds())
    second = asyncio.run(stage.play(says_seeds(), 2))
    taught = asyncio.run(stage.teach())
    found = [
        *episodes.check_failures(first),
        episodes.check_prompts(first),
        *episodes.check_repeated(first, second),
        episodes.check_rewards(first, taught),
        episodes.check_taught(taught, stage),
        episodes.check_time(taught, config.env.timeout_s),
    ]
    assert all(map(is_fine, found))
    assert episodes.check_lengths(first, config) is None


def test_failures_are_problems_with_their_place(write: Any) -> None:
    config = write("async def episode(self, task, policy):\n    raise KeyError('answer')")
    (found,) = episodes.check_failures(played(config, says_seeds())[0])
    assert found.level is Level.PROBLEM
    assert found.detail == "4 of 4 failed: KeyError: 'answer' (checked.py:15)"


@pytest.mark.parametrize("returned", ["None", "float('nan')", "Reward(1.0, columns={'tokens': [1]})"])
def test_what_cannot_be_used_as_a_reward_is_a_problem(write: Any, returned: str) -> None:
    body = f"async def episode(self, task, policy):\n    await policy.complete(task.prompt)\n    return {returned}"
    (found,) = episodes.check_failures(played(write(body), says_seeds())[0])
    assert found.level is Level.PROBLEM and found.detail.startswith("4 of 4 failed: ")


def test_a_hanging_episode_is_ended_and_is_a_problem(write: Any) -> None:
    config = write("async def episode(self, task, policy):\n    await asyncio.sleep(3600)")
    config.env.timeout_s = 0.05
    (found,) = episodes.check_failures(played(config, says_seeds())[0])
    assert found.level is Level.PROBLEM and "timed out after env.timeout_s=0.05" in found.detail


def test_different_prompts_in_one_group_are_a_problem(write: Any) -> None:
    config = write(
        "async def episode(self, task, policy):\n    await policy.complete(str(random.random()))\n    return 0"
    )
    found = episodes.check_prompts(played(config, says_seeds())[0])
    assert found.level is Level.PROBLEM and "task.random" in found.consequence


NOISY = """
async def episode(self, task, policy):
    await policy.complete(task.prompt)
    {}
"""


@pytest.mark.parametrize(
    ("line", "check"),
    [
        ("return random.random()", "reward repeats"),
        ('await policy.complete(f"?{random.random()}"); return 0', "observations repeat"),
        ("return task.random.random()", "episodes repeat"),
    ],
)
def test_chance_that_does_not_come_from_the_task_is_found(write: Any, line: str, check: str) -> None:
    first, stage = played(write(NOISY.format(line)), says_seeds())
    (found,) = episodes.check_repeated(first, asyncio.run(stage.play(says_seeds(), 2)))
    assert found.check == check
    assert is_fine(found) is (check == "episodes repeat")


def test_rewards_that_never_differ_are_a_warning(write: Any) -> None:
    first, stage = played(write(NOISY.format("return 0.5")), says_seeds())
    found = episodes.check_rewards(first, asyncio.run(stage.teach()))
    assert (found.level, found.detail) == (Level.WARNING, "always 0.5 for random answers")


def test_a_right_answer_that_is_not_worth_one_is_a_warning(write: Any) -> None:
    wrong = 'def task(self, index):\n    return Task(f"{index % 1000}=", "wrong")\n'
    stage = stage_of(write(wrong + NOISY.format("return 0.25")))
    found = episodes.check_taught(asyncio.run(stage.teach()), stage)
    assert found is not None and found.level is Level.WARNING and "'wrong' is worth 0.25" in found.detail


def test_a_demonstration_is_played_turn_by_turn(write: Any) -> None:
    config = write(
        """
        def task(self, index):
            return Task(f"{index % 1000}?", demonstration=[f"{index % 1000}?", "first", "more", "second"])

        async def episode(self, task, policy):
            first = await policy.complete(task.prompt)
            second = await policy.complete("more")
            return float((first.text, second.text) == ("first", "second"))
        """
    )
    stage = stage_of(config)
    assert is_fine(episodes.check_taught(asyncio.run(stage.teach()), stage))


def test_a_slow_episode_is_measured_against_its_time_limit(write: Any) -> None:
    taught = episodes.Played([], episode_s=[40.0])
    assert episodes.check_time(taught, 60.0).level is Level.WARNING
    assert is_fine(episodes.check_time(taught, 90.0))


def test_user_code_that_holds_the_event_loop_is_found_with_its_line() -> None:
    held = threading.Event()

    async def main() -> LoopWatch:
        async with LoopWatch() as watch:
            held.wait(1.0)  # holds the loop
        return watch

    watch = asyncio.run(main())
    assert watch.longest_s > 0.1
    assert watch.place.startswith("test_env_check.py:")
    assert not is_fine(episodes.check_stalls(watch))


def test_time_without_a_processor_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "queued_s", lambda thread: time.monotonic())  # as if others had it all along
    held = threading.Event()

    async def main() -> LoopWatch:
        async with LoopWatch() as watch:
            held.wait(0.3)  # holds the loop
        return watch

    assert asyncio.run(main()).longest_s == 0.0


def test_a_thread_that_is_not_there_has_no_known_wait() -> None:
    assert stalls.queued_s(0) == 0.0


def test_a_loop_that_only_waits_is_not_held() -> None:
    async def main() -> LoopWatch:
        async with LoopWatch() as watch:
            await asyncio.sleep(0.3)
        return watch

    assert is_fine(episodes.check_stalls(asyncio.run(main())))


def test_processes_that_an_episode_left_running_are_found() -> None:
    before = set(psutil.Process().children(recursive=True))
    assert check_left_running(before) is None
    left = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        found = check_left_running(before)
    finally:
        left.kill()
        left.wait()
    assert found is not None and found.level is Level.WARNING and "left running: 1 × python" in found.detail


# -- the report -----------------------------------------------------------------------------------------------------


def test_a_transcript_shows_what_was_sampled_and_what_was_given(write: Any) -> None:
    trajectory: Trajectory = played(write(), says_seeds())[0].groups[0][0]
    written = io.StringIO()
    show_trajectory(trajectory, "prompt 0", CharTokenizer(), Console(file=written, force_terminal=True, width=100))
    head, given, sampled = written.getvalue().splitlines()
    assert "1 turn · " in head and f"{trajectory.length} tokens, 2 of them sampled" in head
    assert "given" in given and "\x1b[90m" in given  # grey
    assert "sampled" in sampled and "\x1b[1;32m" in sampled and "$" in sampled  # green, with the end token


def test_a_whole_check_of_a_good_environment_exits_with_0_and_of_a_bad_one_with_1(write: Any) -> None:
    written = io.StringIO()
    console = Console(file=written, width=200)
    good = write()
    assert check(load_environment(good), good, 1, console) == 0
    assert "0 problems" in written.getvalue()
    bad = write("async def episode(self, task, policy):\n    return 1.0")
    assert check(load_environment(bad), bad, 1, console) == 1
    assert "the episode returned without sampling" in written.getvalue()


def test_the_command_refuses_what_a_launch_would_refuse(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "streamrl.cli", "env", "check", "nothing_here:Name"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("streamrl: env.name=nothing_here:Name: no module 'nothing_here'")
