"""What a benchmark reports of what it measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamrl.bench.report import Row, alternate, publish, summarise


def test_contenders_take_turns_and_the_first_round_does_not_count() -> None:
    order: list[str] = []

    def contender(name: str) -> float:
        order.append(name)
        return float(len(order))

    ours, theirs = alternate(2, lambda: contender("ours"), lambda: contender("theirs"))
    assert order == ["ours", "theirs"] * 3
    assert (ours, theirs) == ([3.0, 5.0], [4.0, 6.0])


def test_a_row_holds_medians_their_ratio_and_the_spread() -> None:
    row = summarise("x", "tokens/s", [90.0, 100.0, 130.0], [50.0, 40.0, 10.0])
    assert row == Row("x", 100.0, "tokens/s", 40.0, 2.5, 3, pytest.approx(0.4))


def test_rows_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish([summarise("alone", "s", [2.0])], tmp_path / "rows.json")
    assert "alone" in capsys.readouterr().out
    expected = {"name": "alone", "value": 2.0, "unit": "s", "baseline": None, "ratio": None, "runs": 1, "spread": 0.0}
    assert json.loads((tmp_path / "rows.json").read_text()) == [expected]
