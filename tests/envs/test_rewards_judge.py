"""The judge's score is read, scaled and remembered; its endpoint may fail in every way that endpoints do."""

from __future__ import annotations

import asyncio
import email.utils
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the reward 'judge' needs aiohttp: pip install 'streamrl[rewards]'")

from judge_server import JudgeServer, completion, hang_up, never, status
from virtual_time import run_in_virtual_time

from streamrl.envs import Reward, Task
from streamrl.envs.rewards import judge_client, load_reward
from streamrl.envs.rewards.judge import score_parser
from streamrl.envs.rewards.judge_client import JudgeClient, Pace, _retry_after_s
from streamrl.envs.rewards.score_cache import ScoreCache
from streamrl.errors import ConfigError, EnvironmentFailed

TASK = Task(prompt="1+1?", answer="2", metadata={"rubric": "be kind"})


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_client, "FIRST_BACKOFF_S", 0.001)


def judge(server: JudgeServer, *answers: str, **options: Any) -> list[Any]:
    """The rewards of ``answers``, asked for at the same time; what was raised, where there is none."""

    async def use(running: JudgeServer) -> list[Any]:
        reward = load_reward({"name": "judge", "url": running.url, "model": "j", **options})
        try:
            return await asyncio.gather(*(reward(TASK, answer) for answer in answers), return_exceptions=True)
        finally:
            await reward.close()

    result: list[Any] = server.serve(use)
    return result


def failure(server: JudgeServer, **options: Any) -> str:
    (error,) = judge(server, "two", **options)
    assert isinstance(error, EnvironmentFailed)
    return str(error)


def test_the_score_is_brought_to_0_and_1() -> None:
    assert judge(JudgeServer("Good.\nScore: 7.5"), "two") == [Reward(0.75, {"cached": 0.0})]


def test_the_request_has_the_filled_in_template_the_model_and_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "k1")
    server = JudgeServer("Score: 0")
    template = "{prompt} {reference} {answer} {metadata[rubric]} {{}}"
    judge(server, "two {x}", template=template, system="S", api_key_env="JUDGE_KEY", body={"max_tokens": 9, "seed": 1})
    assert server.requests == [
        {
            "model": "j", "temperature": 0.0, "max_tokens": 9, "seed": 1,
            "messages": [
                {"role": "system", "content": "S"}, {"role": "user", "content": "1+1? 2 two {x} be kind {}"},
            ],
        }
    ]  # fmt: skip
    assert server.headers[0]["Authorization"] == "Bearer k1"


def test_without_a_key_no_authorization_is_sent() -> None:
    server = JudgeServer("Score: 0")
    judge(server, "two")
    assert "Authorization" not in server.headers[0]


@pytest.mark.parametrize("code", [429, 500, 503])
def test_a_refusal_that_may_pass_is_tried_again(code: int) -> None:
    server = JudgeServer(status(code), status(code), "Score: 10")
    assert judge(server, "two") == [Reward(1.0, {"cached": 0.0})]
    assert len(server.requests) == 3


def test_a_lost_connection_is_tried_again() -> None:
    assert judge(JudgeServer(hang_up, "Score: 10"), "two") == [Reward(1.0, {"cached": 0.0})]


def test_a_request_without_a_reply_is_tried_again() -> None:
    assert judge(JudgeServer(never, "Score: 10"), "two", timeout_s=1) == [Reward(1.0, {"cached": 0.0})]


def test_retry_after_is_honoured() -> None:
    server = JudgeServer(status(429, {"Retry-After": "1"}), "Score: 10")
    assert judge(server, "two") == [Reward(1.0, {"cached": 0.0})]
    assert server.at[1] - server.at[0] >= 1.0


def test_retry_after_may_be_a_date() -> None:
    seconds = _retry_after_s(email.utils.formatdate(time.time() + 60, usegmt=True))
    assert seconds is not None
    assert 55 < seconds <= 60


@pytest.mark.parametrize("header", ["", "soon", "-3"])
def test_a_retry_after_that_means_nothing_is_ignored(header: str) -> None:
    assert _retry_after_s(header) is None


def test_retries_end() -> None:
    server = JudgeServer(status(503, text="overloaded"))
    assert failure(server, retries=2) == "judge: gave up after 3 requests: status 503: overloaded"
    assert len(server.requests) == 3


def test_a_score_has_a_deadline_over_all_its_retries() -> None:
    server = JudgeServer(status(429, {"Retry-After": "3600"}))
    assert failure(server, deadline_s=2) == "judge: no score within deadline_s=2; the last request: status 429: not now"


@pytest.mark.parametrize("code", [400, 401, 404, 307])
def test_a_refusal_that_will_not_pass_fails_at_once(code: int) -> None:
    server = JudgeServer(status(code, text="unknown model"))
    assert f"answered with status {code}: unknown model" in failure(server)
    assert len(server.requests) == 1


@pytest.mark.parametrize("content", ["no idea", "Score: eleven", "Score: 11", "Score: -1"])
def test_a_reply_without_a_score_in_range_is_a_failure_not_a_zero(content: str) -> None:
    assert "score" in failure(JudgeServer(content))


def test_a_reply_that_is_no_completion_is_a_failure() -> None:
    assert "no choices[0].message.content: not json" in failure(JudgeServer(status(200, text="not json")))


def test_a_reply_without_text_is_a_failure() -> None:
    assert failure(JudgeServer(None)) == "judge: expected text as content, got NoneType"


def test_an_endless_reply_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_client, "REPLY_BYTES", 1000)
    assert failure(JudgeServer("x" * 2000)) == "judge: expected a reply of at most 1000 bytes"


def test_no_more_requests_run_at_once_than_allowed() -> None:
    full = asyncio.Event()

    async def slow(_: Any) -> Any:
        if server.running == 3:
            full.set()
        await full.wait()
        return completion("Score: 5")

    server = JudgeServer(slow)
    judge(server, *map(str, range(9)), at_once=3)
    assert (server.most_at_once, len(server.requests)) == (3, 9)


def test_no_more_requests_begin_in_a_second_than_allowed() -> None:
    async def starts() -> list[float]:
        client = JudgeClient("http://localhost", "", Pace(8, 20.0, 1.0, 0, 1.0))
        loop = asyncio.get_running_loop()

        async def start() -> float:
            await client._turn()
            return loop.time()

        return await asyncio.gather(*(start() for _ in range(6)))

    assert run_in_virtual_time(starts()) == pytest.approx([0, 0.05, 0.1, 0.15, 0.2, 0.25])


# Cache ----------------------------------------------------------------------------------------------------------------


def test_the_same_answer_is_judged_once() -> None:
    server = JudgeServer("Score: 5")

    async def twice(running: JudgeServer) -> list[Any]:
        reward = load_reward({"name": "judge", "url": running.url, "model": "j"})
        rewards = [await reward(TASK, answer) for answer in ("two", "two", "three")]
        await reward.close()
        return rewards

    assert [reward.metrics["cached"] for reward in server.serve(twice)] == [0.0, 1.0, 0.0]
    assert len(server.requests) == 2


def test_the_same_answers_that_come_at_once_are_judged_once() -> None:
    server = JudgeServer("Score: 5")
    rewards = judge(server, "two", "two", "two")
    assert sorted(reward.metrics["cached"] for reward in rewards) == [0.0, 1.0, 1.0]
    assert len(server.requests) == 1


def test_a_reply_without_a_score_is_not_remembered() -> None:
    server = JudgeServer("hm", "Score: 5")

    async def twice(running: JudgeServer) -> Any:
        reward = load_reward({"name": "judge", "url": running.url, "model": "j"})
        with pytest.raises(EnvironmentFailed):
            await reward(TASK, "two")
        second = await reward(TASK, "two")
        await reward.close()
        return second

    assert server.serve(twice) == Reward(0.5, {"cached": 0.0})


def test_a_file_keeps_scores_for_later_runs(tmp_path: Path) -> None:
    path = str(tmp_path / "cache" / "scores.db")

    async def two_runs(running: JudgeServer) -> list[Any]:
        rewards = []
        for _ in range(2):
            reward = load_reward({"name": "judge", "url": running.url, "model": "j", "cache_path": path})
            rewards.append(await reward(TASK, "two"))
            await reward.close()
        return rewards

    server = JudgeServer("Score: 5")
    assert [reward.metrics["cached"] for reward in server.serve(two_runs)] == [0.0, 1.0]


def test_the_memory_forgets_what_was_used_least_recently() -> None:
    cache = ScoreCache(2)
    cache.put("a", "1")
    cache.put("b", "2")
    cache.get("a")
    cache.put("c", "3")
    assert [cache.get(name) for name in "abc"] == ["1", None, "3"]


def test_the_file_remembers_what_the_memory_forgot(tmp_path: Path) -> None:
    cache = ScoreCache(0, str(tmp_path / "scores.db"))
    cache.put("a", "1")
    assert cache.get("a") == "1"
    cache.close()


def test_two_processes_may_share_the_file(tmp_path: Path) -> None:
    first, second = (ScoreCache(0, str(tmp_path / "scores.db")) for _ in range(2))
    first.put("a", "1")
    second.put("b", "2")
    assert (first.get("b"), second.get("a")) == ("2", "1")
    first.close()
    second.close()


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("this is not a database, it is a text that is long enough" * 9)
    with pytest.raises(ConfigError, match="cannot be used"):
        ScoreCache(1, str(tmp_path / "notes.txt"))


# Settings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text", "score"),
    [
        ("number", "between 3 and 4.5", 4.5),
        ("number", "none", None),
        ("json:score", '```json\n{"why": "a {b}", "score": 3}\n```', 3.0),
        ("json:score", '{"score": 1} then {"score": "2.5"} then {"other": 1}', 2.5),
        ("json:score", '{"score": true}', None),
        ("json:score", '{"score": NaN}', None),
        ("json:score", '{"score": 3', None),
        (r"regex:<(\d+)>", "<1> <2>", 2.0),
        (r"regex:<(\w+)>", "<high>", None),
    ],
)
def test_scores_are_read_as_asked_for(kind: str, text: str, score: float | None) -> None:
    assert score_parser(kind)(text) == score


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "localhost:8000"}, "expected http://… or https://…"),
        ({"score": "words"}, "expected number, json:KEY or regex:PATTERN"),
        ({"score": r"regex:\d"}, "expected a group"),
        ({"template": "{question} {answer}"}, "no field {question}"),
        ({"template": "{prompt}"}, "it must show the judge the {answer}"),
        ({"template": "{answer"}, "template: "),
        ({"lowest": 5, "highest": 5}, "lowest=5 must be below highest=5"),
        ({"api_key_env": "STREAMRL_NO_SUCH_KEY"}, "that environment variable is not set"),
        ({"at_once": 0}, "at_once=0: must be at least 1"),
        ({"deadline_s": 0}, "deadline_s=0: must be positive"),
        ({"cache_size": -1}, "cache_size=-1: must be at least 0"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_reward({"name": "judge", "url": "http://localhost", "model": "j"} | options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
