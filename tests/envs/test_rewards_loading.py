"""A reward's setting becomes a reward, or one line that says what is wrong with it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from streamrl.envs import Reward, Task
from streamrl.envs.guard import left_behind
from streamrl.envs.rewards import load_reward, text_of
from streamrl.errors import ConfigError, EnvironmentFailed

OWN = """
import threading
from streamrl.envs import Reward

def length(task, answer, scale=1.0):
    return scale * len(answer)

async def slow(task, answer):
    return Reward(0.25, {"seen": 1.0})

def thread(task, answer):
    return float(threading.current_thread() is threading.main_thread())

begun, release = threading.Event(), threading.Event()

def hang(task, answer):
    begun.set()
    release.wait()
    return 1.0

def one(task):
    return 1.0

class Counting:
    def __init__(self, step=1):
        self.step = step
    async def __call__(self, task, answer):
        return self.step
    async def close(self):
        self.step = 0

class Plain:
    def __call__(self, task, answer):
        return 1.0
"""


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rewards.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "own_rewards", raising=False)


def score(spec: Any, answer: Any, task: Task | None = None) -> Any:
    return asyncio.run(load_reward(spec)(task or Task(answer="42"), answer))


def refusal(spec: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_reward(spec)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_function_of_the_users_gets_its_options() -> None:
    assert score({"name": "own_rewards:length", "scale": 0.5}, "four") == 2.0


def test_an_async_function_may_return_a_reward_with_metrics() -> None:
    assert score("own_rewards:slow", "x") == Reward(0.25, {"seen": 1.0})


def test_a_plain_function_runs_off_the_event_loop() -> None:
    assert score("own_rewards:thread", "x") == 0.0


def test_a_plain_function_that_hangs_is_left_behind_and_does_not_hold_the_end_of_the_process() -> None:
    async def main() -> None:
        hanging = asyncio.create_task(load_reward("own_rewards:hang")(Task(), "x"))
        own = __import__("own_rewards")
        await asyncio.to_thread(own.begun.wait)
        hanging.cancel()
        await asyncio.wait([hanging])
        assert hanging.cancelled()
        assert len(left_behind) == before + 1
        own.release.set()

    before = len(left_behind)
    asyncio.run(main())
    while len(left_behind) > before:  # its thread is at its last lines
        time.sleep(0)


def test_a_class_of_the_users_is_built_with_its_options() -> None:
    assert score({"name": "own_rewards:Counting", "step": 3}, "x") == 3


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    assert refusal("maths") == (
        "env.args.reward='maths': no such reward; did you mean 'math'?; one of your own is package.module:function"
    )


def test_an_unknown_option_is_refused_with_the_nearest() -> None:
    assert refusal({"name": "exact", "normalize": True}) == (
        "env.args.reward: reward 'exact' has no option 'normalize'; did you mean 'normalise'?"
    )


def test_a_missing_option_is_named() -> None:
    assert (
        refusal({"name": "judge", "url": "http://localhost"})
        == "env.args.reward: reward 'judge' needs the option 'model'"
    )


def test_a_function_that_takes_no_answer_is_refused() -> None:
    assert "must be callable as function(task, answer, **options)" in refusal("own_rewards:one")


def test_a_class_without_async_methods_is_refused() -> None:
    assert "needs `async def __call__`" in refusal("own_rewards:Plain")


@pytest.mark.parametrize("spec", [[], 7, {"weight": 1}], ids=str)
def test_what_is_no_spec_is_refused(spec: Any) -> None:
    assert "expected" in refusal(spec)


def test_the_text_of_a_chat_is_the_last_message_of_the_assistant() -> None:
    chat = [
        {"role": "assistant", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
    ]
    assert text_of(chat) == "2"


def test_a_chat_without_an_answer_is_a_failure_not_a_zero() -> None:
    with pytest.raises(EnvironmentFailed, match="1 messages and none of the assistant"):
        text_of([{"role": "user", "content": "hello"}])


# exact ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("answer", "value"), [(" 42\n", 1.0), ("4 2", 0.0), ("the 42", 0.0)])
def test_exact_compares_all_but_the_spaces_around(answer: str, value: float) -> None:
    assert score("exact", answer) == value


@pytest.mark.parametrize(("answer", "value"), [("The  Café, of ARLES!", 1.0), ("Cafe of Arles", 0.0)])
def test_normalised_match_forgets_case_articles_punctuation_and_unicode_form(answer: str, value: float) -> None:
    assert score({"name": "exact", "normalise": True}, answer, Task(answer="cafe\u0301 of (an) Arles")) == value


def test_a_pattern_takes_the_last_match_and_its_group() -> None:
    spec = {"name": "exact", "pattern": r"####\s*(\S+)"}
    assert score(spec, "#### 7, no: #### 42") == 1.0
    assert score(spec, "42") == 0.0


def test_a_broken_pattern_is_refused() -> None:
    assert "not a regular expression" in refusal({"name": "exact", "pattern": "("})


def test_a_task_without_an_answer_is_a_failure_not_a_zero() -> None:
    with pytest.raises(EnvironmentFailed, match=r"needs Task\(answer=…\), and task 3 has none"):
        score("exact", "42", Task(index=3))
