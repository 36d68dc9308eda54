"""Supervision: start the actors, hear them, notice their deaths and silences, and end the run on the first failure.

What is the same for every ring of actors lives here; what a run does with them is the controller's
(``actors/controller.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from streamrl import errors
from streamrl.errors import ActorDied, StreamRLError, WireError
from streamrl.runtime.actor import ActorSpec, State
from streamrl.runtime.membership import Member, Membership
from streamrl.runtime.messages import Failed, Message, Start, Stop, Tick, decode, encode
from streamrl.runtime.spawner import Exited
from streamrl.runtime.spawner_client import SpawnerClient
from streamrl.schema import Config

LAST_WORDS_S = 2.0
"""Seconds to wait for the ``Failed`` message of an actor whose exit was reported."""
LONGEST_WAIT_S = 60.0
"""Between two attempts to replace an actor that the run can spare."""
STACKS_GRACE_S = 1.0
"""Seconds that actors get to write their stacks before the watchdog ends the run."""

OnEvent = Callable[..., None]
"""``event(name, fields, actor, pid, host)``."""


class Supervisor(ABC):
    """One task set, one control socket, one failure channel (``_fail``): the first failure ends ``run``."""

    def __init__(
        self, config: Config, run_dir: Path, ipc_dir: str, event: OnEvent, on_change: Callable[[], None]
    ) -> None:
        self.config = config
        self.membership = Membership()
        self._run_dir = run_dir
        self._ipc_dir = ipc_dir
        self._event = event
        self._on_change = on_change
        self._model = ""
        self._endpoints: dict[str, str] = {}
        """Addresses of planes that chose their own, for the actors that start later."""
        self._started = False
        """All actors are ready and were told to start."""
        self._last_progress = time.monotonic()
        """When the run last came further: a step of the optimizer or of the preparation."""
        self._changed = asyncio.Event()
        """Set whenever something happened that a waiting phase may want to look at."""
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def _phases(self) -> None:
        """The run, from the first actor to the last."""

    @abstractmethod
    def _receive(self, member: Member, message: Message) -> None:
        """A message from a live actor."""

    @abstractmethod
    def _replaceable(self, kind: str) -> bool:
        """Whether a new process can take the place of a dead actor of this kind."""

    @abstractmethod
    def _spared(self, member: Member) -> bool:
        """Whether the run goes on without this dead actor, for as long as its replacements fail."""

    @abstractmethod
    async def _bereaved(self, member: Member) -> None:
        """A replaceable actor died; called before its replacement is started."""

    @abstractmethod
    async def _replaced(self, member: Member) -> None:
        """The replacement of an actor was told to start."""

    async def run(self) -> None:
        """The phases, from the first to the last; raises the first failure. Leaves no process behind."""
        context = zmq.asyncio.Context()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(f"ipc://{self._ipc_dir}/control")
        self._spawner = SpawnerClient(self._run_dir, self._ipc_dir, self._exited)
        background = [
            asyncio.create_task(self._guard(coroutine), name=coroutine.__name__)
            for coroutine in (self._listen, self._tick, self._spawner.listen)
        ]
        phases = asyncio.create_task(self._phases())
        try:
            await asyncio.wait({phases, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                self._failure.result()
            await phases
        finally:
            self._closing = True
            tasks = (phases, *background, *self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._socket.close()
            context.term()
            self._spawner.close()

    # Actors -----------------------------------------------------------------------------------------------------------

    async def _spawn(self, kind: str, name: str, index: int, incarnation: int = 0) -> Member:
        spec = ActorSpec(
            kind=kind, name=name, incarnation=incarnation, index=index, run_dir=str(self._run_dir),
            ipc_dir=self._ipc_dir, config=self.config, model=self._model, endpoints=self._endpoints,
        )  # fmt: skip
        member = self.membership.add(spec)
        await self._spawner.spawn(spec)
        return member

    def _exited(self, exited: Exited) -> None:
        member = self.membership.members[exited.name]
        if member.spec.incarnation != exited.incarnation:
            return
        member.alive = False
        member.state = State.STOPPED
        expected = exited.code == 0 and member.stopping
        event = "actor_stopped" if exited.code == 0 else "actor_lost"
        self._event(event, {"code": exited.code}, exited.name, exited.pid, member.host)
        if not expected and not self._closing:
            self._background(self._lost(member, exited.code))
        self._wake()

    async def _lost(self, member: Member, code: int) -> None:
        """Replace an actor that can be; end the run for any other, whose state cannot be rebuilt."""
        if member.spec.kind in ("rollouter", "engine") and member.stopping:
            return  # its work was done; the event says how it ended
        if code > 0:  # it left by itself: its last words come by another socket than the news of its death
            with contextlib.suppress(errors.DeadlineExceeded):
                await self._until(lambda: member.failure is not None, LAST_WORDS_S, "its last words")
        reason = member.failure.reason if member.failure else _describe_exit(code)
        replaceable = self._replaceable(member.spec.kind) and self._started and not _is_final(member.failure)
        if not replaceable:
            self._fail(_as_error(member, reason))
        elif self._spared(member):
            await asyncio.sleep(self.membership.wait_s(member.spec.name, LONGEST_WAIT_S))
            await self._replace(member)
        elif self.membership.charged >= self.config.liveness.max_restarts:
            self._fail(ActorDied(f"{member.spec.name} {reason}; gave up after {self.membership.charged} restarts"))
        else:
            self.membership.charged += 1
            await self._replace(member)

    async def _replace(self, member: Member) -> None:
        spec = member.spec
        await self._bereaved(member)
        replacement = await self._spawn(spec.kind, spec.name, spec.index, spec.incarnation + 1)
        try:
            await self._until(
                lambda: replacement.state is not State.STARTING or not replacement.alive,
                self.config.liveness.start_timeout_s, f"the replacement of {spec.name}",
            )  # fmt: skip
        except errors.DeadlineExceeded:
            if not self._spared(replacement):
                raise
            self._spawner.signal(spec.name, signal.SIGKILL)  # its end is the occasion for the next attempt
            return
        if replacement.alive and not replacement.stopping:  # the run may end just now
            self.membership.came_back(spec.name)
            fields = {"incarnation": replacement.spec.incarnation}
            self._event("actor_restarted", fields, spec.name, replacement.pid, replacement.host)
            await self._send(replacement, Start())
            await self._replaced(replacement)

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        """Own a task whose failure is the run's failure."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._background_done)

    def _background_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _until(self, condition: Callable[[], bool], timeout_s: float | None, what: str) -> None:
        """Wait for ``condition``, looked at after every event; ``DeadlineExceeded`` says what was missing."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise errors.DeadlineExceeded(
                f"waited {timeout_s:g} s for {what}; state: {self.membership.waits()}"
            ) from None

    # Messages ---------------------------------------------------------------------------------------------------------

    async def _send_to(self, name: str, message: Message) -> None:
        await self._send(self.membership.members[name], message)

    async def _send(self, member: Member, message: Message) -> None:
        member.stopping |= isinstance(message, Stop)
        if member.alive:
            await self._socket.send_multipart([member.spec.identity, encode(message)])

    async def _listen(self) -> None:
        while True:
            identity, frame = (await self._socket.recv_multipart())[:2]
            name = identity.decode(errors="replace").partition("#")[0]
            try:
                message = decode(frame)
            except WireError as error:
                self._event("malformed_frame", {"sender": name, "error": str(error)})
                continue
            member = self.membership.members.get(name)
            if member is not None and member.spec.identity == identity:
                self._receive(member, message)
                self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._on_change()

    # Watchdog ---------------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        liveness = self.config.liveness
        while True:
            await asyncio.sleep(liveness.heartbeat_s)
            for member in self.membership.live():
                await self._send(member, Tick())
            for member in self.membership.silent(liveness.actor_timeout_s):
                if member.pid:
                    self._event("actor_silent", {"seconds": liveness.actor_timeout_s}, member.spec.name)
                    self._spawner.signal(member.spec.name, signal.SIGUSR1)
                    self._spawner.signal(member.spec.name, signal.SIGKILL)
            if time.monotonic() - self._last_progress > liveness.no_progress_s:
                await self._no_progress()

    async def _no_progress(self) -> None:
        for member in self.membership.live():
            self._spawner.signal(member.spec.name, signal.SIGUSR1)  # stacks go to logs/<actor>.log
        await asyncio.sleep(STACKS_GRACE_S)
        raise errors.DeadlineExceeded(
            f"no progress for {self.config.liveness.no_progress_s:g} s: {self.membership.waits()}; "
            f"stacks are in {self._run_dir / 'logs'}"
        )

    async def _guard(self, coroutine: Callable[[], Any]) -> None:
        """A background task that ends, for whatever reason, ends the run."""
        try:
            await coroutine()
            self._fail(ActorDied(f"the controller's {coroutine.__name__} ended"))
        except Exception as error:  # noqa: BLE001 - the failure channel re-raises it
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)
            self._failure.add_done_callback(lambda future: future.exception())


def _describe_exit(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _is_final(failure: Failed | None) -> bool:
    """True for failures that a fresh process would meet again."""
    final = (errors.ConfigError, errors.EnvironmentFailed, errors.ParityError, errors.JournalError)
    return failure is not None and issubclass(_error_class(failure), final)


def _error_class(failure: Failed) -> type[Exception]:
    found = getattr(errors, failure.kind, ActorDied)
    return found if isinstance(found, type) and issubclass(found, StreamRLError) else ActorDied


def _as_error(member: Member, reason: str) -> Exception:
    if member.failure is None:
        return ActorDied(f"{member.spec.name} {reason} (see logs/{member.spec.name}.log)")
    kind = _error_class(member.failure)
    return kind(reason if kind is not ActorDied else f"{member.spec.name}: {reason}")
