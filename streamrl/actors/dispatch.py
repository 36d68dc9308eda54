"""Which lease is played where: in the rollouter, or by a process that is attached to it (``env.play``).

A lease goes to an attached process while one has a free worker. Else the rollouter plays it, where it may: with
``env.play=attached`` it takes leases only while attached workers are free.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from streamrl.engines.concurrency import Concurrency
from streamrl.envs.attach.agent import AgentGone
from streamrl.envs.group import GroupResult
from streamrl.errors import EngineLost
from streamrl.types import Lease


class Leases(Protocol):
    """Where leases come from, and go back to (``QueueProducer``)."""

    async def lease(self, count: int) -> list[Lease]: ...

    async def give_back(self, lease_id: int, *, lost: bool) -> str: ...


class Runner(Protocol):
    """Plays a lease (``GroupRunner``)."""

    async def run_group(self, lease: Lease) -> GroupResult: ...


class Worker(Runner, Protocol):
    """Plays a lease elsewhere, and is free again afterwards (``Agent``)."""

    def release(self) -> None: ...


class Deliver(Protocol):
    """Takes what came of a lease. ``attached``: another process played it."""

    async def __call__(self, lease: Lease, result: GroupResult, *, attached: bool) -> None: ...


class Desk(Protocol):
    """Attached processes (``AttachDesk``)."""

    @property
    def free(self) -> int: ...

    @property
    def taken(self) -> int: ...

    def take(self) -> Worker | None: ...


class Dispatch:
    """The loop from leases to groups."""

    def __init__(
        self,
        leases: Leases,
        runner: Runner,
        desk: Desk,
        own: Concurrency,
        deliver: Deliver,
        waiting: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """``own``: groups that ``runner`` has under way at once; 0: only attached processes play."""
        self._leases = leases
        self._runner = runner
        self._desk = desk
        self._own = own
        self._deliver = deliver
        self._waiting = waiting
        self._groups = 0
        """That ``runner`` has under way."""
        self._room = asyncio.Event()
        """Set whenever there may be room for a further group."""

    def changed(self) -> None:
        """An attached worker may have become free."""
        self._room.set()

    async def run(self) -> None:
        """As many groups under way as the engine and the attached processes have room for, one lease each; for ever."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._room.clear()
                room = max(0, self._own.limit - self._groups) + self._desk.free
                idle = not self._groups and not self._desk.taken
                if not room:
                    with self._waiting("an attached agent: env.play=attached, and none is there" if idle else ""):
                        await self._room.wait()
                    continue
                with self._waiting("a lease: the lag bound is reached" if idle else ""):
                    leases = await self._leases.lease(room)
                for lease in leases:
                    await self._begin(lease, tasks)

    async def _begin(self, lease: Lease, tasks: asyncio.TaskGroup) -> None:
        if (worker := self._desk.take()) is not None:
            tasks.create_task(self._attached_group(lease, worker))
        elif self._own.limit:
            self._groups += 1
            tasks.create_task(self._own_group(lease))
        else:  # whoever it was for left while it was on its way
            await self._leases.give_back(lease.id, lost=False)

    async def _own_group(self, lease: Lease) -> None:
        await self._group(lease, self._runner, attached=False)
        self._groups -= 1
        self._own.group_ended(self._groups)
        self._room.set()

    async def _attached_group(self, lease: Lease, worker: Worker) -> None:
        try:
            await self._group(lease, worker, attached=True)
        except AgentGone as gone:
            await self._leases.give_back(lease.id, lost=gone.lost)
        finally:
            worker.release()

    async def _group(self, lease: Lease, runner: Runner, *, attached: bool) -> None:
        try:
            async with asyncio.timeout(lease.deadline_s) as deadline:
                result = await runner.run_group(lease)
        except TimeoutError:
            if not deadline.expired():
                raise  # of the engine
            return  # the buffer counts the expired lease and issues its prompt again
        except EngineLost:
            await self._leases.give_back(lease.id, lost=True)
            return
        await self._deliver(lease, result, attached=attached)
