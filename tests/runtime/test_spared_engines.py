"""A server of ``engine.urls`` that died: the run goes on with the others, and with it when it is back."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from streamrl.actors.controller import Controller
from streamrl.config import load_config
from streamrl.errors import ActorDied, ConfigError, DeadlineExceeded
from streamrl.monitor.recorder import Recorder
from streamrl.parity.verdict import Verdict
from streamrl.runtime import supervisor
from streamrl.runtime.actor import ActorSpec, State
from streamrl.runtime.membership import Member, Membership
from streamrl.runtime.messages import Failed, Message
from streamrl.runtime.spawner import Exited

DIED = 1
"""Exit code."""
HANGS = TimeoutError("it never answers")
"""Of a replacement that neither comes to work nor ends by itself."""


class Ring(Controller):
    """A started run of two engines, whose replacements end as the test says instead of being started."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        urls = "engine.urls=[http://127.0.0.1:1,http://127.0.0.1:2]"
        config = load_config(overrides=["engine=sglang", urls, "liveness.max_restarts=2", "wandb=disabled", *overrides])
        super().__init__(config, folder, str(folder), Recorder(folder, config), lambda: None)
        self._started = True
        self.tally.verdict = Verdict([], [], {})
        self._spawner = self  # type: ignore[assignment]
        self.replacements: list[Exception | None] = []
        """Why the next ones end; None for one that comes to work."""
        self.attempts: list[str] = []
        for index in range(2):
            name = f"engine-{index}"
            self.membership.add(self.spec(name, index, 0)).state = State.READY

    def spec(self, name: str, index: int, incarnation: int) -> ActorSpec:
        return ActorSpec(kind="engine", name=name, incarnation=incarnation, index=index, run_dir="", ipc_dir="",
                         config=self.config)  # fmt: skip

    async def _spawn(self, kind: str, name: str, index: int, incarnation: int = 0) -> Member:
        member = self.membership.add(self.spec(name, index, incarnation))
        self.attempts.append(name)
        if (error := self.replacements.pop(0)) is None:
            member.state = State.READY
        elif error is not HANGS:
            member.failure = Failed(kind=type(error).__name__, reason=str(error), traceback="")
            self.dies(name)
        return member

    def dies(self, name: str) -> None:
        member = self.membership.members[name]
        member.failure = member.failure or Failed(kind="ActorDied", reason="gone", traceback="")
        self._exited(Exited(name=name, incarnation=member.spec.incarnation, pid=1, code=DIED))

    def signal(self, name: str, number: int) -> None:
        """The spawner's."""
        assert number == signal.SIGKILL
        self.dies(name)

    async def _send(self, member: Member, message: Message) -> None:
        pass

    async def _membership_changed(self) -> None:
        pass


def unreachable() -> ActorDied:
    return ActorDied("SGLang at http://127.0.0.1:1 cannot be reached")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LONGEST_WAIT_S", 0.0)
    monkeypatch.setattr(supervisor, "LAST_WORDS_S", 0.0)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario, 30)

    asyncio.run(bounded())


async def settle(ring: Ring) -> None:
    while ring._tasks:
        await asyncio.gather(*ring._tasks, return_exceptions=True)


def test_a_server_is_sought_as_often_as_it_takes_while_another_one_serves(tmp_path: Path) -> None:
    async def scenario() -> None:
        ring = Ring(tmp_path)
        ring.replacements = [unreachable() for _ in range(7)] + [None]
        ring.dies("engine-0")
        await settle(ring)
        assert not ring._failure.done()
        assert ring.attempts == ["engine-0"] * 8
        assert (ring.membership.restarts, ring.membership.charged) == (1, 0)
        assert [member.spec.name for member in ring.membership.live("engine")] == ["engine-0", "engine-1"]

    run(scenario())


def test_the_run_ends_when_no_server_is_left_and_none_comes_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        ring = Ring(tmp_path)
        ring.membership.members["engine-1"].alive = False
        ring.replacements = [unreachable() for _ in range(9)]
        ring.dies("engine-0")
        with pytest.raises(ActorDied, match="engine-0 SGLang .* cannot be reached; gave up after 2 restarts"):
            await ring._failure
        assert ring.attempts == ["engine-0"] * 2
        await settle(ring)

    run(scenario())


def test_a_server_that_is_just_being_taken_over_does_not_spare_another_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        ring = Ring(tmp_path)
        ring.membership.members["engine-0"].alive = False
        assert ring._spared(ring.membership.members["engine-0"])
        ring.membership.members["engine-1"].state = State.STARTING
        assert not ring._spared(ring.membership.members["engine-0"])

    run(scenario())


def test_before_the_gates_verdict_which_waits_for_every_engine_none_is_spared(tmp_path: Path) -> None:
    async def scenario() -> None:
        ring = Ring(tmp_path)
        ring.tally.verdict = None
        ring.replacements = [unreachable() for _ in range(9)]
        ring.dies("engine-0")
        with pytest.raises(ActorDied, match="gave up after 2 restarts"):
            await ring._failure
        await settle(ring)

    run(scenario())


def test_a_server_that_is_there_and_says_nothing_is_left_and_sought_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        ring = Ring(tmp_path)
        ring.config.liveness.start_timeout_s = 0.0
        ring.replacements = [HANGS, HANGS, None]
        ring.dies("engine-0")
        await settle(ring)
        assert not ring._failure.done()
        assert (ring.attempts, ring.membership.charged) == (["engine-0"] * 3, 0)
        assert len(ring.membership.live("engine")) == 2

    run(scenario())


def test_a_server_that_says_nothing_ends_the_run_where_no_other_serves(tmp_path: Path) -> None:
    async def scenario() -> None:
        ring = Ring(tmp_path)
        ring.config.liveness.start_timeout_s = 0.0
        ring.membership.members["engine-1"].alive = False
        ring.replacements = [HANGS]
        ring.dies("engine-0")
        with pytest.raises(DeadlineExceeded, match="the replacement of engine-0"):
            await ring._failure
        await settle(ring)

    run(scenario())


def test_a_server_that_came_back_unfit_for_the_run_ends_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        ring = Ring(tmp_path)
        ring.replacements = [ConfigError("its --dtype is another one")]
        ring.dies("engine-0")
        with pytest.raises(ConfigError, match="another one"):
            await ring._failure
        await settle(ring)

    run(scenario())


def test_an_engine_of_the_run_itself_counts_to_the_limit(tmp_path: Path) -> None:
    async def scenario() -> None:
        ring = Ring(tmp_path, "engine.urls=[]", "rollouters_per_engine=2", "rollouts=4")
        ring.replacements = [unreachable() for _ in range(9)]
        ring.dies("engine-0")
        with pytest.raises(ActorDied, match="gave up after 2 restarts"):
            await ring._failure
        await settle(ring)

    run(scenario())


def test_the_waits_between_attempts_double_up_to_the_longest_and_begin_anew_after_a_success() -> None:
    membership = Membership()
    assert [membership.wait_s("engine-0", 10.0) for _ in range(7)] == [0, 1, 2, 4, 8, 10, 10]
    assert membership.wait_s("engine-1", 10.0) == 0
    membership.came_back("engine-0")
    assert membership.wait_s("engine-0", 10.0) == 0
