"""The reference policy in an engine of its own (``loss.kl.serve=engine``): rollouters ask it, trainers hold no copy.

Consumes groups, before they are put; produces their column ``reference``; waits for requests. The engine's weights are
those of the start, or of a checkpoint, and never change. It scores while the next groups are sampled, so that a step of
the trainer only reads what is there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable
from typing import Any

import numpy as np

from streamrl.actors.engine_loading import load_frozen_engine
from streamrl.actors.holding import make_probe
from streamrl.actors.queue_wiring import bind_address, link_keys
from streamrl.buffers.links.link_zmq import ClientLink
from streamrl.buffers.queue.message_server import Asker, MessageServer, OnEvent, OnFatal
from streamrl.buffers.wire.messages import Header, Refusal, ScoreRequest, Status
from streamrl.buffers.wire.payload import Payload
from streamrl.clock import Clock, RealClock
from streamrl.errors import WireError
from streamrl.objective_checks import serves_reference, serves_start
from streamrl.policy.reference import REFERENCE
from streamrl.ports import Engine
from streamrl.runtime.actor import Actor, ActorSpec
from streamrl.runtime.messages import Probed
from streamrl.types import Group

PLANE = "reference"
"""Name of the endpoint."""


class Reference(Actor):
    async def setup(self) -> dict[str, Any]:
        kl = self.config.loss.kl
        self._fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        folder = self.spec.model if kl.reference == "initial" else kl.reference
        self._engine = await load_frozen_engine(self.config, folder, self.spec.ipc_dir)
        self.cleanup.push_async_callback(self._engine.close)
        self._server = ReferenceServer(
            bind_address(self.spec, PLANE), self._engine, self.config.sampling.temperature, RealClock(), self.emit,
            self._fatal.set_exception, keys=link_keys(self.spec),
        )  # fmt: skip
        self.cleanup.callback(self._server.close)
        self._server.bind()
        return {"endpoint": self._server.endpoint, "engine": self.config.engine.name, "reference": kl.reference}

    async def run(self) -> dict[str, Any]:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._server.run())
            if serves_start(self.config):
                await self._report_probe()
            await self._fatal
        return {}

    async def _report_probe(self) -> None:
        """The start is version 0, so that the parity gate holds this engine against the trainer too (C7)."""
        with self.waiting("the engine to answer the parity probe"):
            self.send(Probed(report=await make_probe(self.spec, self._engine).report_scores()))


class ReferenceServer(MessageServer):
    """Serves log-probs of ``engine`` at ``temperature``. A rollouter waits for each of its groups, so that no more
    requests are here at once than groups are under way."""

    def __init__(
        self, endpoint: str, engine: Engine, temperature: float, clock: Clock, on_event: OnEvent, on_fatal: OnFatal,
        **link: Any,
    ) -> None:  # fmt: skip
        super().__init__(endpoint, clock, on_event, on_fatal, **link)
        self._engine = engine
        self._temperature = temperature
        self._asked: asyncio.Queue[tuple[Asker, list[np.ndarray]]] = asyncio.Queue()

    def handle(self, asker: Asker, header: Header, payload: Payload) -> None:
        match body := header.body:
            case ScoreRequest():
                self._asked.put_nowait((asker, _rows(body.lengths, payload)))
            case _:
                raise WireError(f"expected a score request, got {type(body).__name__}, which is not for a reference")

    def tasks(self) -> Iterable[Coroutine[Any, Any, None]]:
        return (self._score(),)

    async def _score(self) -> None:
        """All groups that wait, at once: the engine makes passes of them."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                asker, rows = await self._asked.get()
                tasks.create_task(self._score_group(asker, rows))

    async def _score_group(self, asker: Asker, rows: list[np.ndarray]) -> None:
        refused = ""
        try:
            async with asyncio.TaskGroup() as tasks:
                scoring = [tasks.create_task(self._engine.score(row.tolist(), self._temperature)) for row in rows]
        except* ValueError as errors:  # tokens that it cannot score are the sender's fault
            refused = f"reference: {errors.exceptions[0]}"
        if refused:
            self.answer(asker, Refusal(refused, malformed=True))
            return
        scores = np.concatenate([each.result() for each in scoring]).astype(np.float32)
        self.answer(asker, Status("scored"), [scores.data.cast("B")])


class ReferenceClient:
    """A rollouter's end. Requests survive a server that dies and comes back (``link_zmq.py``)."""

    def __init__(self, link: ClientLink) -> None:
        self._link = link

    async def add(self, group: Group) -> None:
        """Give every trajectory of ``group`` the column ``reference``, float32 ``[T]``: its log-probs, the first 0.

        Ended by the answer, cancellation or ``close``. Raises ``WireError`` where the group cannot be scored.
        """
        if any(REFERENCE in trajectory.columns for trajectory in group.trajectories):
            raise WireError(
                f"the environment returned a column {REFERENCE!r}, which loss.kl.serve=engine writes; rename it"
            )
        rows = [np.asarray(trajectory.tokens, dtype=np.int32) for trajectory in group.trajectories]
        lengths = [len(row) for row in rows]
        request, tokens = ScoreRequest(lengths), Payload([np.concatenate(rows).data.cast("B")])
        _, answer = await self._link.request(request, tokens, what=f"reference log-probs of lease {group.lease}")
        scores = np.frombuffer(b"".join(answer.frames), dtype=np.float32)
        if len(scores) != sum(lengths):
            raise WireError(f"reference: expected {sum(lengths)} log-probs for lease {group.lease}, got {len(scores)}")
        for trajectory, own in zip(group.trajectories, np.split(scores, np.cumsum(lengths)[:-1]), strict=True):
            trajectory.columns = {**trajectory.columns, REFERENCE: own}

    def close(self) -> None:
        self._link.close()


def make_reference(spec: ActorSpec) -> ReferenceClient | None:
    """A rollouter's end of the reference, where the run has one."""
    if not serves_reference(spec.config):
        return None
    return ReferenceClient(
        ClientLink(
            spec.endpoint(PLANE), spec.holder, time.monotonic, keys=link_keys(spec), checksum=spec.config.queue.checksum
        )
    )


def _rows(lengths: list[int], payload: Payload) -> list[np.ndarray]:
    """Token ids of each trajectory. Raises ``WireError`` where payload and lengths do not fit each other."""
    expected = 4 * sum(lengths)
    if payload.nbytes != expected:
        raise WireError(f"score request: expected {expected} bytes of tokens, as its lengths say, got {payload.nbytes}")
    tokens = np.frombuffer(b"".join(payload.frames), dtype=np.int32)
    return np.split(tokens, np.cumsum(lengths)[:-1])
