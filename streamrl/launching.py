"""``streamrl launch`` and ``streamrl replay``: what they print before, and what they say at the end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

from streamrl import pipeline
from streamrl.actors.parity_controller import ParityController
from streamrl.actors.recording import Recording, ReplayPlan, open_recording, replay_settings
from streamrl.actors.replay_controller import ReplayController
from streamrl.config import to_yaml
from streamrl.monitor.screen import Screen, answers_table
from streamrl.objective_checks import warnings
from streamrl.runtime.folders import default_run_dir
from streamrl.runtime.interpreter import check_interpreter
from streamrl.schema import Config
from streamrl.validation import derived_bounds


def dry_run(config: Config) -> int:
    """Print the resolved settings, where each actor would run, and the bounds that follow."""
    console = Console(highlight=False)
    console.print(to_yaml(config), markup=False)
    check_interpreter(config)
    _warn(config)
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
    check_interpreter(config)
    _warn(config)
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


def parity(config: Config, run_dir: Path | None) -> int:
    """Assemble the ring, compare engines and trainer, print the table and end; returns the exit code."""
    config = replace(
        config, run=f"{config.run}-parity", parity=replace(config.parity, name="gate"),
        eval=replace(config.eval, tasks=0), wandb=replace(config.wandb, name="disabled"),
    )  # fmt: skip
    folder = run_dir or default_run_dir(config)
    console = Console(highlight=False)
    check_interpreter(config)
    _warn(config)
    screen = Screen(config, console, whole_verdict=True)
    outcome = uvloop.run(pipeline.run(config, folder, screen, ParityController))
    console.print(f"run folder: {folder}", soft_wrap=True)
    if outcome.summary["reason"]:
        print(f"streamrl: {outcome.summary['reason']}", file=sys.stderr)
    return outcome.exit_code


def _warn(config: Config) -> None:
    for line in warnings(config):
        print(f"streamrl: warning: {line}", file=sys.stderr)


def replay(recorded: Path, overrides: Sequence[str], steps: int | None, run_dir: Path | None) -> int:
    """Train again on what the run in ``recorded`` trained on, and compare the weights; returns the exit code."""
    console = Console(highlight=False)
    recording = open_recording(recorded, steps)
    config, changed = replay_settings(recording, overrides)
    plan = ReplayPlan(str(recorded.resolve()), recording.steps, changed)
    folder = run_dir or default_run_dir(config)
    if not recording.ended:
        console.print(f"{recorded} has no end yet: the steps that are acknowledged so far are replayed", soft_wrap=True)
    console.print(f"replaying {recording.steps} steps of {recorded}, trainers={config.trainers}", soft_wrap=True)
    make_controller = partial(ReplayController, recording=recording, plan=plan)
    outcome = uvloop.run(pipeline.run(config, folder, Screen(config, console), make_controller))
    summary = outcome.summary
    console.print(
        f"steps: {summary['steps']}, version: {summary['version']}, wall: {summary['wall_s']:.1f} s, "
        f"tokens: {summary['tokens_trained']} trained, weights: {summary['weights'].get('digest', '-')}",
        soft_wrap=True,
    )
    console.print(f"run folder: {folder}", soft_wrap=True)
    if outcome.exit_code == pipeline.COMPLETED:
        console.print(_comparison(recording, plan), soft_wrap=True)
    else:
        console.print(f"status: {summary['status']}")
        print(f"streamrl: {summary['reason']}", file=sys.stderr)
    return outcome.exit_code


def _comparison(recording: Recording, plan: ReplayPlan) -> str:
    """What a replay that came to its end says of the weights: none that was compared differs."""
    if plan.changed:
        return f"weights are not compared with the recorded ones: this replay has {' '.join(plan.changed)}"
    versions = plan.steps + 1
    compared = sum(version in recording.digests for version in range(versions))
    if compared == versions:
        return f"weights of all {versions} versions are identical to the recorded ones"
    return f"weights of {compared} versions are identical to the recorded ones; {versions - compared} were not recorded"
