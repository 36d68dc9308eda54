"""The reward model in a process of its own (``reward_model.name``): episodes ask it, through the reward ``model``.

Consumes answers; produces rewards; waits for requests. What has come while one batch is scored is the next batch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from streamrl.actors.queue_wiring import bind_address, link_keys
from streamrl.buffers.queue.message_server import Asker, MessageServer, OnEvent, OnFatal
from streamrl.buffers.wire.messages import Header, Refusal, Rewarded, RewardRequest
from streamrl.buffers.wire.payload import Payload
from streamrl.clock import Clock, RealClock
from streamrl.envs.rewards.model import ScorerAddress, use_scorer
from streamrl.errors import WireError
from streamrl.policy.reward_model import Conversation, RewardModel
from streamrl.runtime.actor import Actor, ActorSpec

PLANE = "scorer"
"""Name of the endpoint."""

WAITING = 1 << 14
"""Conversations that may wait for a batch; further ones are refused (C4)."""

Score = Callable[[Sequence[Conversation]], list[float | str]]
"""Rewards of conversations; why there is none, for one that cannot be scored."""


class Scorer(Actor):
    async def setup(self) -> dict[str, Any]:
        settings = self.config.reward_model
        self._fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        worker = ThreadPoolExecutor(1, thread_name_prefix="torch")
        self.cleanup.callback(worker.shutdown, wait=True)

        def load() -> RewardModel:
            torch.set_num_threads(settings.threads)
            return RewardModel(Path(settings.name), settings.max_length)

        model = await self.blocking(worker, load)
        self._server = ScorerServer(
            bind_address(self.spec, PLANE), model.score, worker, settings.batch, RealClock(), self.emit,
            self._fatal.set_exception, keys=link_keys(self.spec),
        )  # fmt: skip
        self.cleanup.callback(self._server.close)
        self._server.bind()
        return {"endpoint": self._server.endpoint, "model": settings.name}

    async def run(self) -> dict[str, Any]:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._server.run())
            await self._fatal
        return {}

    def gauges(self) -> dict[str, float]:
        server: ScorerServer | None = getattr(self, "_server", None)
        return server.statistics() if server is not None else {}


class ScorerServer(MessageServer):
    """Serves ``score``, called on ``worker`` with up to ``batch`` conversations at a time."""

    def __init__(
        self, endpoint: str, score: Score, worker: ThreadPoolExecutor, batch: int, clock: Clock, on_event: OnEvent,
        on_fatal: OnFatal, **link: Any,
    ) -> None:  # fmt: skip
        super().__init__(endpoint, clock, on_event, on_fatal, **link)
        self._score = score
        self._worker = worker
        self._batch = batch
        self._asked: deque[tuple[Asker, Conversation]] = deque()
        self._news = asyncio.Event()
        self._scored = 0
        self._batches = 0

    def statistics(self) -> dict[str, float]:
        """Conversations that were scored, in how many batches, and those that wait."""
        return {
            "scorer/scored": float(self._scored),
            "scorer/batches": float(self._batches),
            "scorer/waiting": float(len(self._asked)),
        }

    def handle(self, asker: Asker, header: Header, payload: Payload) -> None:
        match body := header.body:
            case RewardRequest():
                if len(self._asked) >= WAITING:
                    self.answer(asker, Refusal(f"{WAITING} answers wait for the reward model already", malformed=False))
                    return
                self._asked.append((asker, body.messages))
            case _:
                raise WireError(f"expected a reward request, got {type(body).__name__}, which is not for a scorer")

    def settled(self) -> None:
        if self._asked:
            self._news.set()

    def tasks(self) -> Iterable[Coroutine[Any, Any, None]]:
        return (self._score_batches(),)

    async def _score_batches(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            while self._asked:
                batch = [self._asked.popleft() for _ in range(min(self._batch, len(self._asked)))]
                conversations = [conversation for _, conversation in batch]
                scores = await asyncio.get_running_loop().run_in_executor(self._worker, self._score, conversations)
                self._batches += 1
                for (asker, _), score in zip(batch, scores, strict=True):
                    self._scored += not isinstance(score, str)
                    self.answer(asker, Refusal(score, malformed=False) if isinstance(score, str) else Rewarded(score))


def connect_scorer(spec: ActorSpec) -> None:
    """Tell the rewards of this process where the run's reward model is; call it before the environment is loaded."""
    if spec.config.reward_model.name:
        use_scorer(ScorerAddress(spec.endpoint(PLANE), spec.holder, link_keys(spec)))
