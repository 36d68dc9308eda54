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
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from streamrl.engines.blueprint import Blueprint
from streamrl.engines.calls import Calls
from streamrl.engines.http_client import Refused, ServerClient
from streamrl.engines.meter import Meter
from streamrl.engines.requests import check_params, checked_tokens
from streamrl.engines.shelf import Shelf
from streamrl.engines.vllm import server_checks
from streamrl.engines.vllm.adapter_plan import ADAPTER, adapted_layers, arriving_weights
from streamrl.engines.vllm.parameters import sampling_arguments, scoring_arguments
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


class VllmServerEngine:
    """``ports.Engine`` over a server of ``engine.urls``. Made by ``start``.

    A cache of prefixes is salted by the load under which a request began: none reads what weights before it computed.
    """

    def __init__(self, config: Config, client: ServerClient, blueprint: Blueprint, arriving: Blueprint) -> None:
        self._config = config
        self._client = client
        self._blueprint = blueprint
        self._arriving = arriving
        """What ``load`` gets: the model, or with LoRA the adapter alone."""
        self._shelf = Shelf()
        self._calls = Calls(f"vLLM at {client.url}")
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
        arriving = await asyncio.to_thread(arriving_weights, config, model_folder, blueprint)
        client = ServerClient("vLLM", url, os.environ.get(KEY_VARIABLE, ""), key_statuses=(401,))
        engine = cls(config, client, blueprint, arriving)
        try:
            await engine._begin()
        except BaseException:  # whatever ends a start, also a cancellation: nothing may stay behind
            await engine.close()
            raise
        return engine

    async def _begin(self) -> None:
        lora = self._config.model.lora.rank > 0
        adapted = adapted_layers(self._arriving.shapes) if lora else ()
        info = await self._calls.run(server_checks.checked_info(self._client, self._config, adapted))
        await self._calls.run(server_checks.check_model(self._client, self._config, self._blueprint))
        probe = torch.tensor(list(secrets.token_bytes(32)), dtype=torch.float32)
        placed = self._shelf.put({"probe": probe})
        await self._calls.run(server_checks.check_memory(self._client, placed, {"probe": probe.tolist()}))
        await self._calls.run(server_checks.prepare(self._client))
        if lora:
            await self._calls.run(server_checks.hold_adapter(self._client, self._config, self._arriving))
        answer = await self._answer([0, 0], scoring_arguments(1.0))
        self._facts = await self._calls.run(server_checks.facts_of(self._client, info, self._config))
        if self._facts.prefix_caching and answer["usage"]["prompt_tokens_details"] is None:
            raise ConfigError(
                f"vLLM at {self._client.url}: it caches prefixes and does not count them; start it with "
                "--enable-prompt-tokens-details, or with --no-enable-prefix-caching"
            )
        await self._calls.run(self._measure())

    @property
    def version(self) -> int:
        return self._calls.version

    def facts(self) -> EngineFacts:
        """What the workers and vLLM's final settings say; the head's dtype was seen in a forward pass."""
        return self._facts

    def statistics(self) -> EngineStatistics:
        """Of what went through this engine; the KV share is the server's, at most a second before the last answer."""
        return self._meter.statistics(self._config.engine.slots, self.version)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Sample one continuation; ``ValueError`` for a prompt or parameters that cannot be served.

        The same prompt, parameters, seed and weights give the same tokens. Raises ``ActorDied`` when the server dies.
        """
        self._calls.require_serving()
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
        self._calls.require_serving()
        if not 0 < temperature < float("inf"):
            raise ValueError(f"score: temperature must be over 0 and finite, got {temperature}")
        longest = self._config.model.max_length
        tokens = checked_tokens("score", token_ids, longest, self._blueprint.vocabulary).tolist()
        scores = np.zeros(len(tokens), dtype=np.float32)
        salt = ""
        while len(tokens) > 1 and salt != self._calls.salt:
            salt = self._calls.salt
            answer = await self._answer(tokens, scoring_arguments(temperature))
            scores[1:] = [each[str(token)]["logprob"] for token, each in _after_first(tokens, answer)]
        return scores

    async def pause(self) -> None:
        self._calls.require_serving()
        if self._calls.paused:
            return
        self._calls.pause()
        self._meter.pause()
        await self._calls.run(self._client.post("/pause?mode=keep&clear_cache=false", {}))

    async def resume(self) -> None:
        self._calls.require_serving()
        if not self._calls.paused:
            return
        await self._calls.run(self._client.post("/resume", {}))
        self._meter.resume()
        self._calls.resume()

    async def load(self, version: int, tensors: Mapping[str, object]) -> None:
        """``WeightSyncError`` leaves the old weights serving; after any other error the engine must not go on."""
        self._calls.require_serving()
        if not self._calls.paused:
            raise WeightSyncError(f"load of version {version} while generating: pause the engine first")
        placed = await asyncio.to_thread(lambda: self._shelf.put(self._arriving.verify(tensors)))
        with self._calls.loading(version):
            await self._calls.run(self._update(version, placed))

    async def _update(self, version: int, placed: Mapping[str, object]) -> None:
        if self._config.model.lora.rank:
            called = {"method": "streamrl_replace_adapter", "kwargs": {"placed": placed}}
            await self._client.post("/collective_rpc", called)
            await self._client.post("/update_weight_version", {"new_version": str(version)})
        else:
            await self._client.post("/start_weight_update", {})
            await self._client.post("/update_weights", {"update_info": placed})
            await self._client.post("/finish_weight_update", {"weight_version": str(version)})
        if self._config.engine.kv == "recompute":
            await self._client.post("/reset_prefix_cache?reset_running_requests=true", {})

    async def close(self) -> None:
        """Leave the server as it is, with the weights that it has; requests in flight end with ``CancelledError``."""
        if not await self._calls.close():
            return
        if not self._calls.failed:
            await self._last_words()
        await self._client.close()
        self._shelf.close()

    async def _last_words(self) -> None:
        """Calls that nobody waits for any more; where they fail, the next run on this server makes up for them."""
        calls: list[tuple[str, object]] = [("/collective_rpc", {"method": "streamrl_forget"})]
        if self._calls.paused:
            calls.append(("/resume", {}))
        try:
            for path, body in calls:
                await self._client.post(path, body, within_s=_LAST_WORD_S)
        except (Refused, ActorDied, DeadlineExceeded, ConfigError) as error:
            log.info("at the end: %s", error)

    async def _answer(self, tokens: list[int], params: Mapping[str, object]) -> Any:
        """Of a finished request. Begun while paused, it waits here, so that its salt is that of the new weights."""
        await self._calls.going()
        asked = {"token_ids": tokens, "sampling_params": params, "cache_salt": self._calls.salt}
        if self._config.model.lora.rank:
            asked["model"] = ADAPTER
        return await self._calls.run(self._ask(asked))

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
        if self._calls.serving and self._meter.due(_LOAD_EVERY_S):
            await self._calls.aside(self._measure())

    async def _measure(self) -> None:
        found = server_checks.gauges(await self._client.get_text("/metrics"))
        self._meter.kv_used = found[server_checks.KV_USED]
        total = found[server_checks.PREEMPTIONS]
        if self._preemptions is not None:
            self._meter.count(0, 0, preemptions=int(total - self._preemptions))
        self._preemptions = total


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
