"""When a group is closed: with all of its episodes, or without its stragglers (``group.on_straggler``).

A straggler is cancelled together with its request to the engine. What a group holds is settled at one moment: an
episode that is finished by then is whole, any other is absent, whatever becomes of it while it is cancelled.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass

from streamrl.envs.episode import Episode
from streamrl.envs.failure import Failure, place
from streamrl.schema import GroupConfig
from streamrl.types import Trajectory


@dataclass(frozen=True)
class Played:
    """An episode that finished."""

    trajectories: list[Trajectory]
    """At least one; several where it branched or its history was rewritten."""

    @property
    def reward(self) -> float:
        """The mean of the different rewards of its trajectories."""
        rewards = {each.reward for each in self.trajectories}
        return math.fsum(rewards) / len(rewards)


@dataclass(frozen=True)
class Straggler:
    """An episode that was cancelled because its group was closed. It is no failure of the user's code."""

    reason: str
    """One line: why the group was closed, and where in the user's code the episode was."""


Member = asyncio.Task[Played | Failure]


@dataclass(frozen=True)
class ClosingPolicy:
    """For how long a group waits for its episodes."""

    enough: int
    """Finished episodes that make a group, ``group.min_size``."""
    straggler_s: float | None
    """Seconds from the ``enough``-th finished episode until the group is closed; None: it waits for all."""

    @classmethod
    def of(cls, group: GroupConfig) -> ClosingPolicy:
        return cls(group.min_size, group.straggler_s if group.on_straggler == "close" else None)

    async def play(
        self, episodes: Sequence[Episode], coroutines: Sequence[Coroutine[None, None, Played | Failure]]
    ) -> list[Played | Failure | Straggler]:
        """What became of every episode, in order. Cancelling the call cancels all of them.

        The first exception of an episode (an error of the engine) ends all and is raised as it is, not in a group.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                members = [tasks.create_task(each) for each in coroutines]
                reason = await self._closed(members)
                late = [not member.done() for member in members]
                for member, episode, is_late in zip(members, episodes, late, strict=True):
                    if is_late:
                        episode.close()  # user code that survives its cancellation samples no more
                        member.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [
            _straggler(member, reason) if is_late else member.result()
            for member, is_late in zip(members, late, strict=True)
        ]

    async def _closed(self, members: Sequence[Member]) -> str:
        """Wait until the group need not wait any longer; why not, where some members still run."""
        if self.straggler_s is None:
            await asyncio.wait(members)
            return ""
        now = asyncio.get_running_loop().time
        running = set(members)
        finished, closes_at = 0, math.inf
        while running:
            left = None if closes_at == math.inf else max(0.0, closes_at - now())
            ended, running = await asyncio.wait(running, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            finished += sum(isinstance(member.result(), Played) for member in ended)
            if not ended:
                return f"still running group.straggler_s={self.straggler_s:g} after {self._enough_of(members)} finished"
            if finished + len(running) < self.enough:
                return f"cancelled: failures left fewer than {self._enough_of(members)}"
            if finished >= self.enough:
                closes_at = min(closes_at, now() + self.straggler_s)
        return ""

    def _enough_of(self, members: Sequence[Member]) -> str:
        return f"group.min_size={self.enough} of {len(members)} episodes"


def _straggler(member: Member, reason: str) -> Straggler:
    try:
        member.result()
    except asyncio.CancelledError as error:
        return Straggler(reason + place(error))
    return Straggler(reason)  # its code caught the cancellation and returned; the group was closed before
