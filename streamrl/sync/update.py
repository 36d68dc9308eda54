"""One version on its way to its members: the two-phase protocol as a state machine without sockets or clocks (C5).

Every method is one thing that happened and returns the orders to send out for it. A member goes through these steps::

    step     waits for                   next
    CONNECT  its Hello                   STAGE
    STAGE    Staged                      HOLD (rolling: COMMIT); StageFailed: STAGE once more, then it is given up
    HOLD     all others to be in HOLD    COMMIT (an observer stays in HOLD and is told at the end)
    COMMIT   Committed                   DONE; CommitFailed: STAGE once more, then FAILED; Rejected: REJECTED for all
    DONE     –                           STAGE, should a new incarnation of it connect before the end
    FAILED   –                           it has not followed the others and must be restarted, then as for DONE

and the update through these phases::

    STAGE    nothing changed anywhere yet: a failure gives the update up for all (ABORTED)
    COMMIT   the decision is made: who fails now is left behind (FAILED), the others go on
    DONE     every member that is left serves the version
    ABORTED  nobody serves it
    REJECTED some serve it, and nobody must: they have to be brought back

Together, the decision is made when all have staged; rolling, by the first who has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import Enum


class Step(Enum):
    CONNECT = "connect"
    STAGE = "stage"
    HOLD = "hold"
    COMMIT = "commit"
    DONE = "done"
    FAILED = "failed"


class Phase(Enum):
    STAGE = "stage"
    COMMIT = "commit"
    DONE = "done"
    ABORTED = "aborted"
    REJECTED = "rejected"


class Order(Enum):
    STAGE = "stage"
    COMMIT = "commit"
    DISCARD = "discard"


Orders = list[tuple[str, Order]]

ATTEMPTS = 2
"""How often a member is staged before its failures count."""

_WAITING = (Step.CONNECT, Step.STAGE, Step.COMMIT)
_OVER = (Phase.DONE, Phase.ABORTED, Phase.REJECTED)


class Update:
    """``version`` for ``rollouters`` and ``observers``; a ``private`` one copies out of the slot (late joiner).

    ``writing``: not all of it is there yet, so that it is not done before ``written``, also when nobody is left.
    """

    def __init__(
        self,
        number: int,
        version: int,
        rollouters: Iterable[str],
        observers: Iterable[str],
        *,
        private: bool = False,
        rolling: bool = False,
        writing: bool = False,
    ) -> None:
        self.number = number
        self.version = version
        self.private = private
        self.phase = Phase.STAGE
        self.canary_rms = 0.0
        """Largest that a member reported."""
        self.pauses: dict[str, float] = {}
        """Seconds that each member stood still, of those that committed."""
        self.failures: dict[str, str] = {}
        """Reason by member: those that are left behind, or those that the update was given up for."""
        self._rolling = rolling
        self._writing = writing
        self._observers = set(observers)
        self._steps = dict.fromkeys((*sorted(rollouters), *sorted(self._observers)), Step.CONNECT)
        self._attempts: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()

    def __contains__(self, name: str) -> bool:
        return name in self._steps

    @property
    def members(self) -> set[str]:
        return set(self._steps)

    @property
    def committed(self) -> set[str]:
        return {name for name, step in self._steps.items() if step is Step.DONE}

    @property
    def waiting(self) -> dict[str, Step]:
        """What each member that is behind is waited for."""
        return {name: step for name, step in self._steps.items() if step in _WAITING}

    def observes(self, name: str) -> bool:
        return name in self._observers

    def attempt(self, name: str) -> int:
        """How often the member was staged again."""
        return self._attempts[name]

    def staging(self) -> list[str]:
        """Members that were told to stage and have not answered."""
        return [name for name, step in self._steps.items() if step is Step.STAGE]

    def begin(self, connected: Iterable[str]) -> Orders:
        """First orders; with nobody to wait for the update is done at once, or when it is written."""
        orders = [order for name in connected for order in self.connected(name)]
        return orders + self._advance()

    def written(self) -> Orders:
        """All of the version is there."""
        self._writing = False
        return self._advance()

    def connected(self, name: str) -> Orders:
        """A member said Hello, for the first time or again: it is staged from the start, whatever it had before."""
        if self._step(name) is None:
            return []
        self.failures.pop(name, None)
        if self._steps[name] is not Step.CONNECT:
            self._attempts[name] += 1
        self._steps[name] = Step.STAGE
        return [(name, Order.STAGE)]

    def disconnected(self, name: str) -> None:
        """A message could not be delivered: wait for the member's next Hello."""
        if self._step(name) in (Step.STAGE, Step.HOLD, Step.COMMIT):
            self._steps[name] = Step.CONNECT
            self._attempts[name] += 1

    def removed(self, name: str) -> Orders:
        """The member was declared dead: it is waited for no longer."""
        if self._step(name) is None:
            return []
        del self._steps[name]
        self.failures.pop(name, None)
        self.pauses.pop(name, None)
        return self._advance()

    def staged(self, name: str) -> Orders:
        if self._step(name) is not Step.STAGE:
            return []
        if (self._rolling or self.phase is Phase.COMMIT) and name not in self._observers:
            self.phase = Phase.COMMIT
            self._steps[name] = Step.COMMIT
            return [(name, Order.COMMIT)]
        self._steps[name] = Step.HOLD
        return self._advance()

    def committed_by(self, name: str, pause_seconds: float, canary_rms: float = 0.0) -> Orders:
        if self._step(name) is not Step.COMMIT:
            return []
        self._steps[name] = Step.DONE
        self.pauses[name] = pause_seconds
        self.canary_rms = max(self.canary_rms, canary_rms)
        return self._advance()

    def rejected_by(self, name: str, canary_rms: float, reason: str) -> Orders:
        """It serves the version and found it wrong: nobody is to serve it."""
        if self._step(name) is not Step.COMMIT:
            return []
        self.canary_rms = canary_rms
        self.failures |= {name: reason}
        return self._end(Phase.REJECTED)

    def failed(self, name: str, reason: str) -> Orders:
        """StageFailed or CommitFailed."""
        if self._step(name) not in (Step.STAGE, Step.COMMIT):
            return []
        self._failed[name] += 1
        if self._failed[name] < ATTEMPTS:
            self._attempts[name] += 1
            self._steps[name] = Step.STAGE
            return [(name, Order.STAGE)]
        return self._fail({name: reason})

    def expire(self, reason: str) -> Orders:
        """The last deadline passed: every member that is still behind fails."""
        if self.phase in _OVER:
            return []
        return self._fail({name: f"{reason} ({step.value})" for name, step in self.waiting.items()})

    def give_up(self) -> Orders:
        """The caller wants no more of it."""
        return [] if self.phase in _OVER else self._end(Phase.ABORTED)

    def _step(self, name: str) -> Step | None:
        """None for a member that does not take part, and for all when the update is over."""
        return None if self.phase in _OVER else self._steps.get(name)

    def _fail(self, reasons: dict[str, str]) -> Orders:
        self.failures |= reasons
        if self.phase is Phase.STAGE:
            return self._end(Phase.ABORTED)
        self._steps |= dict.fromkeys(reasons, Step.FAILED)
        return self._advance()

    def _advance(self) -> Orders:
        """Close the phase when nobody is behind."""
        if self.phase in _OVER or self.waiting or self._writing:
            return []
        if self.phase is Phase.STAGE:
            self.phase = Phase.COMMIT
            rollouters = [name for name in self._steps if name not in self._observers]
            self._steps |= dict.fromkeys(rollouters, Step.COMMIT)
            if rollouters:
                return [(name, Order.COMMIT) for name in rollouters]
        if self.failures and not self.committed:
            return self._end(Phase.ABORTED)
        self.phase = Phase.DONE
        return [(name, Order.COMMIT) for name, step in self._steps.items() if step is Step.HOLD]

    def _end(self, phase: Phase) -> Orders:
        """Without the version."""
        self.phase = phase
        return [(name, Order.DISCARD) for name, step in self._steps.items() if step is not Step.CONNECT]
