"""What the controller makes of reports that arrive in any order."""

from __future__ import annotations

from streamrl.metrics import KEYS
from streamrl.monitor.tally import Tally
from streamrl.runtime.membership import Membership
from streamrl.runtime.messages import Evaluated, Stepped
from streamrl.schema import Config

METRICS = dict.fromkeys(KEYS, 0.0)


def stepped(tally: Tally, step: int) -> None:
    tally.step(Stepped(step=step, version=step, metrics=dict(METRICS)), Membership(), float(step))


def evaluated(tally: Tally, version: int, accuracy: float) -> None:
    tally.evaluation(Evaluated(version=version, accuracy=accuracy, answers=[]))


def test_an_evaluation_that_overtakes_its_step_waits_for_the_line_of_that_step():
    tally = Tally(Config())
    stepped(tally, 5)
    evaluated(tally, 6, 0.75)
    line = tally.take_line()
    assert line is not None and "eval/accuracy" not in line
    stepped(tally, 6)
    line = tally.take_line()
    assert line is not None and (line["eval/accuracy"], line["eval/version"]) == (0.75, 6)


def test_a_late_evaluation_goes_with_the_next_line_and_the_newest_one_wins():
    tally = Tally(Config())
    stepped(tally, 3)
    tally.take_line()
    evaluated(tally, 3, 0.5)
    evaluated(tally, 4, 0.625)
    stepped(tally, 4)
    line = tally.take_line()
    assert line is not None and (line["eval/accuracy"], line["eval/version"]) == (0.625, 4)
    stepped(tally, 5)
    line = tally.take_line()
    assert line is not None and "eval/accuracy" not in line
