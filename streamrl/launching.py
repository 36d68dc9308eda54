"""``streamrl launch``: what it prints before, and what it says at the end."""

from __future__ import annotations

import sys
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

from streamrl import pipeline
from streamrl.config import to_yaml
from streamrl.monitor.screen import Screen, answers_table
from streamrl.runtime.folders import default_run_dir
from streamrl.schema import Config
from streamrl.validation import derived_bounds


def dry_run(config: Config) -> int:
    """Print the resolved settings, where each actor would run, and the bounds that follow."""
    console = Console(highlight=False)
    console.print(to_yaml(config), markup=False)
    actors = Table(title="placement", title_justify="left")
    for heading in ("actor", "host", "torch threads"):
        actors.add_column(heading)
    for actor, host, threads in pipeline.placement(config):
        actors.add_row(actor, host, str(threads))
    console.print(actors)
    bounds = Table(title="derived bounds", title_justify="left", show_header=False)
    for name, value in derived_bounds(config).items():
        bounds.add_row(name, str(value))
    console.print(bounds)
    return 0


def launch(config: Config, run_dir: Path | None) -> int:
    """Run the ring and report; returns the exit code."""
    folder = run_dir or default_run_dir(config)
    console = Console(highlight=False)
    outcome = uvloop.run(pipeline.run(config, folder, Screen(config, console)))
    summary = outcome.summary
    evaluations = outcome.evaluations
    if len(evaluations) > 1:
        console.print(answers_table(evaluations))
        console.print(
            f"held-out accuracy: {summary['eval_first']:.1%} → {summary['eval_last']:.1%} "
            f"({config.eval.tasks} tasks, greedy)"
        )
    groups = summary["groups"]
    console.print(
        f"steps: {summary['steps']}, version: {summary['version']}, wall: {summary['wall_s']:.1f} s, "
        f"lag max: {summary['lag_max']} (bound {summary['lag_bound']}), groups: {groups['consumed']} consumed, "
        f"{groups['duplicates_trained']} trained twice, {groups['lost']} lost",
        soft_wrap=True,
    )
    console.print(f"run folder: {folder}", soft_wrap=True)
    console.print(f"status: {summary['status']}")
    if summary["reason"]:
        print(f"streamrl: {summary['reason']}", file=sys.stderr)
    return outcome.exit_code
