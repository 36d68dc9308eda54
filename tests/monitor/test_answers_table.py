"""The table of held-out answers at the end of a run."""

from __future__ import annotations

import io

from rich.console import Console

from streamrl.monitor.screen import answers_table
from streamrl.runtime.messages import Evaluated


def test_an_answer_with_newlines_takes_one_line() -> None:
    evaluated = Evaluated(version=0, accuracy=0.0, answers=[("2+2=", "a\n\nb", 0.0)])
    written = io.StringIO()
    Console(file=written, width=100).print(answers_table([evaluated, evaluated]))
    (row,) = [line for line in written.getvalue().splitlines() if "2+2=" in line]
    assert row.count("a⏎⏎b") == 2
