"""An event loop whose clock a test moves on: a deadline passes when the test says so, however slow the machine is."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")

HOUR_S = 3600.0


class _SkippingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self.skipped = 0.0

    def time(self) -> float:
        return super().time() + self.skipped


def skip_an_hour() -> None:
    """Move the clock of the running loop on. What was to happen meanwhile happens next."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, _SkippingLoop)
    loop.skipped += HOUR_S


def run_with_skips(main: Coroutine[Any, Any, _T]) -> _T:
    """``asyncio.run`` on such a loop."""
    with asyncio.Runner(loop_factory=_SkippingLoop) as runner:
        return runner.run(main)
