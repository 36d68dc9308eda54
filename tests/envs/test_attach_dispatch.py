"""Leases go to attached processes while they are free, else to the rollouter where it may play; none is forgotten."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator

import pytest
from virtual_time import run_in_virtual_time

from streamrl.actors.dispatch import Dispatch
from streamrl.engines.concurrency import Concurrency
from streamrl.envs.attach.agent import AgentGone
from streamrl.envs.group import GroupResult
from streamrl.errors import EngineLost
from streamrl.ports import EngineStatistics
from streamrl.types import Lease

IDLE = EngineStatistics(0, 0, 0, 0, 0.0, 0)
RESULT = GroupResult(None, [])


class Source:
    """Grants leases from ``granted``, one request after the other, and remembers what came back."""

    def __init__(self) -> None:
        self.granted: asyncio.Queue[int] = asyncio.Queue()
        self.asked: list[int] = []
        self.returned: list[tuple[int, bool]] = []

    async def lease(self, count: int) -> list[Lease]:
        self.asked.append(count)
        first = await self.granted.get()
        return [Lease(first, first, 2, 0, deadline_s=10.0)]

    async def give_back(self, lease_id: int, *, lost: bool) -> str:
        self.returned.append((lease_id, lost))
        return "returned"


class Player:
    """Plays a lease for as long as it is told to; the rollouter's own, or the worker of a process."""

    def __init__(self, desk: Desk | None = None) -> None:
        self.desk = desk
        self.played: list[int] = []
        self.end: asyncio.Future[GroupResult] = asyncio.get_running_loop().create_future()

    async def run_group(self, lease: Lease) -> GroupResult:
        self.played.append(lease.id)
        return await asyncio.shield(self.end)

    def release(self) -> None:
        assert self.desk is not None
        self.desk.taken -= 1
        self.desk.workers.append(self)


class Desk:
    def __init__(self) -> None:
        self.workers: list[Player] = []
        self.taken = 0

    @property
    def free(self) -> int:
        return len(self.workers)

    def take(self) -> Player | None:
        if not self.workers:
            return None
        self.taken += 1
        return self.workers.pop()


class Scene:
    def __init__(self, most: int) -> None:
        self.source, self.desk, self.own = Source(), Desk(), Player()
        self.delivered: list[int] = []
        self.attached: list[bool] = []
        """Of the delivered ones, whether another process played them."""
        self.waits: list[str] = []
        """What is waited for now, outermost first."""
        self.dispatch = Dispatch(
            self.source, self.own, self.desk, Concurrency(most, lambda: IDLE), self._deliver, self._waiting
        )

    async def _deliver(self, lease: Lease, result: GroupResult, *, attached: bool) -> None:
        self.delivered.append(lease.id)
        self.attached.append(attached)

    @contextlib.contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        self.waits.append(what)
        try:
            yield
        finally:
            self.waits.remove(what)

    def attach(self) -> Player:
        worker = Player(self.desk)
        self.desk.workers.append(worker)
        self.dispatch.changed()
        return worker

    def grant(self, *leases: int) -> None:
        for lease in leases:
            self.source.granted.put_nowait(lease)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def play(most: int, script: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        scene = Scene(most)
        loop = asyncio.create_task(scene.dispatch.run())
        await settle()
        await script(scene)
        loop.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loop

    run_in_virtual_time(main())


def test_a_rollouter_without_attached_processes_plays_as_many_as_it_may() -> None:
    async def script(scene: Scene) -> None:
        scene.grant(0, 1, 2)
        await settle()
        assert scene.own.played == [0, 1]
        assert scene.source.asked == [2, 1]
        scene.own.end.set_result(RESULT)
        await settle()
        assert scene.own.played == [0, 1, 2]
        assert (scene.delivered, scene.attached) == ([0, 1, 2], [False] * 3)

    play(2, script)


def test_a_group_that_engines_died_with_goes_back_as_lost_and_the_next_is_played() -> None:
    async def script(scene: Scene) -> None:
        scene.grant(0)
        await settle()
        scene.own.end.set_exception(EngineLost("engine-0 was lost with the requests that it had"))
        await settle()
        assert (scene.source.returned, scene.delivered) == ([(0, True)], [])
        scene.own.end = asyncio.get_running_loop().create_future()
        scene.grant(1)
        await settle()
        assert scene.own.played == [0, 1]

    play(1, script)


def test_a_free_attached_worker_gets_the_next_lease_and_the_rollouter_the_one_after() -> None:
    async def script(scene: Scene) -> None:
        worker = scene.attach()
        scene.grant(0, 1)
        await settle()
        assert (worker.played, scene.own.played) == ([0], [1])
        worker.end.set_result(RESULT)
        await settle()
        assert (scene.delivered, scene.attached) == ([0], [True])

    play(1, script)


def test_attached_workers_are_room_beyond_that_of_the_engine() -> None:
    async def script(scene: Scene) -> None:
        scene.grant(0)
        await settle()
        assert scene.own.played == [0]
        scene.attach()
        await settle()
        assert scene.source.asked == [1, 1]

    play(1, script)


def test_a_rollouter_that_may_not_play_takes_no_lease_and_says_that_it_waits_for_an_agent() -> None:
    async def script(scene: Scene) -> None:
        assert scene.source.asked == []
        assert scene.waits == ["an attached agent: env.play=attached, and none is there"]
        worker = scene.attach()
        scene.grant(0)
        await settle()
        assert (scene.source.asked, worker.played, scene.own.played) == ([1], [0], [])
        assert scene.waits == [""]  # the agent works

    play(0, script)


def test_a_lease_whose_agent_left_while_it_was_on_its_way_is_returned_unblamed() -> None:
    async def script(scene: Scene) -> None:
        scene.attach()
        await settle()
        scene.desk.workers.clear()
        scene.grant(5)
        await settle()
        assert scene.source.returned == [(5, False)]
        assert scene.own.played == []

    play(0, script)


@pytest.mark.parametrize("lost", [True, False])
def test_a_lease_whose_agent_is_gone_is_returned_at_once(lost: bool) -> None:
    async def script(scene: Scene) -> None:
        worker = scene.attach()
        scene.grant(5)
        await settle()
        worker.end.set_exception(AgentGone("the connection ended", lost))
        await settle()
        assert scene.source.returned == [(5, lost)]
        assert scene.desk.taken == 0
        assert scene.delivered == []

    play(0, script)


def test_a_lease_past_its_deadline_is_left_to_the_buffer_and_frees_its_worker() -> None:
    async def script(scene: Scene) -> None:
        scene.attach()
        scene.grant(5)
        await asyncio.sleep(9.9)
        assert scene.desk.taken == 1
        await asyncio.sleep(0.2)
        assert (scene.desk.taken, scene.delivered, scene.source.returned) == (0, [], [])

    play(0, script)


def test_an_engine_that_ran_out_of_time_is_no_lease_past_its_deadline() -> None:
    async def main() -> None:
        scene = Scene(1)
        scene.grant(0)
        scene.own.end.set_exception(TimeoutError("the engine waited for its worker"))
        with pytest.raises(ExceptionGroup) as raised:
            await scene.dispatch.run()
        assert [str(error) for error in raised.value.exceptions] == ["the engine waited for its worker"]

    run_in_virtual_time(main())
