"""A recorded run as ``streamrl replay`` finds it in its folder, and which settings a replay of it may change."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from streamrl.buffers.replay import count_steps
from streamrl.config import load_config
from streamrl.errors import ConfigError, JournalError
from streamrl.schema import Config

PLAN_FILE = "replay.json"
"""In the folder of a replay."""

_GENERATION = "nothing is generated or evaluated in a replay"
_RECORDED = "which groups there are, and the batch of each, is in the journal"
_FIXED = {
    "steps": "the schedule of the learning rate goes by it; --steps N replays the first N steps",
    "trainers": "the recorded batches are planned for that many ranks",
    "rollouts": _GENERATION,
    "env": _GENERATION,
    "engine": _GENERATION,
    "eval": _GENERATION,
    "sampling": "the recorded tokens were sampled with it",
    "model": "the recorded tokens and log-probs are this model's",
    "seed": "the first weights lie in the run folder",
    "sync": "nothing is published in a replay",
}
"""Top-level keys that a replay may not change, with the reason; ``_RECORDED`` for those that are not here."""
_ARITHMETIC = ("loss", "trainer")
"""Sections that a replay may change; the weights are others then."""
_FREE = ("run", "wandb", "liveness")
"""What changes no weight."""


class ReplayPlan(msgspec.Struct, frozen=True):
    """What the ranks of a replay do; also says later what was replayed."""

    recording: str
    """Folder of the recorded run, absolute."""
    steps: int
    changed: list[str]
    """Settings that change the weights, as ``key=value``; empty: they are compared with the recorded ones."""

    def save(self, folder: Path) -> None:
        (folder / PLAN_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")

    @classmethod
    def load(cls, folder: Path) -> ReplayPlan:
        return msgspec.json.decode((folder / PLAN_FILE).read_bytes(), type=cls)


@dataclasses.dataclass(frozen=True)
class Recording:
    """The folder of a run with ``buffer.keep: all``."""

    folder: Path
    config: Config
    """The run's own settings."""
    steps: int
    """How many steps can be replayed."""
    ended: bool
    """False while the run goes on, or where it was killed with its controller."""
    digests: dict[int, str]
    """Version → digest of its weights (``sync/digest.py``), of every version that was published."""


def first_checkpoint(run_dir: Path) -> Path:
    """Where a run keeps the weights of version 0, when it is to be replayed."""
    return run_dir / "checkpoints" / "step-0"


def journal_folder(run_dir: Path) -> Path:
    """Where the buffer of a run keeps its journal."""
    return run_dir / "journal" / "buffer"


def open_recording(folder: Path, steps: int | None) -> Recording:
    """Check that the first ``steps`` steps of the run in ``folder`` can be replayed (``None``: all that there are).

    Reads the whole journal. Raises ``ConfigError`` where the folder or the number does not fit, ``JournalError`` for a
    journal that is damaged before the last of those steps.
    """
    settings = folder / "config.yaml"
    if not settings.is_file():
        raise ConfigError(
            f"{folder}: no config.yaml in it, so it is no run folder; give one, such as runs/<name>-<time>"
        )
    config = load_config(str(settings))
    if (folder / PLAN_FILE).exists():
        original = ReplayPlan.load(folder).recording
        raise ConfigError(f"{folder}: this is a replay itself; replay the run that it replayed, {original}")
    if config.buffer.keep != "all":
        raise ConfigError(
            f"{folder}: its journal kept live groups only (buffer.keep={config.buffer.keep}), so what it trained on is "
            "gone; launch the next run with buffer.keep=all to replay it"
        )
    checkpoint = first_checkpoint(folder)
    if not (checkpoint / "config.json").is_file():
        raise ConfigError(f"{checkpoint}: the run's first weights are missing; a replay starts from them")
    found = _usable_steps(folder, config, steps)
    return Recording(folder, config, found, (folder / "summary.json").exists(), dict(_digests(folder)))


def _usable_steps(folder: Path, config: Config, steps: int | None) -> int:
    if steps is not None and steps < 1:
        raise ConfigError(f"--steps {steps}: must be at least 1")
    found, damage = count_steps(journal_folder(folder), config.buffer.epochs_per_group)
    if damage is not None and (steps is None or steps > found):
        if not found:
            raise damage
        raise JournalError(f"{damage}; the steps before the damage can be replayed: --steps {found}")
    if steps is not None and steps > found:
        raise ConfigError(f"--steps {steps}: {folder} holds {found} acknowledged steps; give at most that")
    if not found:
        raise ConfigError(f"{folder}: no step of it was acknowledged, so there is nothing to replay")
    return found if steps is None else steps


def _digests(folder: Path) -> Iterator[tuple[int, str]]:
    try:
        lines = (folder / "events.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        if '"version_committed"' not in line:
            continue
        try:
            event = json.loads(line)
        except ValueError:
            continue  # the last line of a run that was killed, or that is being written
        if event["event"] == "version_committed" and "weights" in event:
            yield event["version"], event["weights"]


def replay_settings(recording: Recording, overrides: Sequence[str]) -> tuple[Config, list[str]]:
    """The settings of a replay, and those among ``overrides`` that change the weights, as ``key=value``.

    Raises ``ConfigError`` for a setting that the recorded batches depend on.
    """
    recorded = recording.config
    config = load_config(str(recording.folder / "config.yaml"), overrides)
    changed = []
    for key, was, now in _differences(recorded, config, ""):
        section = key.partition(".")[0]
        if section in _ARITHMETIC:
            changed.append(f"{key}={now}")
        elif section not in _FREE:
            raise ConfigError(f"{key}={now}: a replay keeps the run's {key}={was}: {_FIXED.get(section, _RECORDED)}")
    if config.run == recorded.run:
        config.run = f"{recorded.run}-replay"
    return config, changed


def _differences(one: Any, other: Any, prefix: str) -> Iterator[tuple[str, object, object]]:
    """Dotted key and both values of every setting in which two configs differ."""
    for field in dataclasses.fields(one):
        was, now, key = getattr(one, field.name), getattr(other, field.name), prefix + field.name
        if dataclasses.is_dataclass(was):
            yield from _differences(was, now, f"{key}.")
        elif was != now:
            yield key, was, now
