"""The receiving side of the weight sync in whoever holds an engine (C5, C6, C7).

A version is staged in this host's memory and every bucket verified while the engine generates on; with
``sync.stage=device`` the engine also brings it to where it computes. Only the commit stops the engine: pause, load,
resume. Nothing resumes on half-loaded weights: an engine that refuses the tensors before the
first copy resumes on the old ones, everything else ends the process. Where the trainer's scores of the canary came with
the commit, the engine scores it too, and says so when it does not agree.

An engine may serve from the memory in which its version arrived. A member that the publisher has given up may still
live when that memory gets another version: ``require_intact`` is asked before tokens are handed out, and at each pause.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from streamrl.errors import ConfigError, WeightSyncError
from streamrl.ports import Engine, StagesWeights
from streamrl.sync import messages as wire
from streamrl.sync.arrival import Arrival
from streamrl.sync.link import Link, OnEvent, same
from streamrl.sync.staging import Tensors

BeforeFirst = Callable[[Tensors], Awaitable[None]]


@dataclass(frozen=True)
class Judgement:
    """What a canary says of the version that an engine serves."""

    rms: float
    """Root mean square of engine minus trainer, nats."""
    reason: str = ""
    """Why the version must not serve; empty: it may."""


class Canary(Protocol):
    """A fixed probe, scored by trainer and engine."""

    async def judge(self, engine: Engine, scores: list[float], sent: Tensors) -> Judgement:
        """``scores``: the trainer's; ``sent``: the tensors that the engine was given."""
        ...


@dataclass(frozen=True)
class _Staged:
    """A version that waits for Commit."""

    arrival: Arrival
    tensors: Tensors | None
    """Verified; None: they are brought in while the engine stands still."""


class Subscriber:
    """Keeps one engine on the publisher's newest version. ``run`` is a task of the rollouter's TaskGroup.

    ``stage``: ``host`` (verified in host memory before the engine is paused), ``device`` (and copied by the engine as
    well: ``ConfigError`` for one that cannot), or ``none`` (all of it in the pause).
    """

    def __init__(
        self,
        endpoint: str,
        name: str,
        engine: Engine,
        on_event: OnEvent,
        *,
        before_first: BeforeFirst | None = None,
        canary: Canary | None = None,
        stage: str = "host",
        timeout_s: float = 60.0,
    ) -> None:
        """``before_first`` is called with the tensors of version 0 before the engine is paused for them."""
        self.version = -1
        """The version that the engine serves."""
        self.committed = asyncio.Event()
        """Set once the engine serves a version."""
        self._engine = engine
        self._on_event = on_event
        self._before_first = before_first
        self._canary = canary
        self._ahead = stage != "none"
        self._stager = _stager(engine) if stage == "device" else None
        self._link = Link(endpoint, name, timeout_s, on_event)
        self._staged: _Staged | None = None
        self._serving: Arrival | None = None
        """The version that the engine was given last."""
        self._last: wire.Committed | wire.Rejected | None = None
        """The answer to the last Commit that was carried out, for the case that it is asked for again."""
        self._changed = asyncio.Condition()

    @property
    def malformed_frames(self) -> int:
        return self._link.malformed_frames

    async def run(self) -> None:
        """Follow the publisher until cancelled.

        Raises (in an ``ExceptionGroup``) ``WeightSyncError`` when the memory was overwritten while the engine loaded
        it or served from it, and whatever else the engine raises; its process must be restarted then.
        """
        try:
            await self._link.run(self._handle)
        finally:
            self._drop()
            if self._serving is not None and self._serving.intact():  # else ``require_intact`` still has to say so
                self._serving = None

    def require_intact(self) -> None:
        """Raise ``WeightSyncError`` where tokens sampled by now may come from overwritten memory.

        Sampled since the last commit, that is: the commit itself looks after those of the version before it.
        """
        if self._serving is not None and not self._serving.intact():
            raise WeightSyncError(
                f"version {self._serving.stage.version}, which this engine serves, was overwritten by a later one: "
                "this member was given up, and what it sampled must not be trained on"
            )

    async def wait_version(self, version: int) -> None:
        """Return once the engine serves ``version`` or a newer one. Ended by cancellation."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.version >= version)

    async def _handle(self, message: wire.Stage | wire.Commit | wire.Discard) -> None:
        match message:
            case wire.Stage():
                await self._stage(message)
            case wire.Commit():
                await self._commit(message)
            case wire.Discard():
                if self._staged and same(self._staged.arrival.stage, message):
                    self._drop()
                await self._link.discard(message)

    async def _stage(self, stage: wire.Stage) -> None:
        known = (self._staged and same(self._staged.arrival.stage, stage)) or (self._last and same(self._last, stage))
        if known:
            await self._link.send(wire.Staged(session=stage.session, update=stage.update))
        else:
            self._drop()
            if self._serving is not None and self._serving.overwritten_by(stage):
                raise WeightSyncError(
                    f"version {stage.version} would overwrite version {self._serving.stage.version}, which this engine "
                    "serves: it missed a version and must be restarted"
                )
            await self._link.begin(stage, self._take_in)

    async def _take_in(self, arrival: Arrival) -> None:
        if self._ahead:
            tensors = await self._link.take_in(arrival)
            if self._stager is not None:
                await self._to_device(self._stager, arrival, tensors)
            self._staged = _Staged(arrival, tensors)
        else:
            await arrival.announced()
            self._staged = _Staged(arrival, None)
        await self._link.send(wire.Staged(session=arrival.stage.session, update=arrival.stage.update))

    async def _to_device(self, stager: StagesWeights, arrival: Arrival, tensors: Tensors) -> None:
        """Raises ``WeightSyncError`` where the engine refused the tensors, or they were overwritten meanwhile."""
        version = arrival.stage.version
        await stager.stage(version, tensors)
        if not arrival.intact():
            stager.unstage()
            raise WeightSyncError(f"version {version} was overwritten while the engine staged it")

    def _drop(self) -> None:
        """Forget what is staged, here and in the engine."""
        self._staged = None
        if self._stager is not None:
            self._stager.unstage()

    async def _commit(self, commit: wire.Commit) -> None:
        if self._last and same(self._last, commit):
            await self._link.send(self._last)
            return
        staged, self._staged = self._staged, None
        if staged is None or not same(staged.arrival.stage, commit):
            self._drop()
            reason = f"update {commit.update} is not staged here"
            await self._link.send(wire.CommitFailed(session=commit.session, update=commit.update, reason=reason))
            return
        version = staged.arrival.stage.version
        try:
            tensors, pause_seconds = await self._load(staged)
        except _Refusal as refusal:
            self._drop()
            self._on_event("version_failed", {"version": version, "reason": str(refusal)})
            failed = wire.CommitFailed(session=commit.session, update=commit.update, reason=str(refusal))
            await self._link.send(failed)
            return
        self._last = await self._judged(commit, tensors, version, pause_seconds)
        await self._link.send(self._last)
        await self._serve(version)

    async def _load(self, staged: _Staged) -> tuple[Tensors, float]:
        """The tensors that serve now, and the seconds from the call of ``pause`` to the end of ``resume``.

        Raises ``_Refusal`` when they could not be had or the engine refused them, and the old weights serve on.
        """
        version = staged.arrival.stage.version
        try:
            if self._before_first is not None and self.version == -1 and version == 0:
                staged = _Staged(staged.arrival, await self._brought(staged))
                await self._before_first(await self._brought(staged))
        except WeightSyncError as error:
            raise _Refusal(str(error)) from error
        started = time.monotonic()
        await self._engine.pause()
        self.require_intact()
        try:
            tensors = await self._brought(staged)
            await self._engine.load(version, tensors)
        except WeightSyncError as error:
            await self._engine.resume()
            raise _Refusal(str(error)) from error
        if not staged.arrival.intact():
            raise WeightSyncError(
                f"version {version} was overwritten while the engine loaded it; the engine stays paused"
            )
        self._serving = staged.arrival
        await self._engine.resume()
        return tensors, time.monotonic() - started

    async def _brought(self, staged: _Staged) -> Tensors:
        return staged.tensors or await self._link.take_in(staged.arrival)

    async def _judged(
        self, commit: wire.Commit, tensors: Tensors, version: int, pause_seconds: float
    ) -> wire.Committed | wire.Rejected:
        """The answer to a Commit that was carried out."""
        judgement = Judgement(0.0)
        if self._canary is not None and commit.scores:
            judgement = await self._canary.judge(self._engine, commit.scores, tensors)
        fields = {"version": version, "pause_seconds": pause_seconds, "canary_rms": judgement.rms}
        if judgement.reason:
            self._on_event("version_rejected", fields | {"reason": judgement.reason})
            return wire.Rejected(
                session=commit.session,
                update=commit.update,
                pause_seconds=pause_seconds,
                canary_rms=judgement.rms,
                reason=judgement.reason,
            )
        self._on_event("version_committed", fields)
        return wire.Committed(
            session=commit.session, update=commit.update, pause_seconds=pause_seconds, canary_rms=judgement.rms
        )

    async def _serve(self, version: int) -> None:
        async with self._changed:
            self.version = version
            self.committed.set()
            self._changed.notify_all()


def _stager(engine: Engine) -> StagesWeights:
    """``engine``, which has to be able to stage; ``ConfigError`` otherwise."""
    if not isinstance(engine, StagesWeights):
        raise ConfigError(
            f"sync.stage=device: {type(engine).__name__} takes weights only while it is paused; set sync.stage=host"
        )
    return engine


class _Refusal(Exception):
    """The engine refused a version before the first copy."""
