"""One engine for many rollouters: requests come by socket, weights from this process.

``HostedEngine`` is what the weight plane drives; ``EngineServer`` is what rollouters talk to (``remote.py`` is their
end). A request survives an update; one whose connection is lost is asked anew by its rollouter. Whoever shares the
engine is told its version, and whether it is paused, the moment that changes.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from streamrl.buffers.queue.message_server import Asker, MessageServer, OnEvent, OnFatal
from streamrl.buffers.wire.engine_messages import EngineState, Generated, GenerateRequest, Watched, WatchRequest
from streamrl.buffers.wire.messages import Header, Refusal, Status, Withdraw
from streamrl.buffers.wire.payload import Payload
from streamrl.clock import Clock
from streamrl.errors import StreamRLError, WireError
from streamrl.ports import Engine, EngineFacts, EngineStatistics, StagesWeights, TellsDigests
from streamrl.types import Generation, SamplingParams

HELD = 1 << 16
"""Requests of all rollouters that may be here at once; further ones are refused (C4)."""

Work = Callable[[], Coroutine[Any, Any, None]]


class HostedEngine:
    """``ports.Engine`` that says when it pauses, resumes and has other weights: ``changed`` is called then."""

    def __init__(self, engine: Engine) -> None:
        self.paused = False
        self.changed: Callable[[], None] = lambda: None
        self._engine = engine

    @property
    def version(self) -> int:
        return self._engine.version

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        return await self._engine.generate(prompt_ids, params)

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        return await self._engine.score(token_ids, temperature)

    async def pause(self) -> None:
        self.paused = True
        self.changed()
        await self._engine.pause()

    async def resume(self) -> None:
        await self._engine.resume()
        self.paused = False
        self.changed()

    async def load(self, version: int, tensors: Mapping[str, object]) -> None:
        await self._engine.load(version, tensors)

    def statistics(self) -> EngineStatistics:
        return self._engine.statistics()

    def facts(self) -> EngineFacts:
        return self._engine.facts()

    async def close(self) -> None:
        await self._engine.close()


class HostedTelling(HostedEngine):
    """``HostedEngine`` of an engine that tells digests."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        assert isinstance(engine, TellsDigests)
        self._telling = engine

    async def digests(self) -> dict[str, int]:
        return await self._telling.digests()


class HostedStaging(HostedEngine):
    """``HostedEngine`` of an engine that stages weights."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        assert isinstance(engine, StagesWeights)
        self._staging = engine

    async def stage(self, version: int, tensors: Mapping[str, object]) -> None:
        await self._staging.stage(version, tensors)

    def unstage(self) -> None:
        self._staging.unstage()


class HostedTellingStaging(HostedTelling, HostedStaging):
    """``HostedEngine`` of an engine that does both."""


def hosted(engine: Engine) -> HostedEngine:
    """``engine`` to be shared, with every capability that it has."""
    match isinstance(engine, TellsDigests), isinstance(engine, StagesWeights):
        case True, True:
            return HostedTellingStaging(engine)
        case True, False:
            return HostedTelling(engine)
        case False, True:
            return HostedStaging(engine)
    return HostedEngine(engine)


class EngineServer(MessageServer):
    """Serves ``engine``, with ``slots`` sequences at once, from ``open`` on; requests that come before wait.

    What the engine raises, but for arguments that it refuses, ends ``run``: an engine that failed serves nobody.
    ``require_intact`` is called before each continuation is answered, and raises where its weights were overwritten.
    """

    def __init__(
        self, endpoint: str, engine: HostedEngine, slots: int, clock: Clock, on_event: OnEvent, on_fatal: OnFatal,
        *, require_intact: Callable[[], None], **link: Any,
    ) -> None:  # fmt: skip
        super().__init__(endpoint, clock, on_event, on_fatal, **link)
        self._engine = engine
        self._slots = slots
        self._require_intact = require_intact
        self._number = 1
        """Of the state that was last told."""
        self._opened = asyncio.Event()
        self._asked: asyncio.Queue[tuple[Asker, Work]] = asyncio.Queue(HELD)
        self._held: dict[Asker, asyncio.Task[None] | None] = {}
        """Requests that are not answered; without a task while they wait for ``open``."""
        self._watchers: dict[bytes, tuple[Asker, int]] = {}
        """Who wants to hear of the next state after the one that it names; one request each."""
        engine.changed = self._changed

    def open(self) -> None:
        """The engine has weights: take up what waits."""
        self._opened.set()
        self._changed()

    def forget(self, name: str) -> None:
        """This rollouter died: nobody waits for its requests any more."""
        for asker in [each for each in self._held if each.name == name]:
            self._withdraw(asker)

    def state(self) -> EngineState:
        counts = self._engine.statistics()
        return EngineState(
            number=self._number,
            version=self._engine.version,
            serving=self._opened.is_set(),
            paused=self._engine.paused,
            slots=self._slots,
            running=counts.running,
            waiting=counts.waiting,
            generated_tokens=counts.generated_tokens,
            prefilled_tokens=counts.prefilled_tokens,
            busy_s=counts.busy_s,
            kv_used=counts.kv_used,
            preemptions=counts.preemptions,
        )

    # Messages ---------------------------------------------------------------------------------------------------------

    def handle(self, asker: Asker, header: Header, payload: Payload) -> None:
        match body := header.body:
            case GenerateRequest():
                self._hold(asker, partial(self._generate, asker, body, tokens_of(payload)))
            case Withdraw():
                self._withdraw(asker._replace(request=body.request))
            case WatchRequest():
                self._watchers[asker.identity] = asker, body.seen
                self._tell()
            case _:
                raise WireError(f"expected a request to an engine, got {type(body).__name__}")

    def tasks(self) -> Iterable[Coroutine[Any, Any, None]]:
        return (self._serve(),)

    def _hold(self, asker: Asker, work: Work) -> None:
        if asker in self._held:
            return  # it came again by a new connection
        if max(len(self._held), self._asked.qsize()) >= HELD:  # what was withdrawn before ``open`` is in one of them
            raise StreamRLError(f"{HELD} requests wait for this engine already; lower engine.slots or rollouts")
        self._held[asker] = None
        self._asked.put_nowait((asker, work))

    def _withdraw(self, asker: Asker) -> None:
        if asker not in self._held:
            return  # its answer is on the way
        task = self._held.pop(asker)
        if task is not None:
            task.cancel()
        self.answer_soon(asker, Status("withdrawn"))

    async def _serve(self) -> None:
        await self._opened.wait()
        async with asyncio.TaskGroup() as tasks:
            while True:
                asker, work = await self._asked.get()
                if asker in self._held:
                    self._held[asker] = tasks.create_task(self._carry_out(asker, work))

    async def _carry_out(self, asker: Asker, work: Work) -> None:
        try:
            await work()
        except ValueError as error:  # a prompt or parameters that cannot be served are the sender's fault
            self.answer_soon(asker, Refusal(str(error), malformed=True))
        self._held.pop(asker, None)

    async def _generate(self, asker: Asker, body: GenerateRequest, prompt: np.ndarray) -> None:
        generation = await self._engine.generate(prompt.tolist(), params_of(body))
        self._require_intact()
        frame = np.asarray(generation.token_ids, dtype=np.int32).tobytes()
        frame += np.asarray(generation.logprobs, dtype=np.float32).tobytes()
        versions = [(int(version), int(count)) for version, count in generation.versions]
        self.answer_soon(asker, Generated(versions, generation.finish_reason, self.state()), [frame])

    # Watchers ---------------------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        self._number += 1
        self._tell()

    def _tell(self) -> None:
        due = [asker for asker, seen in self._watchers.values() if seen != self._number]
        if not due:
            return
        watched = Watched(self.state())
        for asker in due:
            del self._watchers[asker.identity]
            self.answer(asker, watched)  # one that is gone watches again when it is back


def request_of(params: SamplingParams) -> GenerateRequest:
    fields = dataclasses.asdict(params)
    return GenerateRequest(**fields | {name: list(fields[name]) for name in ("stop_token_ids", "stop_strings")})


def params_of(body: GenerateRequest) -> SamplingParams:
    fields = {field.name: getattr(body, field.name) for field in dataclasses.fields(SamplingParams)}
    return SamplingParams(**fields | {name: tuple(fields[name]) for name in ("stop_token_ids", "stop_strings")})


def tokens_of(payload: Payload) -> np.ndarray:
    """int32 ``[T]``. Raises ``WireError`` for bytes that are no such array."""
    if payload.nbytes % 4:
        raise WireError(f"token ids: expected a multiple of 4 bytes, got {payload.nbytes}")
    return np.frombuffer(b"".join(payload.frames), dtype=np.int32)
