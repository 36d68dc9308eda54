"""The controller: starts the actors, watches over them, gathers what they report, and decides how the run ends.

One asyncio task group; one failure channel (``_fail``): whatever goes wrong ends ``run`` with the first reason.
It never touches trajectories or weights, so it may be slow without slowing the ring.
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from streamrl import errors
from streamrl.actors.probe import ParityGate
from streamrl.errors import ActorDied, StreamRLError, WireError
from streamrl.monitor.recorder import Recorder
from streamrl.monitor.tally import Tally
from streamrl.runtime.actor import ActorSpec, State
from streamrl.runtime.membership import Member, Membership
from streamrl.runtime.messages import (
    Evaluated,
    Event,
    Failed,
    Finished,
    GatePassed,
    Heartbeat,
    Hello,
    HolderLost,
    Members,
    Message,
    Progress,
    Ready,
    Scored,
    Start,
    Statistics,
    Stepped,
    Stop,
    Tick,
    Unresponsive,
    decode,
    encode,
)
from streamrl.runtime.spawner import Exited
from streamrl.runtime.spawner_client import SpawnerClient
from streamrl.schema import Config

STACKS_GRACE_S = 1.0
"""Seconds that actors get to write their stacks before the watchdog ends the run."""


class Controller:
    """One run, from spawning the actors to their last word."""

    def __init__(
        self, config: Config, run_dir: Path, ipc_dir: str, recorder: Recorder, on_change: Callable[[], None]
    ) -> None:
        self.config = config
        self.membership = Membership()
        self.tally = Tally(config)
        self._run_dir = run_dir
        self._ipc_dir = ipc_dir
        self._recorder = recorder
        self._on_change = on_change
        self._model = ""
        self._started = False
        self._changed = asyncio.Event()
        """Set whenever something happened that a waiting phase may want to look at."""
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._last_progress = time.monotonic()
        self._closing = False
        self._gate = ParityGate(config.model.dtype)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Train until the last step is evaluated; raises the first failure. Leaves no process behind."""
        context = zmq.asyncio.Context()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a replacement takes over the identity of the dead
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

    # Phases -----------------------------------------------------------------------------------------------------------

    async def _phases(self) -> None:
        await self._prepare()
        await self._assemble()
        self._started = True
        self._last_progress = time.monotonic()
        self.tally.started()
        for member in self.membership.live():
            await self._send(member, Start())
        await self._announce_members()
        await self._until(lambda: all(member.finished for member in self.membership.of("trainer")), None, "training")
        if self.config.eval.tasks:
            await self._until(lambda: self.tally.evaluated(self.config.steps), self.config.liveness.no_progress_s,
                              "the evaluation of the last version")  # fmt: skip
        self._record_pending()
        await self._drain()

    async def _prepare(self) -> None:
        """Build or find the initial checkpoint, in a process of its own."""
        preparer = await self._spawn("preparer", "preparer", 0)
        await self._until(lambda: preparer.state is not State.STARTING, None, "the initial model")
        await self._send(preparer, Start())
        await self._until(lambda: preparer.finished, self.config.liveness.start_timeout_s, "the initial model")
        self.tally.progress = None
        await self._send(preparer, Stop())
        await self._until(lambda: not preparer.alive, self.config.liveness.drain_timeout_s, "the preparer to end")

    async def _assemble(self) -> None:
        await self._spawn("buffer", "buffer", 0)
        for rank in range(self.config.trainers):
            await self._spawn("trainer", f"trainer-{rank}", rank)
        for index in range(self.config.rollouts):
            await self._spawn("rollouter", f"rollouter-{index}", index)
        if self.config.eval.tasks:
            await self._spawn("evaluator", "evaluator", 0)
        await self._until(self.membership.all_ready, self.config.liveness.start_timeout_s, "all actors to be ready")

    async def _drain(self) -> None:
        """Producers first, the buffer last: its final statistics then count everything."""
        for kinds in (("rollouter", "evaluator", "trainer"), ("buffer",)):
            members = [member for member in self.membership.live() if member.spec.kind in kinds]
            for member in members:
                await self._send(member, Stop())
            await self._until(
                lambda members=members: not any(member.alive for member in members),  # type: ignore[misc]
                self.config.liveness.drain_timeout_s,
                f"{' and '.join(kinds)} to stop",
            )

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

    # Actors -----------------------------------------------------------------------------------------------------------

    async def _spawn(self, kind: str, name: str, index: int, incarnation: int = 0) -> Member:
        spec = ActorSpec(
            kind=kind, name=name, incarnation=incarnation, index=index, run_dir=str(self._run_dir),
            ipc_dir=self._ipc_dir, config=self.config, model=self._model,
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
        self._recorder.event(event, {"code": exited.code}, exited.name, exited.pid, member.host)
        if not expected and not self._closing:
            self._lost(member, exited.code)
        self._wake()

    def _lost(self, member: Member, code: int) -> None:
        """Replace a rollouter; end the run for any other actor, whose state cannot be rebuilt."""
        reason = member.failure.reason if member.failure else _describe_exit(code)
        replaceable = member.spec.kind == "rollouter" and self._started and not _is_final(member.failure)
        if not replaceable:
            self._fail(_as_error(member, reason))
        elif self.membership.restarts >= self.config.liveness.max_restarts:
            self._fail(ActorDied(f"{member.spec.name} {reason}; gave up after {self.membership.restarts} restarts"))
        else:
            self.membership.restarts += 1
            self._background(self._replace(member))

    async def _replace(self, member: Member) -> None:
        spec = member.spec
        await self._send_to("buffer", HolderLost(holder=spec.name))
        await self._announce_members()
        replacement = await self._spawn(spec.kind, spec.name, spec.index, spec.incarnation + 1)
        await self._until(
            lambda: replacement.state is not State.STARTING or not replacement.alive,
            self.config.liveness.start_timeout_s, f"the replacement of {spec.name}",
        )  # fmt: skip
        if replacement.alive:
            self._recorder.event("actor_restarted", {"incarnation": replacement.spec.incarnation}, spec.name,
                                 replacement.pid, replacement.host)  # fmt: skip
            await self._send(replacement, Start())
            await self._announce_members()

    def _background(self, work: Any) -> None:
        """Own a task whose failure is the run's failure."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._background_done)

    def _background_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _announce_members(self) -> None:
        rollouters = [m.spec.name for m in self.membership.live("rollouter") if m.state is not State.STARTING]
        observers = [m.spec.name for m in self.membership.live("evaluator")]
        await self._send_to("trainer-0", Members(rollouters=rollouters, observers=observers))

    async def _send_to(self, name: str, message: Message) -> None:
        await self._send(self.membership.members[name], message)

    async def _send(self, member: Member, message: Message) -> None:
        member.stopping |= isinstance(message, Stop)
        if member.alive:
            await self._socket.send_multipart([member.spec.name.encode(), encode(message)])

    # Messages ---------------------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        while True:
            identity, frame = (await self._socket.recv_multipart())[:2]
            name = identity.decode(errors="replace")
            try:
                message = decode(frame)
            except WireError as error:
                self._recorder.event("malformed_frame", {"sender": name, "error": str(error)})
                continue
            member = self.membership.members.get(name)
            if member is not None:
                self._receive(member, message)
                self._wake()

    def _receive(self, member: Member, message: Message) -> None:
        name, pid, host = member.spec.name, member.pid, member.host
        match message:
            case Heartbeat():
                member.beat(message)
                if member.spec.kind == "buffer" and message.gauges:
                    self.tally.statistics(message.gauges)
            case Hello():
                member.pid, member.host, member.last_seen = message.pid, message.host, time.monotonic()
                self._recorder.event("actor_started", {"incarnation": member.spec.incarnation}, name, message.pid,
                                     message.host)  # fmt: skip
            case Ready():
                member.state = State.READY
                self._recorder.event("actor_ready", message.info, name, pid, host)
            case Event():
                self._recorder.event(message.event, message.fields, name, pid, host)
            case Progress():
                self.tally.progress = message
            case Stepped():
                self._stepped(message)
            case Evaluated():
                self.tally.evaluation(message)
                self._recorder.event(
                    "evaluated", {"version": message.version, "accuracy": message.accuracy}, name, pid, host
                )
            case Scored():
                self._scored(member, message)
            case Unresponsive():
                self._recorder.event("rollouter_unresponsive", {"waited_for": message.waited_for}, message.member)
                self._spawner.signal(message.member, signal.SIGKILL)
            case Statistics():
                self.tally.statistics(message.values)
            case Finished():
                member.finished = True
                self._model = message.result.get("model", self._model)
            case Failed():
                member.failure = message
                self._recorder.event(
                    "actor_failed", {"reason": message.reason, "traceback": message.traceback}, name, pid, host
                )
            case _:
                self._recorder.event("malformed_frame", {"sender": name, "error": f"unexpected {type(message)}"})

    def _stepped(self, message: Stepped) -> None:
        self._last_progress = time.monotonic()
        self._record_pending()
        self.tally.step(message, self.membership, time.monotonic() - self._recorder.started)

    def _scored(self, member: Member, message: Scored) -> None:
        """Open the queue once trainer and engines agree on version 0, or end the run (C7)."""
        verdict = self._gate.add(member.spec.name, message, [m.spec.name for m in self.membership.of("rollouter")])
        if verdict is None:
            return
        numbers = dataclasses.asdict(verdict)
        self.tally.parity = {"numerics": numbers}
        self._recorder.event("gate_passed" if verdict.passed else "gate_failed", {"gate": "numerics"} | numbers)
        if verdict.passed:
            self._background(self._send_to("trainer-0", GatePassed()))
            return
        self._fail(
            errors.ParityError(
                f"parity gate numerics: engine and trainer log-probs differ by rms {verdict.rms:.2e} on the probe, "
                f"model.dtype={self.config.model.dtype} allows {verdict.limit:.0e}; not training on wrong log-probs"
            )
        )

    def _record_pending(self) -> None:
        """Write the newest step; it was held back for an evaluation of its version."""
        line = self.tally.take_line()
        if line is not None:
            self._recorder.metrics(line)

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
                    self._recorder.event("actor_silent", {"seconds": liveness.actor_timeout_s}, member.spec.name)
                    self._spawner.signal(member.spec.name, signal.SIGUSR1)
                    self._spawner.signal(member.spec.name, signal.SIGKILL)
            if self._started and time.monotonic() - self._last_progress > liveness.no_progress_s:
                await self._no_progress()

    async def _no_progress(self) -> None:
        for member in self.membership.live():
            self._spawner.signal(member.spec.name, signal.SIGUSR1)  # stacks go to logs/<actor>.log
        await asyncio.sleep(STACKS_GRACE_S)
        raise errors.DeadlineExceeded(
            f"no optimizer step for {self.config.liveness.no_progress_s:g} s: {self.membership.waits()}; "
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
    final = (errors.ConfigError, errors.EnvironmentFailed, errors.ParityError)
    return failure is not None and issubclass(_error_class(failure), final)


def _error_class(failure: Failed) -> type[Exception]:
    found = getattr(errors, failure.kind, ActorDied)
    return found if isinstance(found, type) and issubclass(found, StreamRLError) else ActorDied


def _as_error(member: Member, reason: str) -> Exception:
    if member.failure is None:
        return ActorDied(f"{member.spec.name} {reason} (see logs/{member.spec.name}.log)")
    kind = _error_class(member.failure)
    return kind(reason if kind is not ActorDied else f"{member.spec.name}: {reason}")
