"""The report on a terminal: what was found, and transcripts whose sampled tokens stand out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from streamrl.envs.check.findings import Finding, Level
from streamrl.envs.codec import Tokenizer
from streamrl.types import Trajectory

_MARKS = {Level.FINE: ("ok", "green"), Level.WARNING: ("!!", "yellow"), Level.PROBLEM: ("XX", "bold red")}
_LONGEST = 400
"""Characters of one piece of a transcript that are shown."""


def show_findings(findings: Sequence[Finding], console: Console) -> None:
    """One line for each, and under it what it would do to training."""
    width = max(len(each.check) for each in findings)
    for each in findings:
        mark, style = _MARKS[each.level]
        console.print(Text.assemble((mark, style), f"  {each.check:<{width}}  ", each.detail))
        if each.consequence:
            console.print(Text(f"{'':<{width + 6}}{each.consequence}", style="italic"))


def show_trajectory(trajectory: Trajectory, title: str, tokenizer: Tokenizer, console: Console) -> None:
    """A transcript in pieces: what the policy sampled is trained on, what it was given is not."""
    sampled = trajectory.sampled_count
    head = f"{title} · reward {trajectory.reward:g} · {counted(trajectory.turns, 'turn')}"
    tail = f"{trajectory.length} tokens, {sampled} of them sampled{', cut' if trajectory.truncated else ''}"
    console.print(Text(f"{head} · {tail}", style="bold"))
    rewards = iter(trajectory.turn_rewards)
    pairs = zip(trajectory.tokens.tolist(), trajectory.sampled.tolist(), strict=True)
    for is_sampled, run in groupby(pairs, key=lambda pair: pair[1]):
        ids = [token for token, _ in run]
        label, style = ("sampled", "bold green") if is_sampled else ("given", "bright_black")
        text = _shown(str(tokenizer.decode(ids, skip_special_tokens=False)))
        worth = next(rewards, 0.0) if is_sampled else 0.0
        note = f"  turn reward {worth:g}" if worth else ""
        console.print(Text.assemble(f"  {label:>7} {len(ids):>5} │ ", (text, style), note), soft_wrap=True)


def _shown(text: str) -> str:
    """On one line, newlines as ``⏎``, of bounded length."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"
    return text.replace("\n", "⏎")


def counted(number: int, noun: str) -> str:
    """``1 problem``, ``2 problems``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
