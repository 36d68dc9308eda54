"""A rollouter's end of an engine in another process (``serving.py`` is the other).

Nothing asks whether the engine is alive: its socket says so. One that is paused, however long, is as alive as any; one
whose process died has no connection, and a host that vanished is noticed by the heartbeats of the socket. Requests then
end with ``EngineLost``; the connection to its successor, at the same address, is made by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import numpy as np

from streamrl.buffers.links.link_keys import LinkKeys
from streamrl.buffers.links.link_zmq import ClientLink
from streamrl.buffers.wire.engine_messages import EngineState, Generated, Watched, WatchRequest
from streamrl.buffers.wire.messages import Body
from streamrl.buffers.wire.payload import Payload
from streamrl.engines.serving import request_of
from streamrl.errors import EngineLost, StreamRLError, WireError
from streamrl.ports import EngineStatistics
from streamrl.types import Generation, SamplingParams


class RemoteEngine:
    """``ports.Sampler`` over the socket of an ``EngineServer``. ``holder`` names this process to it.

    ``follow`` keeps ``state`` as the engine tells it. Calls have no time limit of their own: each is ended by its
    answer, by cancellation, which the engine is told, by ``close`` or by ``EngineLost``.
    """

    def __init__(self, endpoint: str, name: str, holder: str, keys: LinkKeys | None = None) -> None:
        self.name = name
        self.state: EngineState | None = None
        """As it was told last; None while there is no connection."""
        self.changed: Callable[[], None] = lambda: None
        """Called when ``state`` has become another."""
        self._closed = False
        self._there = asyncio.Event()
        self._link = ClientLink(endpoint, holder, time.monotonic, keys=keys, connection=self._connection)

    async def follow(self) -> None:
        """Keep up with the engine until cancelled; run it beside whatever samples."""
        seen = 0
        while True:
            try:
                header, _ = await self._link.request(WatchRequest(seen), what=f"news of {self.name}")
            except EngineLost:
                seen = 0
                await self._there.wait()
                continue
            watched = header.body
            if not isinstance(watched, Watched):
                raise WireError(f"{self.name}: expected its state, got {type(watched).__name__}")
            seen = watched.state.number
            self._take(watched.state)

    @property
    def version(self) -> int:
        return self.state.version if self.state else -1

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """As ``ports.Engine``; raises ``EngineLost`` when the engine's process died first, ``ValueError`` for what it
        refuses."""
        prompt = Payload([np.asarray(prompt_ids, dtype=np.int32).tobytes()])
        body, frames = await self._ask(request_of(params), prompt, "a continuation")
        if not isinstance(body, Generated):
            raise WireError(f"{self.name}: expected a continuation, got {type(body).__name__}")
        self._take(body.state)
        count = sum(count for _, count in body.versions)
        data = b"".join(frames)
        if len(data) != 8 * count:
            raise WireError(f"{self.name}: expected {8 * count} bytes of {count} tokens, got {len(data)}")
        tokens = np.frombuffer(data, dtype=np.int32, count=count)
        logprobs = np.frombuffer(data, dtype=np.float32, offset=4 * count)
        return Generation(tokens, logprobs, list(body.versions), body.finish_reason)

    def statistics(self) -> EngineStatistics:
        """As they came with the last answer; all zero before."""
        state = self.state
        if state is None:
            return EngineStatistics(0, 0, 0, 0, 0.0, -1)
        return EngineStatistics(
            state.running, state.waiting, state.generated_tokens, state.prefilled_tokens, state.busy_s, state.version,
            state.kv_used, state.preemptions,
        )  # fmt: skip

    async def close(self) -> None:
        """Let go of the engine, which goes on for others. Idempotent."""
        self._closed = True
        self._link.close()

    async def _ask(self, request: Body, payload: Payload, what: str) -> tuple[Body, list[bytes | memoryview]]:
        if self._closed:
            raise StreamRLError(f"{self.name}: {what} of an engine that this process let go of")
        if self.state is None:
            raise EngineLost(f"{self.name} cannot be reached; its process died, or has not been replaced yet")
        try:
            header, answer = await self._link.request(request, payload, what=f"{what} of {self.name}")
        except StreamRLError:
            if self._closed:
                raise asyncio.CancelledError from None
            raise
        return header.body, answer.frames

    def _take(self, state: EngineState) -> None:
        if self.state is None or state.number >= self.state.number:  # an answer may come behind the news
            self.state = state
            self.changed()

    def _connection(self, there: bool) -> None:
        if there:
            self._there.set()
            return
        self._there.clear()
        self.state = None
        self._link.fail_waiting(EngineLost(f"{self.name} was lost with the requests that it had"))
        self.changed()
