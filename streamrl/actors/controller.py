"""The controller: what a run does with its actors, phase by phase, and what it makes of their reports.

Starting, watching and replacing them is ``runtime/supervisor.py``. The controller never touches trajectories or
weights, so it may be slow without slowing the ring.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from streamrl import errors
from streamrl.monitor.recorder import Recorder
from streamrl.monitor.tally import Tally
from streamrl.objective_checks import serves_reference, serves_start
from streamrl.parity import table
from streamrl.parity.gate import ParityGate
from streamrl.parity.records import Asked
from streamrl.parity.verdict import Verdict, summary_of
from streamrl.runtime.actor import State
from streamrl.runtime.membership import Member
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
    Probed,
    Progress,
    Ready,
    Scored,
    ScoreProbe,
    Start,
    Statistics,
    Stepped,
    Stop,
    Unresponsive,
)
from streamrl.runtime.supervisor import Supervisor
from streamrl.schema import Config
from streamrl.sharing import engine_holder, engine_hosts


class Controller(Supervisor):
    """One run, from spawning the actors to their last word."""

    def __init__(
        self, config: Config, run_dir: Path, ipc_dir: str, recorder: Recorder, on_change: Callable[[], None]
    ) -> None:
        super().__init__(config, run_dir, ipc_dir, recorder.event, on_change)
        self.tally = Tally(config)
        self._recorder = recorder
        self._gate = ParityGate(config)
        self._holder = engine_holder(config)
        """Kind of the actors that weights go to."""
        self._lost_holders: list[str] = []
        """Every rollouter that died, by the name of its leases."""

    # Phases -----------------------------------------------------------------------------------------------------------

    async def _phases(self) -> None:
        await self._prepare()
        await self._assemble()
        self._started = True
        self._last_progress = time.monotonic()
        self.tally.started()
        for member in self.membership.live():
            await self._send(member, Start())
        await self._membership_changed()
        await self._until(lambda: all(member.finished for member in self.membership.of("trainer")), None, "training")
        if self.config.eval.tasks:
            await self._until(lambda: self.tally.evaluated(self.config.steps), self.config.liveness.no_progress_s,
                              "the evaluation of the last version")  # fmt: skip
        self.record_pending()
        await self._drain()

    async def _prepare(self) -> None:
        """Build or find the initial checkpoint, in a process of its own."""
        preparer = await self._spawn("preparer", "preparer", 0)
        start_s = self.config.liveness.start_timeout_s
        await self._until(lambda: preparer.state is not State.STARTING, start_s, "the preparer to start")
        await self._send(preparer, Start())
        # A warm-up may take long; the watchdog ends one that stands still.
        await self._until(lambda: preparer.finished, None, "the initial model")
        self.tally.progress = None
        await self._send(preparer, Stop())
        await self._until(lambda: not preparer.alive, self.config.liveness.drain_timeout_s, "the preparer to end")

    async def _assemble(self) -> None:
        services = [await self._spawn("reference", "reference", 0)] if serves_reference(self.config) else []
        services += [await self._spawn("scorer", "scorer", 0)] if self.config.reward_model.name else []
        services += [await self._spawn("engine", f"engine-{i}", i) for i in range(engine_hosts(self.config))]
        await self._start_queue()
        await self._until_ready(services)  # as the queue: before whoever talks to them
        self._endpoints |= {member.spec.name: member.endpoint for member in services}
        for rank in range(self.config.trainers):
            await self._spawn("trainer", f"trainer-{rank}", rank)
        for index in range(self.config.rollouts):
            await self._spawn("rollouter", f"rollouter-{index}", index)
        if self.config.eval.tasks:
            await self._spawn("evaluator", "evaluator", 0)
        await self._until(self.membership.all_ready, self.config.liveness.start_timeout_s, "all actors to be ready")

    async def _start_queue(self) -> None:
        """Stores and buffer come before whoever talks to them: a tcp port is known once it is bound."""
        shards = self.config.buffer.shards
        stores = [await self._spawn("store", f"store-{i}", i) for i in range(shards)] if shards > 1 else []
        await self._until_ready(stores)
        self._endpoints = {member.spec.name: member.endpoint for member in stores}
        buffer = await self._spawn("buffer", "buffer", 0)
        await self._until_ready([buffer])
        self._endpoints |= {"queue": buffer.endpoint}

    async def _until_ready(self, members: list[Member]) -> None:
        names = ", ".join(member.spec.name for member in members)
        await self._until(
            lambda: all(member.state is not State.STARTING for member in members),
            self.config.liveness.start_timeout_s,
            f"{names} to be ready",
        )

    async def _drain(self) -> None:
        """Producers first, the buffer last: its final statistics then count everything."""
        for kinds in (
            ("rollouter", "evaluator", "trainer"), ("buffer",), ("store", "reference", "scorer", "engine"),
        ):  # fmt: skip
            members = [member for member in self.membership.live() if member.spec.kind in kinds]
            for member in members:
                await self._send(member, Stop())
            await self._until(
                partial(_all_ended, members),
                self.config.liveness.drain_timeout_s,
                f"{' and '.join(kinds)} to stop",
            )

    # Members ----------------------------------------------------------------------------------------------------------

    def _replaceable(self, kind: str) -> bool:
        stateless = ("rollouter", "engine", "reference", "scorer")
        return kind in stateless or (kind in ("buffer", "store") and self.config.buffer.journal)

    def _spared(self, member: Member) -> bool:
        """A server that somebody else started comes back when it likes, while others sample.

        Before the parity gate's verdict nobody does: the gate waits for the report of each engine.
        """
        if not self.config.engine.urls or member.spec.kind != "engine" or self.tally.verdict is None:
            return False
        return any(each.state is not State.STARTING for each in self.membership.live("engine"))

    async def _bereaved(self, member: Member) -> None:
        if member.spec.kind == "rollouter":
            self._lost_holders.append(member.spec.holder)
            await self._send_to("buffer", HolderLost(holder=member.spec.holder))
            for engine in self.membership.live("engine"):
                await self._send(engine, HolderLost(holder=member.spec.holder))
        if member.spec.kind == self._holder:
            await self._membership_changed()

    async def _replaced(self, member: Member) -> None:
        if member.spec.kind == self._holder:
            await self._membership_changed()
        if member.spec.kind == "buffer":  # it may have been dead when it should have heard of them
            for holder in self._lost_holders:
                await self._send_to("buffer", HolderLost(holder=holder))

    async def _membership_changed(self) -> None:
        rollouters = [m.spec.name for m in self.membership.live(self._holder) if m.state is not State.STARTING]
        observers = [m.spec.name for m in self.membership.live("evaluator")]
        await self._send_to("trainer-0", Members(rollouters=rollouters, observers=observers))

    # Messages ---------------------------------------------------------------------------------------------------------

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
                member.endpoint = message.info.get("endpoint", "")
                self._recorder.event("actor_ready", message.info, name, pid, host)
            case Event():
                self.tally.event(message.event, message.fields)
                self._recorder.event(message.event, message.fields, name, pid, host)
            case Progress():
                self._last_progress = time.monotonic()
                self.tally.progress = message
            case Stepped():
                self._stepped(message)
            case Evaluated():
                self.tally.evaluation(message)
                self._recorder.event(
                    "evaluated", {"version": message.version, "accuracy": message.accuracy}, name, pid, host
                )
            case Probed():
                self._gate.add(name, message.report)
                if (rows := self._gate.ask(self._probed_engines())) is not None:
                    self._ask_trainers(rows)
            case Scored():
                match self._gate.answer(message.report):
                    case Verdict() as verdict:
                        self._judged(verdict)
                    case rows:
                        self._ask_trainers(rows)
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
        self.record_pending()
        self.tally.step(message, self.membership, time.monotonic() - self._recorder.started)

    def _probed_engines(self) -> list[str]:
        """Whose log-probs the parity gate compares with the trainer's."""
        engines = self.membership.of(self._holder)
        if serves_start(self.config):
            engines += self.membership.of("reference")
        return [member.spec.name for member in engines]

    def _ask_trainers(self, rows: list[Asked]) -> None:
        for member in self.membership.of("trainer"):
            self._background(self._send(member, ScoreProbe(rows=rows)))

    def _judged(self, verdict: Verdict) -> None:
        """Open the queue once trainer and engines agree on version 0, or end the run (C7)."""
        self.tally.verdict = verdict
        for gate, numbers in summary_of(verdict).items():
            self._recorder.event(f"gate_{numbers['verdict']}", {"gate": gate, **numbers})
        if not verdict.passed and self.config.parity.name == "gate":
            self._fail(errors.ParityError(table.reason(verdict)))
        else:
            self._open_queue()

    def _open_queue(self) -> None:
        for member in self.membership.of("trainer"):
            self._background(self._send(member, GatePassed()))

    def record_pending(self) -> None:
        """Write the newest step; it was held back for an evaluation of its version."""
        line = self.tally.take_line()
        if line is not None:
            self._recorder.metrics(line)


def _all_ended(members: list[Member]) -> bool:
    return not any(member.alive for member in members)
