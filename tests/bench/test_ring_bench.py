"""What ``streamrl bench ring`` and its TRL peer make of what they measured; nothing is launched."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.bench import ring, trl_peer
from streamrl.bench.report import Row
from streamrl.bench.ring import Measured, Workload
from streamrl.clock import ManualClock
from streamrl.config import conf_folder
from streamrl.envs.environment import Environment, Reward, Task
from streamrl.envs.strings import Addition, Reverse
from streamrl.errors import ConfigError

ANSWERS = Workload("base", "answers/s", True)
TOKENS = Workload("base", "useful tokens/s", False)
"""The shipped ``base`` has groups of 8."""


def lines(walls: list[float], lengths: list[float], groups: int = 32) -> list[dict[str, Any]]:
    """Metric lines of steps that took ``walls`` seconds, after three seconds of start."""
    found: list[dict[str, Any]] = []
    now = 3.0
    for wall, length in zip(walls, lengths, strict=True):
        now += wall
        found.append(
            {"time_s": now, "wall_s": wall, "throughput/groups_per_s": groups / wall, "length/mean": length}
        )  # fmt: skip
    return found


def test_the_answer_rate_counts_the_steps_after_the_discarded_ones() -> None:
    measured = lines([100.0] * ring.DISCARDED + [1.0, 2.0, 5.0], [4.0] * (ring.DISCARDED + 3))
    assert ring._rate(ANSWERS, measured) == pytest.approx(3 * 32 * 8 / 8.0)


def test_the_token_rate_is_the_answers_times_their_length() -> None:
    measured = lines([100.0] * ring.DISCARDED + [2.0, 2.0], [999.0] * ring.DISCARDED + [10.0, 30.0])
    assert ring._rate(TOKENS, measured) == pytest.approx(32 * 8 * (10 + 30) / 4.0)


def events(folder: Path, *found: dict[str, Any]) -> Path:
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in found))
    return folder


def evaluated(time: float, accuracy: float) -> dict[str, Any]:
    return {"event": "evaluated", "time": time, "accuracy": accuracy}


def test_the_target_is_reached_at_the_first_evaluation_that_is_good_enough(tmp_path: Path) -> None:
    run_dir = events(
        tmp_path,
        {"event": "actor_ready", "time": 90.0},
        {"event": "gate_passed", "time": 100.0},
        evaluated(110.0, 0.4),
        evaluated(130.0, 0.9),
        evaluated(150.0, 0.95),
    )
    assert ring._seconds_to_target(run_dir) == 30.0


def test_a_target_that_was_not_reached_has_no_time(tmp_path: Path) -> None:
    run_dir = events(tmp_path, {"event": "gate_passed", "time": 100.0}, evaluated(110.0, 0.899))
    assert ring._seconds_to_target(run_dir) is None


def test_rows_compare_rates_with_no_lag_and_report_times_to_the_target() -> None:
    measured = {
        "max_lag=0": [Measured(100.0, 50.0), Measured(110.0, 60.0), Measured(90.0, 40.0)],
        "max_lag=1": [Measured(150.0, 30.0), Measured(140.0, 20.0), Measured(160.0, 10.0)],
    }
    assert list(ring._rows(Workload("addition", "answers/s", True), measured)) == [
        Row("ring/addition/max_lag=0/rate", 100.0, "answers/s", None, None, 3, pytest.approx(0.2)),
        Row("ring/addition/max_lag=0/to-90%", 50.0, "s", None, None, 3, pytest.approx(0.4)),
        Row("ring/addition/max_lag=1/rate", 150.0, "answers/s", 100.0, 1.5, 3, pytest.approx(20 / 150)),
        Row("ring/addition/max_lag=1/to-90%", 20.0, "s", None, None, 3, pytest.approx(1.0)),
    ]


def test_the_peer_is_the_baseline_of_all_where_it_ran() -> None:
    measured = {"max_lag=0": [Measured(300.0, None)], "trl": [Measured(200.0, None)]}
    rows = list(ring._rows(TOKENS, measured))
    assert [(row.baseline, row.ratio) for row in rows] == [(200.0, 1.5), (None, None)]


def test_a_contender_that_missed_the_target_once_has_no_time_and_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    measured = {"max_lag=0": [Measured(1.0, 5.0), Measured(1.0, None)]}
    assert [row.name for row in ring._rows(ANSWERS, measured)] == ["ring/base/max_lag=0/rate"]
    assert "ring/base/max_lag=0: 1 of 2 runs never reached 90%" in capsys.readouterr().err


def play(clock: ManualClock, watch: trl_peer.Watch, steps: int, seconds: float) -> int:
    """Steps of ``seconds`` each until the watch ends training; how many were taken."""
    control = SimpleNamespace(should_training_stop=False)
    for step in range(1, steps + 1):
        watch.on_step_begin(None, None, control)
        clock.advance(seconds)
        watch.on_step_end(None, None, control, model="model")
        if control.should_training_stop:
            return step
    return steps


def test_evaluation_does_not_count_as_training_time_of_the_peer() -> None:
    clock = ManualClock(now=1000.0)

    def evaluate(model: Any) -> float:
        assert model == "model"
        clock.advance(50.0)
        return 0.1

    watch = trl_peer.Watch(evaluate, 2, clock)
    play(clock, watch, 5, 3.0)
    assert watch.ended == [3.0, 6.0, 9.0, 12.0, 15.0]
    assert watch.seconds_to_target is None


def test_the_peer_ends_at_the_first_evaluation_on_target() -> None:
    clock = ManualClock()
    accuracies = iter([0.5, 0.899, 0.9, 1.0])
    watch = trl_peer.Watch(lambda _: next(accuracies), 20, clock)
    assert play(clock, watch, 500, 0.5) == 60
    assert watch.seconds_to_target == 30.0


def test_the_peer_is_not_evaluated_where_only_its_rate_is_measured() -> None:
    clock = ManualClock()
    watch = trl_peer.Watch(lambda _: pytest.fail("evaluated"), 0, clock)
    assert play(clock, watch, 40, 1.0) == 40


def test_the_rate_of_the_peer_counts_the_steps_after_the_discarded_ones() -> None:
    warm_up = [50.0 * (step + 1) for step in range(ring.DISCARDED)]
    ended = [*warm_up, warm_up[-1] + 2.0, warm_up[-1] + 5.0]
    assert trl_peer.rate([7] * ring.DISCARDED + [100, 200], ended) == pytest.approx(300 / 5.0)


def test_a_step_of_the_peer_counts_answers_or_their_tokens() -> None:
    token_ids = [[5, 6, 1], [5, 1], [1]]
    assert trl_peer.amount(ANSWERS, token_ids) == 3
    assert trl_peer.amount(TOKENS, token_ids) == 6


def test_the_environments_score_what_the_peer_sampled() -> None:
    sums, reverse = Addition(), Reverse()
    tasks = [Task("12+34=", "46"), Task("12+34=", "46"), Task("90+10=", "100")]
    assert trl_peer.score(Environment("addition", sums.episode), tasks, ["46", "460", "100"]) == [1.0, 0.0, 1.0]
    tasks = [Task("abcd>", "dcba")] * 3
    assert trl_peer.score(Environment("reverse", reverse.episode), tasks, ["dcba", "dc", ""]) == [1.0, 0.5, 0.0]


def test_the_value_of_a_reward_with_metrics_is_the_peers_reward() -> None:
    async def episode(task: Task, policy: Any) -> Reward:
        return Reward(float((await policy.complete(task.prompt)).text), {"other": 9.0})

    assert trl_peer.score(Environment("riddles", episode), [Task("?")], ["0.25"]) == [0.25]


def test_a_missing_trl_is_one_line_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        trl_peer.check_installed()
    assert str(caught.value) == "--peer trl: trl is not installed; pip install 'streamrl[bench]'"


def test_the_peer_without_trl_exits_with_that_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(trl_peer, "WORKLOADS", (TOKENS,))
    with pytest.raises(SystemExit) as caught:
        trl_peer.main(str(conf_folder() / "base.yaml"), "0")
    assert "pip install 'streamrl[bench]'" in str(caught.value.code)
