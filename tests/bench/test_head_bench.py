"""The head's benchmark measures equal work on both sides, and memory that was really taken."""

from __future__ import annotations

import pytest
import torch

from streamrl.bench import head
from streamrl.bench.head import Data, measure_errors, naive, ours, peak_megabytes
from streamrl.cli import main


def test_both_sides_give_the_same_log_probs_and_gradients():
    sides = []
    for side in (ours, naive):
        data = Data.random(24, 300, 16)
        sides.append((data.run(side), data.hidden.grad, data.weight.grad))
    for own, other in zip(*sides, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


def test_errors_are_those_of_float32():
    for side in head.SIDES:
        errors = measure_errors(side, tokens=24, vocabulary=300, width=16)
        assert all(0 < error < 1e-5 for error in errors)


def test_the_peak_is_what_was_held_at_once():
    megabytes = 64 << 20

    def twice_one_after_the_other():
        for _ in range(2):
            torch.ones(megabytes, dtype=torch.uint8)

    def two_at_once():
        first = torch.ones(megabytes, dtype=torch.uint8)
        torch.ones_like(first)

    assert peak_megabytes(twice_one_after_the_other) == pytest.approx(67, abs=10)
    assert peak_megabytes(two_at_once) == pytest.approx(134, abs=10)


def test_every_row_compares_what_its_name_says(monkeypatch: pytest.MonkeyPatch):
    answers = {
        ("peak", "ours", head.LARGE, "float32"): 800.0,
        ("peak", "ours", head.LARGE, "bfloat16"): 900.0,
        ("peak", "ours", head.SMALL, "float32"): 700.0,
        ("peak", "naive", head.SMALL, "float32"): 614.4 + 1200.0,
        ("seconds", 2): [[4.0, 6.0], [2.0, 3.0]],
        ("errors", "ours"): [1e-6, 2e-6, 3e-6],
        ("errors", "naive"): [2e-6, 2e-6, 2e-6],
    }
    monkeypatch.setattr(head, "_ask", lambda *what: answers[what])
    found = {row.name: (row.value, row.baseline) for row in head.rows(runs=2)}
    # The gradient of the weight is there once; logits and what autograd keeps grow with the tokens.
    assert found["head/peak/8192-tokens/naive-computed"] == (800.0, pytest.approx(614.4 + 8 * 1200.0))
    assert found["head/peak/1024-tokens"] == (700.0, 614.4 + 1200.0)
    assert found["head/seconds/1024-tokens"] == (5.0, 2.5)
    assert found["head/error/gradient-of-weight"] == (3e-6, 2e-6)


def test_no_runs_are_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "head", "--runs", "0"])
    assert ended.value.code == 2
    assert "--runs 0: must be at least 1" in capsys.readouterr().err
