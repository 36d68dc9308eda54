"""A vLLM server that runs already, as ``ports.Engine``: requests, pauses and updates by HTTP, weights by memory.

::

    this process                        the server, on the same machine
    generate, score ── HTTP ──────────► /inference/v1/generate; answers carry the label of the weights by token
    pause, resume ────────────────────► /pause?mode=keep: stands between two steps, requests and KV cache stay
    load: shared memory ◄── mapped ──── layer-by-layer reload in its workers (``worker.py``), then the new label

Nobody asks whether the server is alive: its connections tell, and an answer that it cannot compute any more. So a
pause, however long, is never taken for death. The first failure ends the engine; the server serves its next user.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from streamrl.engines.blueprint import Blueprint
from streamrl.engines.http_client import Refused, ServerClient
from streamrl.engines.meter import Meter
from streamrl.engines.requests import check_params, checked_tokens
from streamrl.engines.vllm import server_checks
from streamrl.engines.vllm.parameters import sampling_arguments, scoring_arguments
from streamrl.engines.vllm.shelf import Shelf
from streamrl.errors import ActorDied, ConfigError, DeadlineExceeded, WeightSyncError
from streamrl.ports import EngineFacts, EngineStatistics
from streamrl.schema import Config
from streamrl.types import Generation, SamplingParams, VersionSpans, append_version

KEY_VARIABLE = "STREAMRL_VLLM_KEY"
"""Environment variable with the key of servers in ``engine.urls``."""
_LOAD_EVERY_S = 1.0
"""How often the server is asked how full it is, at most; only after an answer."""
_LAST_WORD_S = 5.0

log = logging.getLogger(__name__)
_T = TypeVar("_T")


class VllmServerEngine:
    """``ports.Engine`` over a server of ``engine.urls``. Made by ``start``.

    A cache of prefixes is salted by the load under which a request began: none reads what weights before it computed.
    """

    def __init__(self, config: Config, client: ServerClient, blueprint: Blueprint) -> None:
        self._config = config
        self._client = client
        self._blueprint = blueprint
        self._shelf = Shelf()
        self._version = -1
        self._salt = uuid.uuid4().hex
        """A new one with every load, and none that an engine on this server had before."""
        self._paused = self._closed = False
        self._failure: Exception | None = None
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._pending: set[asyncio.Task[Any]] = set()
        self._meter = Meter()
        self._preemptions: float | None = None
        """Of the server's life so far, as it said last."""
        self._facts: EngineFacts

    @classmethod
    async def start(cls, config: Config, model_folder: str, url: str) -> VllmServerEngine:
        """Take over the server at ``url``, which serves the architecture in ``model_folder``: version -1.

        Requests in flight there are aborted. Raises ``ConfigError`` for a server that cannot serve this run.
        """
        blueprint = await asyncio.to_thread(Blueprint.of, model_folder, config.model.dtype)
        client = ServerClient("vLLM", url, os.environ.get(KEY_VARIABLE, ""), key_statuses=(401,))
        engine = cls(config, client, blueprint)
        try:
            await engine._begin()
        except BaseException:
            await engine.close()
            raise
        return engine

    async def _begin(self) -> None:
        info = await self._guarded(server_checks.checked_info(self._client, self._config))
        await self._guarded(server_checks.check_model(self._client, self._config, self._blueprint))
        probe = torch.tensor(list(secrets.token_bytes(32)), dtype=torch.float32)
        placed = self._shelf.put({"probe": probe})
        await self._guarded(server_checks.check_memory(self._client, placed, {"probe": probe.tolist()}))
        await self._guarded(server_checks.prepare(self._client))
        answer = await self._answer([0, 0], scoring_arguments(1.0))
        self._facts = await self._guarded(server_checks.facts_of(self._client, info, self._config))
        if self._facts.prefix_caching and answer["usage"]["prompt_tokens_details"] is None:
            raise ConfigError(
                f"vLLM at {self._client.url}: it caches prefixes and does not count them; start it with "
                "--enable-prompt-tokens-details, or with --no-enable-prefix-caching"
            )
        await self._ask_load()

    @property
    def version(self) -> int:
        return self._version

    def facts(self) -> EngineFacts:
        """What the workers and vLLM's final settings say; the head's dtype was seen in a forward pass."""
        return self._facts

    def statistics(self) -> EngineStatistics:
        """Of what went through this engine; the KV share is the server's, at most a second before the last answer."""
        return self._meter.statistics(self._config.engine.slots, self._version)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Sample one continuation; ``ValueError`` for a prompt or parameters that cannot be served.

        The same prompt, parameters, seed and weights give the same tokens. Raises ``ActorDied`` when the server dies.
        """
        self._require_serving()
        longest = self._config.model.max_length
        prompt = checked_tokens("prompt", prompt_ids, longest - 1, self._blueprint.vocabulary).tolist()
        check_params(params)
        self._meter.begin()
        try:
            answer = await self._answer(prompt, sampling_arguments(params, longest - len(prompt)))
            cached = (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
            self._meter.count(generated=len(answer["choices"][0]["token_ids"]), prefilled=len(prompt) - cached)
        finally:
            self._meter.end()
        await self._ask_load()
        return generation(answer)

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        """Asked again where weights changed meanwhile, so that all scores are of one version."""
        self._require_serving()
        if not 0 < temperature < float("inf"):
            raise ValueError(f"score: temperature must be over 0 and finite, got {temperature}")
        longest = self._config.model.max_length
        tokens = checked_tokens("score", token_ids, longest, self._blueprint.vocabulary).tolist()
        scores = np.zeros(len(tokens), dtype=np.float32)
        salt = ""
        while len(tokens) > 1 and salt != self._salt:
            salt = self._salt
            answer = await self._answer(tokens, scoring_arguments(temperature))
            scores[1:] = [each[str(token)]["logprob"] for token, each in _after_first(tokens, answer)]
        return scores

    async def pause(self) -> None:
        self._require_serving()
        if self._paused:
            return
        self._resumed.clear()
        self._paused = True
        self._meter.pause()
        await self._guarded(self._client.post("/pause?mode=keep&clear_cache=false", {}))

    async def resume(self) -> None:
        self._require_serving()
        if not self._paused:
            return
        await self._guarded(self._client.post("/resume", {}))
        self._paused = False
        self._meter.resume()
        self._resumed.set()

    async def load(self, version: int, tensors: Mapping[str, object]) -> None:
        """``WeightSyncError`` leaves the old weights serving; after any other error the engine must not go on."""
        self._require_serving()
        if not self._paused:
            raise WeightSyncError(f"load of version {version} while generating: pause the engine first")
        placed = await asyncio.to_thread(self._shelf.put, self._blueprint.verify(tensors))
        try:
            await self._guarded(self._update(version, placed))
        except BaseException as error:
            reason = f"version {version} was half loaded when this happened: {error or type(error).__name__}"
            failure = ActorDied(f"vLLM at {self._client.url}: {reason}; the engine must be replaced")
            self._fail(failure)
            if isinstance(error, Exception):
                raise failure from error
            raise
        self._version = version
        self._salt = uuid.uuid4().hex

    async def _update(self, version: int, placed: Mapping[str, object]) -> None:
        await self._client.post("/start_weight_update", {})
        await self._client.post("/update_weights", {"update_info": placed})
        await self._client.post("/finish_weight_update", {"weight_version": str(version)})
        if self._config.engine.kv == "recompute":
            await self._client.post("/reset_prefix_cache?reset_running_requests=true", {})

    async def close(self) -> None:
        """Leave the server as it is, with the weights that it has; requests in flight end with ``CancelledError``."""
        if self._closed:
            return
        self._closed = True
        for task in list(self._pending):
            task.cancel()
        if self._pending:
            await asyncio.wait(self._pending)
        if self._failure is None:
            await self._last_words()
        await self._client.close()
        self._shelf.close()

    async def _last_words(self) -> None:
        """Calls that nobody waits for any more; where they fail, the next run on this server makes up for them."""
        calls: list[tuple[str, object]] = [("/collective_rpc", {"method": "streamrl_forget"})]
        if self._paused:
            calls.append(("/resume", {}))
        try:
            for path, body in calls:
                await self._client.post(path, body, within_s=_LAST_WORD_S)
        except (Refused, ActorDied, DeadlineExceeded, ConfigError) as error:
            log.info("at the end: %s", error)

    async def _answer(self, tokens: list[int], params: Mapping[str, object]) -> Any:
        """Of a finished request. Begun while paused, it waits here, so that its salt is that of the new weights."""
        while self._paused:  # the next update may have begun by the time that this task runs again
            await self._guarded(self._resumed.wait())
        asked = {"token_ids": tokens, "sampling_params": params, "cache_salt": self._salt}
        return await self._guarded(self._ask(asked))

    async def _ask(self, asked: Mapping[str, object]) -> Any:
        """The server aborts a request whose connection is closed, as by the cancellation of this call."""
        try:
            return await self._client.post(server_checks.GENERATE, asked, within_s=None)
        except Refused as error:
            if error.status < 500:
                raise ValueError(str(error)) from error
            raise ActorDied(f"vLLM at {self._client.url} computes no more: {error}") from error

    async def _ask_load(self) -> None:
        """How full the server is, at most once in ``_LOAD_EVERY_S``, and after an answer only."""
        if self._closed or self._failure is not None or not self._meter.due(_LOAD_EVERY_S):
            return
        found = server_checks.gauges(await self._guarded(self._client.get_text("/metrics")))
        self._meter.kv_used = found[server_checks.KV_USED]
        total = found[server_checks.PREEMPTIONS]
        if self._preemptions is not None:
            self._meter.count(0, 0, preemptions=int(total - self._preemptions))
        self._preemptions = total

    def _require_serving(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise RuntimeError("engine vllm is closed: build a new one")

    async def _guarded(self, call: Coroutine[Any, Any, _T]) -> _T:
        """``call``, ended by ``close`` and by the server's death."""
        if self._failure is not None:
            call.close()
            raise self._failure
        task = asyncio.create_task(call)
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)
        try:
            return await task
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if self._failure is not None and own is not None and not own.cancelling():
                raise self._failure from None
            raise
        except ActorDied as error:
            self._fail(error)
            raise

    def _fail(self, failure: Exception) -> None:
        if self._failure is None:
            self._failure = failure
        for task in self._pending:
            task.cancel()


def generation(answer: Mapping[str, Any]) -> Generation:
    """Of a finished request. Raises ``RuntimeError`` for one that is no whole answer."""
    choice = answer["choices"][0]
    if choice["finish_reason"] not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended request {answer['request_id']} by {choice['finish_reason']!r}")
    versions: VersionSpans = []
    for span in choice["weight_versions"] or ():
        append_version(versions, int(span["version"]), span["end"] - span["start"])
    tokens = np.asarray(choice["token_ids"], dtype=np.int32)
    logprobs = np.asarray([each["logprob"] for each in choice["logprobs"]["content"]], dtype=np.float32)
    counted = sum(count for _, count in versions)
    if not len(tokens) == len(logprobs) == counted:
        raise RuntimeError(f"vLLM gave {len(tokens)} tokens, {len(logprobs)} log-probs and versions of {counted}")
    return Generation(token_ids=tokens, logprobs=logprobs, versions=versions, finish_reason=choice["finish_reason"])


def _after_first(tokens: list[int], answer: Mapping[str, Any]) -> Any:
    """Each token but the first, with what is said of its place."""
    found = answer["prompt_logprobs"]
    if found is None or len(found) != len(tokens):
        raise RuntimeError(f"vLLM gave no log-probs of the prompt of request {answer['request_id']}")
    return zip(tokens[1:], found[1:], strict=True)
