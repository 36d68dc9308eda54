"""An event loop whose clock jumps to the next timer as soon as nothing else can run: hours pass in no time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[valid-type, misc]
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "everything waits for something that never comes"
        self.now += timeout
        return super().select(0)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run_in_virtual_time(main: Coroutine[Any, Any, _T]) -> _T:
    """``asyncio.run`` where ``asyncio.sleep(3600)`` takes no time and the loop's clock starts at 0."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(main)
