"""What the run has achieved so far: the newest metrics line, the evaluations, and the summary."""

from __future__ import annotations

import time
from typing import Any

from streamrl.metrics import KEYS
from streamrl.parity.verdict import Verdict, summary_of
from streamrl.runtime.membership import Membership
from streamrl.runtime.messages import Evaluated, Progress, Stepped
from streamrl.schema import Config
from streamrl.sharing import engine_holder

OF_MANY_ACTORS = tuple(
    key
    for key in KEYS
    if (key.startswith(("store/", "arena/", "journal/", "engine/")) and key != "engine/kv_used")
    or key in ("queue/resent", "queue/reconnects")
)
"""Each actor counts its own; the line has their sum."""


class Tally:
    """Pure bookkeeping of the controller; no I/O."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._pending: dict[str, float] | None = None
        self._last_step_at = time.monotonic()
        self._statistics: dict[str, float] = {}
        self._unreported: list[Evaluated] = []
        self.progress: Progress | None = None
        """How far a long preparation is; None once it is over."""
        self.verdict: Verdict | None = None
        """Of the parity gates, once they have one."""
        self.weights: dict[str, Any] = {}
        """The newest version that was published, and the digest of its weights."""
        self.line: dict[str, float] = {}
        """The newest step's metrics, for the screen."""
        self.evaluations: list[Evaluated] = []
        self.lag_max = 0.0
        self.tokens_trained = 0

    def started(self) -> None:
        """Training begins now; the first step's wall time counts from here."""
        self._last_step_at = time.monotonic()

    def step(self, message: Stepped, membership: Membership, time_s: float) -> None:
        """Complete the trainer's metrics of one step by what the controller knows, and hold the line."""
        now = time.monotonic()
        wall_s = max(now - self._last_step_at, 1e-9)
        self._last_step_at = now
        values = dict.fromkeys(KEYS, 0.0) | message.metrics
        trained = values.pop("trained_tokens", 0.0)
        engines = membership.live(engine_holder(self._config))
        busy = [member.rates.get("busy_s", 0.0) for member in engines]
        values |= {
            "step": message.step,
            "version": message.version,
            "time_s": time_s,
            "wall_s": wall_s,
            "lag/bound": self._config.max_lag,
            "parity/failed_gates": len(self.verdict.failed) if self.verdict else 0,
            "throughput/generated_tokens_per_s": sum(m.rates.get("generated_tokens", 0.0) for m in engines),
            "engine/kv_used": max((m.gauges.get("engine/kv_used", 0.0) for m in engines), default=0.0),
            "throughput/trained_tokens_per_s": trained / wall_s,
            "throughput/groups_per_s": self._config.group.per_step / wall_s,
            "utilisation/trainer": (values["time/forward_backward"] + values["time/optimizer"]) / wall_s,
            "utilisation/rollouter": sum(busy) / max(len(busy), 1),
        }
        for key in OF_MANY_ACTORS:
            values[key] = values.get(key, 0.0) + sum(member.gauges.get(key, 0.0) for member in membership.live())
        self.tokens_trained += int(trained)
        self.lag_max = max(self.lag_max, values["lag/max"])
        self.line = values
        self._pending = values

    def take_line(self) -> dict[str, float] | None:
        """The held line, with the newest evaluation up to its version, once.

        A fast evaluator reports a version before the trainer reports its step: that one waits for its line.
        """
        line, self._pending = self._pending, None
        if line is None:
            return None
        due = [evaluation for evaluation in self._unreported if evaluation.version <= line["version"]]
        self._unreported = [evaluation for evaluation in self._unreported if evaluation not in due]
        if due:
            line |= {"eval/accuracy": due[-1].accuracy, "eval/version": due[-1].version}
        return line

    def evaluation(self, message: Evaluated) -> None:
        self.evaluations.append(message)
        self._unreported.append(message)

    def evaluated(self, version: int) -> bool:
        return any(evaluation.version == version for evaluation in self.evaluations)

    def event(self, event: str, fields: dict[str, Any]) -> None:
        """Keep what the summary says of an actor's event."""
        if event in ("version_committed", "version_replayed") and "weights" in fields:
            self.weights = {"version": fields["version"], "digest": fields["weights"]}

    def statistics(self, values: dict[str, float]) -> None:
        self._statistics = values

    def summary(self, status: str, reason: str, wall_s: float, membership: Membership) -> dict[str, Any]:
        """The content of ``summary.json``."""
        groups = {key: int(value) for key, value in self._statistics.items()}
        return {
            "status": status,
            "reason": reason,
            "steps": int(self.line.get("step", 0)),
            "version": int(self.line.get("version", 0)),
            "wall_s": round(wall_s, 3),
            "groups": {
                key: groups.get(key, 0)
                for key in ("issued", "consumed", "refunded", "reissued", "duplicates_trained", "lost")
            },
            "lag_max": int(self.lag_max),
            "lag_bound": self._config.max_lag,
            "eval_first": self.evaluations[0].accuracy if self.evaluations else None,
            "eval_last": self.evaluations[-1].accuracy if self.evaluations else None,
            "tokens_generated": membership.tokens_generated,
            "tokens_trained": self.tokens_trained,
            "restarts": membership.restarts,
            "parity": summary_of(self.verdict) if self.verdict else {},
            "weights": self.weights,
        }
