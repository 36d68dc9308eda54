"""What went wrong in user code: one line for the terminal, a traceback for ``events.jsonl``."""

from __future__ import annotations

import asyncio
import itertools
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_SESSION = str(Path(__file__).with_name("session.py"))

_MACHINERY = frozenset(
    str(Path(__file__).with_name(name))
    for name in ("session.py", "environment.py", "group.py", "closing.py", "returned.py")
)
"""Files that call user code or are called by it; their frames are no place to look for a user's mistake."""

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


def one_line(error: BaseException) -> str:
    """``ValueError: bad digit (my_env.py:12)``: type, message without newlines, the user's last line."""
    message = " ".join(str(error).split())
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return text + place(error)


def failure_of(error: BaseException, reason: str = "") -> Failure:
    """The failure that ``error`` is; ``reason`` stands for its type and message where these say too little."""
    return Failure(reason + place(error) if reason else one_line(error), traceback_of(error))


def traceback_of(error: BaseException) -> str:
    """Formatted, the user's frames first, of bounded length."""
    text = "".join(traceback.format_exception(type(error), error, _user_part(error.__traceback__)))
    if len(text) > TRACEBACK_LIMIT:
        half = TRACEBACK_LIMIT // 2
        text = f"{text[:half]}\n  … {len(text) - 2 * half} characters left out …\n{text[-half:]}"
    return text


def place(error: BaseException) -> str:
    """`` (file:line)`` of the user's last line before the session took over, or nothing."""
    frames = traceback.extract_tb(_user_part(error.__traceback__))
    above = itertools.takewhile(lambda frame: frame.filename != _SESSION, frames)
    own = [frame for frame in above if not _is_machinery(frame.filename)]
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""


def _user_part(frames: TracebackType | None) -> TracebackType | None:
    """The traceback without the leading frames of our own files; all of it where nothing else is left."""
    first = frames
    while first is not None and _is_machinery(first.tb_frame.f_code.co_filename):
        first = first.tb_next
    return first or frames


def _is_machinery(filename: str) -> bool:
    return filename in _MACHINERY or filename.startswith((_ASYNCIO, "<frozen importlib"))
