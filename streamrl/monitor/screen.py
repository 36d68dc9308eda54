"""What the user sees while a run goes on: one live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from streamrl.monitor.tally import Tally
from streamrl.parity import table as parity_table
from streamrl.parity.verdict import Verdict
from streamrl.runtime import messages
from streamrl.runtime.membership import Membership
from streamrl.schema import Config

REFRESHES_PER_S = 4
PLAIN_INTERVAL_S = 2.0
"""Seconds between lines where output is not a terminal."""
PARITY_WIDTH = 120
"""Columns of the parity table where output is no terminal."""


class Screen:
    """Shows one run: ``attach`` what it reads from, then call ``changed`` whenever something happened."""

    def __init__(self, config: Config, console: Console | None = None, *, whole_verdict: bool = False) -> None:
        """``whole_verdict``: print the parity table although all gates passed."""
        self._config = config
        self._whole_verdict = whole_verdict
        self._console = console or Console(file=sys.stdout, highlight=False)
        self._tally: Tally
        self._membership: Membership
        self._live: Live | None = None
        self._last_plain = 0.0
        self._last_text = ""
        self._told = False
        """The verdict of the parity gates was printed."""

    def attach(self, tally: Tally, membership: Membership) -> None:
        self._tally, self._membership = tally, membership
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=REFRESHES_PER_S)
            self._live.start()

    def changed(self) -> None:
        """Print a plain line, at most every ``PLAIN_INTERVAL_S``; a live table refreshes itself.

        The verdict of the parity gates is printed once, above: short where they passed, else as a table.
        """
        if self._tally.verdict is not None and not self._told:
            self._told = True
            self._tell(self._tally.verdict)
        if self._live is None and time.monotonic() - self._last_plain >= PLAIN_INTERVAL_S:
            self._plain()

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._tally.line:
            self._plain()

    def _tell(self, verdict: Verdict) -> None:
        if verdict.passed and not self._whole_verdict:
            for line in parity_table.short(verdict):
                self._console.print(Text(line), soft_wrap=True)
        else:
            console = self._console
            if not console.is_terminal:
                console = Console(file=console.file, width=PARITY_WIDTH, highlight=False)
            console.print(parity_table.full(verdict))

    def _plain(self) -> None:
        text = _line_text(self._tally, self._membership, self._config)
        if text and text != self._last_text:
            self._console.print(text, soft_wrap=True)
            self._last_text = text
            self._last_plain = time.monotonic()

    def _render(self) -> RenderableType:
        if self._tally.progress is not None:
            return _progress_bar(self._tally.progress)
        metrics = _metrics_table(self._tally, self._config)
        return Group(metrics, _actors_table(self._membership)) if self._membership.live() else metrics


def answers_table(evaluations: list[messages.Evaluated], rows: int = 6) -> Table:
    """A few held-out answers of the first and the last evaluated version, side by side."""
    first, last = evaluations[0], evaluations[-1]
    table = Table(title=f"held-out answers, version {first.version} and version {last.version}", title_justify="left")
    for heading in ("prompt", "before", "", "after", ""):
        table.add_column(heading)
    for (prompt, before, before_reward), (_, after, after_reward) in zip(
        first.answers[:rows], last.answers[:rows], strict=True
    ):
        table.add_row(_cell(prompt), _cell(before), _mark(before_reward), _cell(after), _mark(after_reward))
    return table


def _cell(text: str) -> Text:
    """Newlines as ``⏎``: an untrained policy writes many."""
    return Text(text.replace("\n", "⏎"))


def _mark(reward: float) -> Text:
    return Text("right", "green") if reward >= 1 else Text("wrong", "red")


def _progress_bar(progress: messages.Progress) -> Progress:
    bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar.add_task(progress.text, total=progress.total, completed=progress.done)
    return bar


def _accuracy(tally: Tally) -> str:
    evaluations = tally.evaluations
    if not evaluations:
        return "–"
    return f"{evaluations[0].accuracy:.1%} → {evaluations[-1].accuracy:.1%} (version {evaluations[-1].version})"


def _line_text(tally: Tally, membership: Membership, config: Config) -> str:
    line = tally.line
    if tally.progress is not None:
        return f"{tally.progress.text}: {tally.progress.done}/{tally.progress.total}"
    if not line:
        live = len(membership.live())
        return f"starting: {live} actor{'' if live == 1 else 's'}"
    accuracy = f"{tally.evaluations[-1].accuracy:.3f}" if tally.evaluations else "-"
    return (
        f"step {line['step']:.0f}/{config.steps}  reward {line['reward/mean']:.3f}  accuracy {accuracy}  "
        f"lag {line['lag/mean']:.2f} max {line['lag/max']:.0f} bound {config.max_lag}  "
        f"clip {line['policy/clip_fraction']:.4f}  kl {line['policy/kl_k3']:.1e}  ess {line['policy/ess']:.3f}  "
        f"tok/s {line['throughput/generated_tokens_per_s']:.0f} gen {line['throughput/trained_tokens_per_s']:.0f} "
        f"train  ready {line['buffer/ready_groups']:.0f}  sync {1e3 * line['sync/seconds']:.0f} ms "
        f"pause {1e3 * line['sync/pause_seconds']:.1f} ms"
        + (f"  parity gates failed: {line['parity/failed_gates']:.0f}" if line["parity/failed_gates"] else "")
    )


def _metrics_table(tally: Tally, config: Config) -> Table:
    line = tally.line
    table = Table(title=f"streamrl {config.run}", title_justify="left", show_header=False, pad_edge=False)
    for _ in range(3):
        table.add_column(style="dim", no_wrap=True)
        table.add_column(no_wrap=True, min_width=14)
    get = lambda key: line.get(key, 0.0)  # noqa: E731 - a name for the table below
    table.add_row("step", f"{get('step'):.0f} / {config.steps}", "lag mean", f"{get('lag/mean'):.2f}",
                  "generated", f"{get('throughput/generated_tokens_per_s'):,.0f} tokens/s")  # fmt: skip
    table.add_row("reward", f"{get('reward/mean'):.3f}", "lag max", f"{get('lag/max'):.0f} (bound {config.max_lag})",
                  "trained", f"{get('throughput/trained_tokens_per_s'):,.0f} tokens/s")  # fmt: skip
    fill = f"{get('buffer/ready_groups'):.0f} groups, {get('buffer/bytes') / 1024:.0f} KiB"
    table.add_row("accuracy", _accuracy(tally), "clip rate", f"{get('policy/clip_fraction'):.4f}", "buffer", fill)
    table.add_row("length", f"{get('length/mean'):.1f} tokens", "KL (k3)", f"{get('policy/kl_k3'):.2e}",
                  "sync", f"{1e3 * get('sync/seconds'):.0f} ms")  # fmt: skip
    if failed := get("parity/failed_gates"):
        table.add_row("parity", Text(f"{failed:.0f} gates FAILED", "red"), "", "", "", "")
    table.add_row("entropy", f"{get('policy/entropy'):.3f}", "ESS", f"{get('policy/ess'):.3f}",
                  "pause", f"{1e3 * get('sync/pause_seconds'):.1f} ms")  # fmt: skip
    return table


def _actors_table(membership: Membership) -> Table:
    table = Table(show_header=True, header_style="dim", pad_edge=False, box=None)
    for heading in ("actor", "state", "pid", "now"):
        table.add_column(heading, no_wrap=True)
    for member in membership.live():
        now = f"waits {member.waiting_s:.0f} s for {member.waiting_for}" if member.waiting_for else "works"
        table.add_row(member.spec.name, member.state.value, str(member.pid or "–"), now)
    return table
