"""The embedded engine: continuous batching in the rollouter's own process (C6).

::

    event loop                                   core thread
    generate ─┐                                  wait for work (no CPU when idle)
    score     ├─► inbox (lock + condition) ─────► run the commands, in order
    pause …  ─┘                                  one step: prefill + decode of every slot
    futures ◄──── call_soon_threadsafe ◄──────── all that ended in this step, in one call

======== ================================= =========================================
state    entered by                        calls
======== ================================= =========================================
new      constructor                       only ``start`` and ``close``
running  ``start``                         all
failed   an exception in the core thread   raise that exception; ``close`` works
closed   ``close``                         raise ``RuntimeError``; ``close`` is a no-op
======== ================================= =========================================
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from streamrl import __version__
from streamrl.engines.core import Decode, EngineCore
from streamrl.engines.model_runner import ModelRunner
from streamrl.engines.requests import check_params, checked_tokens
from streamrl.engines.slots import Request
from streamrl.errors import ConfigError, WeightSyncError
from streamrl.parity.weights import digests
from streamrl.ports import EngineFacts, EngineStatistics
from streamrl.sync.workers import in_thread
from streamrl.types import Generation, SamplingParams


class _State(Enum):
    NEW = "new"
    RUNNING = "running"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True)
class _Command:
    """Something to run on the core thread between two steps."""

    run: Callable[[], Any]
    reply: asyncio.Future[Any] | None = None


@dataclass(frozen=True)
class _Asked:
    """Tokens int32 ``[T]`` to score."""

    tokens: np.ndarray
    temperature: float
    reply: asyncio.Future[Any]


_Outcome = tuple[asyncio.Future[Any], Any, BaseException | None]


class EmbeddedEngine:
    """``ports.Engine`` over a transformers causal LM that this process holds.

    ``slots`` sequences decode at once, of at most ``max_length`` tokens, prompt included. ``kv`` is the policy for the
    KV cache of running requests at a weight update: ``keep`` (stale KV stays) or ``recompute`` (from the new weights).
    Greedy requests (``temperature=0``) get the log-prob of temperature 1 without truncation. ``decode`` gives the text
    of token ids, special tokens included, and is called by the engine's own thread; requests with stop strings need it.
    ``head_dtype`` (``float32`` or ``bfloat16``) is that of the head's product, whatever the body is in.
    Raises ``ConfigError`` for a model or setting that cannot be served.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int,
        max_length: int,
        kv: str = "keep",
        threads: int = 1,
        head_dtype: str = "float32",
        decode: Decode | None = None,
    ) -> None:
        if kv not in ("keep", "recompute"):
            raise ConfigError(f"engine.kv: expected 'keep' or 'recompute', got {kv!r}")
        if min(slots, max_length, threads) < 1:
            raise ConfigError(
                f"engine: slots, max_length and threads must be at least 1: {slots}, {max_length}, {threads}"
            )
        if head_dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"model.head_dtype: expected 'float32' or 'bfloat16', got {head_dtype!r}")
        self._max_length = max_length
        self._kv = kv
        self._threads = threads
        self._decodes = decode is not None
        runner = ModelRunner(model, slots, max_length, head_dtype)
        self._core = EngineCore(runner, slots, max_length, recompute=kv == "recompute", decode=decode)
        self._state = _State.NEW
        self._failure: Exception | None = None
        self._condition = threading.Condition()
        self._inbox: list[Request | _Command] = []
        self._closing = False
        self._arrivals: list[Request] = []
        self._asked: list[_Asked] = []
        self._staged: tuple[int, Mapping[str, object]] | None = None
        self._pending: set[asyncio.Future[Any]] = set()
        self._loop: asyncio.AbstractEventLoop
        self._ended: asyncio.Future[None]
        self._thread = threading.Thread(target=self._main, name="embedded-engine", daemon=True)

    # -- event loop side -------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._core.version

    def statistics(self) -> EngineStatistics:
        return self._core.statistics()

    def facts(self) -> EngineFacts:
        """Of a started engine. The dtype of the head's product was seen in a forward pass."""
        runner = self._core.runner
        return EngineFacts(
            engine=f"embedded {__version__}",
            dtype=str(runner.dtype).removeprefix("torch."),
            head_dtype=runner.head_dtype,
            tied=runner.tied,
            logprobs="processed",
            kv=self._kv,
        )

    async def start(self) -> None:
        """Start the core thread and check the model on a few tokens there; ``ConfigError`` if it cannot be served."""
        if self._state is not _State.NEW:
            raise RuntimeError(f"engine embedded: start of a {self._state.value} engine; build a new one")
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        self._state = _State.RUNNING
        self._thread.start()
        await self._call(self._core.runner.check)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Sample one continuation; ``ValueError`` for a prompt or parameters that cannot be served.

        The same prompt, parameters, seed and weights give the same tokens, so every call wants a seed of its own.
        """
        self._require_running()
        prompt = checked_tokens("prompt", prompt_ids, self._max_length - 1, self._core.runner.vocabulary)
        check_params(params)
        if params.stop_strings and not self._decodes:
            raise ValueError("sampling: stop_strings need an engine that was given its tokenizer's decode")
        request = Request(prompt, params, reply=self._future())
        if not self._arrivals:
            # One hand-over per turn of the event loop: requests of a group reach the core together and share a prefill.
            self._loop.call_soon(self._flush)
        self._arrivals.append(request)
        try:
            return await request.reply
        except asyncio.CancelledError:
            self._withdraw(request)
            raise

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        self._require_running()
        if not temperature > 0:
            raise ValueError(f"score: temperature must be over 0, got {temperature}")
        tokens = checked_tokens("score", token_ids, self._max_length, self._core.runner.vocabulary)
        asked = _Asked(tokens, temperature, self._future())
        if not self._asked:
            self._loop.call_soon(self._flush_asked)  # as with requests: one hand-over, and one pass for many rows
        self._asked.append(asked)
        return await asked.reply

    async def pause(self) -> None:
        """Returns when the core stands still between two steps; at most one prefill and one decode step away."""
        await self._call(self._core.pause)

    async def resume(self) -> None:
        await self._call(self._core.resume)

    async def stage(self, version: int, tensors: Mapping[str, object]) -> None:
        """``ports.StagesWeights``. On a CPU ``load`` serves from ``tensors``, and only the head may need a cast."""
        self._require_running()
        self.unstage()
        self._staged = version, await in_thread(partial(self._core.runner.stage, tensors))

    def unstage(self) -> None:
        self._staged = None
        self._core.runner.head.prepare(None)

    async def load(self, version: int, tensors: Mapping[str, object]) -> None:
        """``WeightSyncError`` leaves the old weights serving. Cancelling does not stop a load that was begun."""
        if self._staged is not None and self._staged[0] == version:
            (_, tensors), self._staged = self._staged, None
        await self._call(partial(self._core.load, version, tensors))

    async def digests(self) -> dict[str, int]:
        """Of every parameter as it is held now, by name: ``ports.TellsDigests``."""
        held: dict[str, int] = await self._call(lambda: digests(self._core.runner.parameters()))
        return held

    async def close(self) -> None:
        """End the thread; requests in flight end with ``asyncio.CancelledError``. Idempotent."""
        started, self._state = self._thread.ident is not None, _State.CLOSED
        with self._condition:
            self._closing = True
            self._condition.notify()
        if started:
            await asyncio.shield(self._ended)
            self._thread.join()
        for future in list(self._pending):
            future.cancel()

    def _require_running(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._state is not _State.RUNNING:
            raise RuntimeError(f"engine embedded is {self._state.value}: call start first, and nothing after close")

    def _future(self) -> asyncio.Future[Any]:
        future = self._loop.create_future()
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        return future

    async def _call(self, run: Callable[[], Any]) -> Any:
        self._require_running()
        reply = self._future()
        self._post([_Command(run, reply)])
        return await reply

    def _flush(self) -> None:
        arrivals, self._arrivals = self._arrivals, []
        self._post(arrivals)

    def _flush_asked(self) -> None:
        asked, self._asked = self._asked, []
        for temperature in dict.fromkeys(each.temperature for each in asked):
            some = [each for each in asked if each.temperature == temperature and not each.reply.done()]
            if not some:
                continue
            scores = self._future()
            scores.add_done_callback(partial(_hand_out, [each.reply for each in some]))
            self._post([_Command(partial(self._core.score, [each.tokens for each in some], temperature), scores)])

    def _withdraw(self, request: Request) -> None:
        if request in self._arrivals:
            self._arrivals.remove(request)
        else:
            self._post([_Command(partial(self._core.cancel, request))])

    def _post(self, items: Sequence[Request | _Command]) -> None:
        with self._condition:
            self._inbox.extend(items)
            self._condition.notify()

    def _resolve(self, outcomes: list[_Outcome]) -> None:
        for future, result, error in outcomes:
            if future.done():
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    def _end(self, failure: Exception | None) -> None:
        """The core thread's last word."""
        if failure is not None:
            self._failure = failure
            if self._state is _State.RUNNING:
                self._state = _State.FAILED
            self._resolve([(future, None, failure) for future in list(self._pending)])
        self._ended.set_result(None)

    # -- core thread side ------------------------------------------------------------------------------------------

    def _main(self) -> None:
        failure: Exception | None = None
        try:
            torch.set_num_threads(self._threads)
            while self._turn():
                pass
        except Exception as error:  # noqa: BLE001 - whatever ends the core must reach every caller
            failure = error
        self._loop.call_soon_threadsafe(self._end, failure)

    def _turn(self) -> bool:
        """Commands, then one step; False when the engine closes."""
        with self._condition:
            self._condition.wait_for(lambda: self._inbox or self._closing or self._core.has_work)
            if self._closing:
                return False
            items, self._inbox = self._inbox, []
        replies: list[_Outcome] = []
        for item in items:
            if isinstance(item, Request):
                self._core.add(item)
            else:
                replies += _run(item)
        self._deliver(replies)
        if self._core.has_work:
            self._deliver([(request.reply, generation, None) for request, generation in self._core.step()])
        return True

    def _deliver(self, outcomes: list[_Outcome]) -> None:
        if outcomes:
            self._loop.call_soon_threadsafe(self._resolve, outcomes)


def _run(command: _Command) -> list[_Outcome]:
    """Run one command. Only a refused update is the caller's own matter; any other exception ends the engine."""
    try:
        result, error = command.run(), None
    except WeightSyncError as refused:
        result, error = None, refused
    return [] if command.reply is None else [(command.reply, result, error)]


def _hand_out(replies: list[asyncio.Future[Any]], scores: asyncio.Future[Any]) -> None:
    """The scores of many, each to whoever asked for it. An engine that fails or closes ends all replies itself."""
    if not scores.cancelled() and scores.exception() is None:
        for reply, own in zip(replies, scores.result(), strict=True):
            if not reply.done():
                reply.set_result(own)
