"""What a check found, and what it means for training."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    FINE = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    """Training would fail, or learn from wrong data."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    level: Level
    check: str
    """What was looked at, in a few words."""
    detail: str
    """What was found."""
    consequence: str = ""
    """What it would do to training, and the way out; empty where all is well."""


def fine(check: str, detail: str) -> Finding:
    return Finding(Level.FINE, check, detail)


def warning(check: str, detail: str, consequence: str) -> Finding:
    return Finding(Level.WARNING, check, detail, consequence)


def problem(check: str, detail: str, consequence: str) -> Finding:
    return Finding(Level.PROBLEM, check, detail, consequence)


def shortened(text: str, most: int = 60) -> str:
    """``text`` on one line of at most ``most`` characters, in quotes."""
    shown = repr(text)
    return shown if len(shown) <= most else f"{shown[: most - 2]}…{shown[-1]}"
