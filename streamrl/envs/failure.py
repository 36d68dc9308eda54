"""What went wrong in user code: one line for the terminal, a traceback for ``events.jsonl``."""

from __future__ import annotations

import asyncio
import itertools
import sys
import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from streamrl.errors import EnvironmentFailed

_OWN = Path(__file__).parent

_CALLED = frozenset(str(_OWN / name) for name in ("session.py", "threads.py", "attach/policy.py"))
"""Files whose functions user code calls."""

_MACHINERY = _CALLED | {
    str(_OWN / name)
    for name in (
        "environment.py",
        "episode.py",
        "stepping.py",
        "group.py",
        "closing.py",
        "guard.py",
        "returned.py",
        "attach/client.py",
        "tools/agent.py",
        "tools/function.py",
        "tools/mcp_server.py",
        "tools/toolbox.py",
        "tools/workers.py",
    )
}
"""Files that call user code or are called by it; their frames are no place to look for a user's mistake."""

_LIBRARIES = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})

TRACEBACK_LIMIT = 8_000
"""Characters of a traceback that are kept; its end says what was raised, so the middle is what goes."""

_ASYNCIO = str(Path(asyncio.__file__).parent)


@dataclass(frozen=True)
class Failure:
    """One trajectory that did not finish."""

    reason: str
    """One line: what was raised, and where in the user's code."""
    traceback: str
    """The user's frames first, then those below them; empty where nothing was raised."""


class FailedElsewhere(EnvironmentFailed):
    """An episode failed in another process, which said how."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure

    def __reduce__(self) -> tuple[type[FailedElsewhere], tuple[Failure]]:
        return type(self), (self.failure,)


class Interrupted(asyncio.CancelledError):
    """Cancelled while user code ran in a thread, whose frames no traceback of ours holds."""

    def __init__(self, place: str, stack: str, hangs: bool) -> None:
        super().__init__()
        self.place = place
        """`` (file:line)`` of the user's last line, or nothing."""
        self.stack = stack
        self.hangs = hangs
        """The thread did not end, and was left behind."""


def stack_of(thread: int | None) -> tuple[str, str]:
    """Where a thread is at this moment: its place, and its frames from the user's first one on."""
    frame = sys._current_frames().get(thread or 0)
    frames = [each for each in traceback.extract_stack(frame) if not _is_machinery(each.filename)] if frame else []
    while frames and frames[0].filename.startswith(_LIBRARIES):
        frames.pop(0)  # of the thread itself
    own = [each for each in frames if not each.filename.startswith(_LIBRARIES)] or frames
    return _place_of(own[-1]) if own else "", "".join(traceback.format_list(frames))[-TRACEBACK_LIMIT:]


def one_line(error: BaseException) -> str:
    """``ValueError: bad digit (my_env.py:12)``: type, message without newlines, the user's last line."""
    message = " ".join(str(error).split())
    if isinstance(error, AttributeError | TypeError) and "'coroutine' object" in message:
        message += "; is an `await` missing?"
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return text + place(error)


def failure_of(error: BaseException, reason: str = "") -> Failure:
    """The failure that ``error`` is; ``reason`` stands for its type and message where these say too little."""
    if isinstance(error, FailedElsewhere):
        return error.failure
    return Failure(reason + place(error) if reason else one_line(error), traceback_of(error))


def timed_out(ended: BaseException | None, timeout_s: float) -> Failure:
    """The failure of an episode that took too long; ``ended`` is what it raised when it was cancelled."""
    reason = f"timed out after env.timeout_s={timeout_s:g}"
    if isinstance(ended, Interrupted) and ended.hangs:
        reason += "; its thread hangs and was left behind"
    return failure_of(ended, reason) if ended else Failure(f"{reason}; it swallowed its cancellation", "")


def traceback_of(error: BaseException) -> str:
    """Formatted, the user's frames first, of bounded length."""
    if isinstance(error, Interrupted):
        return error.stack
    text = "".join(traceback.format_exception(type(error), error, _user_part(error.__traceback__)))
    if len(text) > TRACEBACK_LIMIT:
        half = TRACEBACK_LIMIT // 2
        text = f"{text[:half]}\n  … {len(text) - 2 * half} characters left out …\n{text[-half:]}"
    return text


def place(error: BaseException) -> str:
    """`` (file:line)`` of the user's last line before the session took over, or nothing."""
    if isinstance(error, Interrupted):
        return error.place
    frames = traceback.extract_tb(_user_part(error.__traceback__))
    above = itertools.takewhile(lambda frame: frame.filename not in _CALLED, frames)
    own = [frame for frame in above if not _is_machinery(frame.filename)]
    return _place_of(own[-1]) if own else ""


def _place_of(frame: traceback.FrameSummary) -> str:
    return f" ({Path(frame.filename).name}:{frame.lineno})"


def _user_part(frames: TracebackType | None) -> TracebackType | None:
    """The traceback without the leading frames of our own files; all of it where nothing else is left."""
    first = frames
    while first is not None and _is_machinery(first.tb_frame.f_code.co_filename):
        first = first.tb_next
    return first or frames


def _is_machinery(filename: str) -> bool:
    return filename in _MACHINERY or filename.startswith((_ASYNCIO, "<frozen importlib"))
