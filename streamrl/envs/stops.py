"""Strings that end a turn."""

from __future__ import annotations

from collections.abc import Iterable


def stop_strings(stop: str | Iterable[str] | None) -> tuple[str, ...]:
    """One string, several, or None, as a tuple. Raises ``ValueError`` for what is no string, or an empty one."""
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    wrong = next((each for each in stops if not isinstance(each, str) or not each), None)
    if wrong is not None:
        raise ValueError(f"stop={wrong!r:.80}: expected a string of at least one character")
    return stops


def cut(text: str, stop: str | Iterable[str] | None) -> str:
    """``text`` before the first stop string in it."""
    return text[: min((at for at in map(text.find, stop_strings(stop)) if at >= 0), default=len(text))]
