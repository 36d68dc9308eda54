"""Who is in the ring: one record per actor, and what the controller knows of it."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from streamrl.runtime.actor import ActorSpec, State
from streamrl.runtime.messages import Failed, Heartbeat


@dataclass
class Member:
    """One actor as the controller sees it."""

    spec: ActorSpec
    pid: int = 0
    host: str = ""
    endpoint: str = ""
    """Where it serves, once it is ready; empty for an actor that does not."""
    state: State = State.STARTING
    waiting_for: str = ""
    waiting_s: float = 0.0
    gauges: dict[str, float] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    """Growth per second of each gauge between the last two heartbeats."""
    last_seen: float = field(default_factory=time.monotonic)
    finished: bool = False
    failure: Failed | None = None
    alive: bool = True
    stopping: bool = False
    """It was told to stop; its end is no failure."""

    def beat(self, heartbeat: Heartbeat) -> None:
        now = time.monotonic()
        elapsed = now - self.last_seen
        if self.gauges and elapsed > 0:
            self.rates = {key: (value - self.gauges.get(key, 0.0)) / elapsed for key, value in heartbeat.gauges.items()}
        self.gauges = heartbeat.gauges
        self.state = State(heartbeat.state)
        self.waiting_for = heartbeat.waiting_for
        self.waiting_s = heartbeat.waiting_s
        self.last_seen = now

    def describe(self) -> str:
        """``rollouter-3 running, waits 2.1 s for a lease``."""
        wait = f", waits {self.waiting_s:.1f} s for {self.waiting_for}" if self.waiting_for else ", works"
        return f"{self.spec.name} {self.state.value}{wait}"


class Membership:
    """All members by name; the newest incarnation of each."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.restarts = 0
        """Replacements that came to work."""
        self.charged = 0
        """Replacements that count to ``liveness.max_restarts``."""
        self._attempts: Counter[str] = Counter()
        """To replace an actor that the run can spare, since it worked last."""
        self._retired_tokens = 0.0

    @property
    def tokens_generated(self) -> int:
        """By all engines of rollouters, those that died included, up to their last heartbeats."""
        return int(self._retired_tokens + sum(m.gauges.get("generated_tokens", 0.0) for m in self.members.values()))

    def add(self, spec: ActorSpec) -> Member:
        member = Member(spec)
        if (replaced := self.members.get(spec.name)) is not None:
            self._retired_tokens += replaced.gauges.get("generated_tokens", 0.0)
        self.members[spec.name] = member
        return member

    def wait_s(self, name: str, longest_s: float) -> float:
        """Before the next attempt to replace ``name``: none before the first, then 1, 2, 4 … seconds."""
        self._attempts[name] += 1
        return 0.0 if self._attempts[name] == 1 else min(2.0 ** (self._attempts[name] - 2), longest_s)

    def came_back(self, name: str) -> None:
        """A replacement of ``name`` works."""
        self.restarts += 1
        del self._attempts[name]

    def of(self, kind: str) -> list[Member]:
        return [member for member in self.members.values() if member.spec.kind == kind]

    def live(self, kind: str | None = None) -> list[Member]:
        """Members whose process runs."""
        return [member for member in self.members.values() if member.alive and kind in (None, member.spec.kind)]

    def silent(self, timeout_s: float) -> list[Member]:
        """Live members whose last heartbeat is older than ``timeout_s``."""
        now = time.monotonic()
        return [member for member in self.live() if now - member.last_seen > timeout_s]

    def all_ready(self) -> bool:
        return all(member.state is not State.STARTING for member in self.live())

    def waits(self) -> str:
        """What every live actor waits for, in one line."""
        return "; ".join(member.describe() for member in self.live())
