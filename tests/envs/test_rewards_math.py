"""Mathematical answers are compared as expressions, in a process that is killed when it takes too long."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from streamrl.envs import Reward, Task
from streamrl.envs.rewards import load_reward
from streamrl.envs.rewards.workers import WorkerPool
from streamrl.errors import ConfigError, EnvironmentFailed

pytest.importorskip("math_verify", reason="the reward 'math' needs math-verify: pip install 'streamrl[rewards]'")

CASES = [
    ("1/2", "So it is \\boxed{0.5}.", 1.0),
    ("\\frac{1}{2}", "the answer is $\\frac{2}{4}$", 1.0),
    ("$x^2+2x+1$", "\\boxed{(x+1)^2}", 1.0),
    ("(1,2)", "\\boxed{(1, 2)}", 1.0),
    ("1000", "\\boxed{1,000}", 1.0),
    ("\\sqrt{8}", "we get $2\\sqrt{2}$", 1.0),
    ("3", "I think it is 4", 0.0),
    ("7", "\\boxed{7} is wrong, it is \\boxed{8}", 0.0),
]
ENDLESS = "\\boxed{9^{9^{9^{9}}}}"


def run(*pairs: tuple[str, str], **options: Any) -> list[Reward | str]:
    """The reward of each (reference, answer), one after the other; the message where there is none."""

    async def main() -> list[Reward | str]:
        reward = load_reward({"name": "math", **options})
        outcomes: list[Reward | str] = []
        for reference, answer in pairs:
            try:
                outcomes.append(await reward(Task(answer=reference), answer))  # type: ignore[arg-type]
            except EnvironmentFailed as error:
                outcomes.append(str(error))
        await reward.close()
        return outcomes

    return asyncio.run(main())


def test_equal_expressions_are_right_however_they_are_written() -> None:
    outcomes = run(*((reference, answer) for reference, answer, _ in CASES), timeout_s=60)
    assert outcomes == [Reward(value, {"parsed": 1.0}) for _, _, value in CASES]


def test_an_answer_without_mathematics_is_wrong_and_counted() -> None:
    assert run(("1/2", "no idea"), timeout_s=60) == [Reward(0.0, {"parsed": 0.0})]


def test_a_reference_that_cannot_be_read_is_a_failure() -> None:
    assert run(("", "\\boxed{1}"), timeout_s=60) == [
        "math_worker: the reference answer '' cannot be read as mathematics"
    ]


def test_an_endless_comparison_is_ended_and_the_next_one_works() -> None:
    late, well = run(("7", ENDLESS), ("7", "\\boxed{7}"), timeout_s=6)
    assert late == "math_worker: waited 6 s for an answer"
    assert well == Reward(1.0, {"parsed": 1.0})


def test_a_cancelled_comparison_leaves_no_process() -> None:
    async def main() -> None:
        reward = load_reward({"name": "math", "timeout_s": 600})
        others = children()
        await reward(Task(answer="1"), "1")
        workers = children() - others
        assert workers
        asking = asyncio.create_task(reward(Task(answer="7"), ENDLESS))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert not children() & workers

    asyncio.run(main())


def test_closing_ends_the_processes() -> None:
    before = children()
    run(("1", "1"), timeout_s=60)
    assert children() == before


def test_as_many_comparisons_run_at_once_as_there_are_workers() -> None:
    async def main() -> int:
        reward = load_reward({"name": "math", "timeout_s": 60, "workers": 2})
        before = children()
        await asyncio.gather(*(reward(Task(answer="1"), "1") for _ in range(6)))
        count = len(children() - before)
        await reward.close()
        return count

    assert asyncio.run(main()) == 2


@pytest.mark.parametrize("options", [{"timeout_s": 0}, {"workers": 0}], ids=str)
def test_settings_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be positive and workers="):
        load_reward({"name": "math", **options})


def test_a_worker_that_cannot_start_is_a_failure_with_a_reason(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit(3)")
    pool = WorkerPool(script, [], size=1, timeout_s=5, start_timeout_s=30)
    with pytest.raises(EnvironmentFailed, match="broken: its process ended while it was waited for to start"):
        asyncio.run(pool.ask({}))


def test_a_request_that_is_too_long_is_refused() -> None:
    assert "expected a request of at most" in str(run(("1", "1" * (1 << 20)), timeout_s=60)[0])


def children() -> set[int]:
    """Processes that this one started and that live."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue  # it ended meanwhile
        if int(parent) == os.getpid() and state != "Z":
            found.add(int(path.parent.name))
    return found
