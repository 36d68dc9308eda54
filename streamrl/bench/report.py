"""Rows of a benchmark: measured in turn, summarised by medians, printed as a table, written as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One measured quantity; ``baseline`` and ``ratio`` (value / baseline) are None where nothing is compared."""

    name: str
    value: float
    unit: str
    baseline: float | None
    ratio: float | None
    runs: int
    spread: float
    """(largest − smallest) / median over the counted runs of ``value``."""


def alternate(runs: int, *contenders: Callable[[], float]) -> list[list[float]]:
    """Measure each contender ``runs`` times, in turn, after one round that is not counted; a list per contender."""
    rounds = [[contender() for contender in contenders] for _ in range(runs + 1)]
    return [list(measured) for measured in zip(*rounds[1:], strict=True)]


def summarise(name: str, unit: str, values: Sequence[float], baselines: Sequence[float] | None = None) -> Row:
    """Medians of what ``alternate`` measured."""
    value = statistics.median(values)
    baseline = statistics.median(baselines) if baselines is not None else None
    ratio = value / baseline if baseline else None
    return Row(name, value, unit, baseline, ratio, len(values), (max(values) - min(values)) / value if value else 0.0)


def table(rows: Sequence[Row]) -> str:
    """Plain text, one line per row."""
    lines = [("name", "value", "unit", "baseline", "ratio", "runs", "spread")]
    for row in rows:
        baseline = "" if row.baseline is None else f"{row.baseline:,.4g}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        lines.append((row.name, f"{row.value:,.4g}", row.unit, baseline, ratio, str(row.runs), f"{row.spread:.0%}"))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def publish(rows: Sequence[Row], json_path: str | Path | None = None) -> None:
    """Print the table and, if asked to, write the rows as a JSON list."""
    print(table(rows))
    if json_path is not None:
        Path(json_path).write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")
