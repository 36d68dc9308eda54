"""SGLang behind ``ports.Engine``: requests and pauses by HTTP, weights by shared memory, or by HTTP to another host.

Nobody asks whether the server is alive: a child's end is told by the kernel, a distant one's by the connections that
break. So a pause, however long, is never taken for death. ``score`` is refused while paused.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from streamrl.engines.blueprint import Blueprint
from streamrl.engines.calls import Calls
from streamrl.engines.http_client import Refused, ServerClient
from streamrl.engines.meter import Meter
from streamrl.engines.requests import check_params, checked_tokens
from streamrl.engines.sglang.facts import abilities_of, checked_info, facts_of, observed_head, sees_memory
from streamrl.engines.sglang.requests import Abilities, Decode, generation, request
from streamrl.engines.sglang.server import SglangServer
from streamrl.engines.sglang.weights import buckets, by_value, placed
from streamrl.engines.shelf import Shelf
from streamrl.errors import ActorDied, WeightSyncError
from streamrl.ports import EngineFacts, EngineStatistics
from streamrl.schema import Config
from streamrl.types import Generation, SamplingParams

KEY_VARIABLE = "STREAMRL_SGLANG_KEY"
"""Environment variable with the key of servers in ``engine.urls``."""
_LOAD_EVERY_S = 1.0
"""How often the server is asked how full it is, at most; only after an answer."""
_LAST_WORD_S = 5.0

log = logging.getLogger(__name__)


class SglangEngine:
    """One SGLang server: a child of this process, or one that runs already. Built by ``start``."""

    def __init__(
        self, config: Config, client: ServerClient, server: SglangServer | None, blueprint: Blueprint, decode: Decode
    ) -> None:
        self._config = config
        self._client = client
        self._server = server
        self._blueprint = blueprint
        self._decode = decode
        self._calls = Calls(f"SGLang at {client.url}")
        self._watch: asyncio.Task[None] | None = None
        self._shelf = Shelf()
        self._sees_shelf = False
        self._pauses = 0
        self._meter = Meter()
        self._facts: EngineFacts
        self._abilities: Abilities

    @classmethod
    async def start(cls, config: Config, model_folder: str, url: str = "", scratch: str | None = None) -> SglangEngine:
        """Start a server, or take over the one at ``url``, with the architecture in ``model_folder``.

        The server's files lie in ``scratch``; None: in the folder for temporary files.

        It serves version -1 until the first ``load``. Raises ``ConfigError`` for a server or setting that cannot
        serve, else as ``SglangServer.start`` does.
        """
        blueprint, decode = await asyncio.to_thread(_read_model, model_folder, config.model.dtype)
        server = None if url else await SglangServer.start(config, model_folder, scratch)
        key = server.key if server else os.environ.get(KEY_VARIABLE, "")
        client = ServerClient("SGLang", server.url if server else url, key)
        engine = cls(config, client, server, blueprint, decode)
        try:
            await engine._begin()
        except BaseException:  # whatever ends a start, also a cancellation: nothing may stay behind
            await engine.close()
            raise
        return engine

    async def _begin(self) -> None:
        if self._server:
            self._watch = asyncio.create_task(self._watch_server(self._server), name="sglang-watch")
        info = checked_info(await self._calls.run(self._client.get("/server_info")), self._config, self._client.url)
        self._abilities = abilities_of(info)
        if not self._server:
            await self._calls.run(self._take_over())
        head = None
        if self._abilities.processes:
            head = await self._calls.run(observed_head(self._client))
        if self._abilities.loads_memory:
            self._sees_shelf = await self._calls.run(self._probe_memory())
        log.info("weights go to %s by %s", self._client.url, "shared memory" if self._sees_shelf else "value")
        self._facts = facts_of(info, self._config, self._blueprint, head)
        await self._calls.run(self._measure())
        if self._server:
            self._server.tidy()

    async def _take_over(self) -> None:
        """Whoever used the server before may have left it in the middle of an update, paused, busy, or labelled."""
        try:
            await self._client.post("/end_weight_update", {})
        except Refused as error:
            log.debug("no update to end: %s", error)
        await self._client.post("/update_weight_version", {"new_version": "-1", "abort_all_requests": True})
        await self._client.post("/continue_generation", {"torch_empty_cache": False})

    async def _probe_memory(self) -> bool:
        probe = torch.tensor(list(secrets.token_bytes(32)), dtype=torch.float32)
        where = self._shelf.put({"probe": probe})
        return await sees_memory(self._client, where, {"probe": probe.tolist()})

    @property
    def version(self) -> int:
        return self._calls.version

    @property
    def server(self) -> SglangServer | None:
        """Our child; None for a server that ran already."""
        return self._server

    def facts(self) -> EngineFacts:
        return self._facts

    def statistics(self) -> EngineStatistics:
        """Of what went through this engine; the KV share is the server's, at most a second before the last answer."""
        return self._meter.statistics(self._config.engine.slots, self.version)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Sample one continuation; ``ValueError`` for a prompt or parameters that cannot be served. Seeds are not used.

        Raises ``ActorDied`` at once when the server dies.
        """
        self._calls.require_serving()
        longest = self._config.model.max_length
        prompt = checked_tokens("prompt", prompt_ids, longest - 1, self._blueprint.vocabulary).tolist()
        check_params(params)
        rid = uuid.uuid4().hex
        asked = request(rid, prompt, params, longest - len(prompt), self._blueprint.vocabulary, self._abilities)
        self._meter.begin()
        try:
            await self._calls.going()
            asked |= self._cache_key()
            pauses = self._pauses
            answer = await self._sampled(rid, asked)
            self._count(answer, self._pauses - pauses if self._config.engine.kv == "recompute" else 0)
        finally:
            self._meter.end()
        await self._ask_load()
        return generation(answer, params, self._decode, self._client.url)

    def _cache_key(self) -> dict[str, str]:
        """What lets a request reuse no more than the weights that serve now have computed."""
        return {"extra_key": self._calls.salt} if self._abilities.caches else {}

    def _count(self, answer: Any, retracted: int) -> None:
        """An answer of the server, in whose time it was told ``retracted`` times to compute all requests anew."""
        meta = answer["meta_info"]
        self._meter.count(
            generated=len(answer["output_ids"]),
            prefilled=meta["prompt_tokens"] - meta["cached_tokens"],
            preemptions=max(0, meta["num_retractions"] - retracted),
        )

    async def _sampled(self, rid: str, asked: dict[str, Any]) -> Any:
        try:
            return await self._calls.run(self._client.post("/generate", asked, within_s=None))
        except Refused as error:
            raise ValueError(str(error)) from error
        except asyncio.CancelledError:
            if self._calls.serving:
                await self._last_word("/abort_request", {"rid": rid})
            raise

    async def _last_word(self, path: str, body: Mapping[str, object]) -> None:
        """A call that nobody waits for any more. Should it fail, the server finds our connection closed."""
        try:
            await self._client.post(path, body, within_s=_LAST_WORD_S)
        except (Refused, ActorDied, TimeoutError) as error:
            log.info("%s at the end: %s", path, error)

    async def _ask_load(self) -> None:
        """How full the server is, at most once in ``_LOAD_EVERY_S``, and after an answer only."""
        if self._calls.serving and self._meter.due(_LOAD_EVERY_S):
            await self._calls.aside(self._measure())

    async def _measure(self) -> None:
        loads = await self._client.get("/v1/loads?include=core")
        self._meter.kv_used = float(loads["loads"][0]["token_usage"])

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        """As ``ports.Engine``; ``RuntimeError`` while paused, since SGLang computes nothing then.

        SGLang gives prompt log-probs at temperature 1. At another one every token costs a request of its own, with
        what comes before it as the prompt: exact, and slow for long sequences.
        """
        self._calls.require_serving()
        if not temperature > 0:
            raise ValueError(f"score: temperature must be over 0, got {temperature}")
        longest = self._config.model.max_length
        row = checked_tokens("score", token_ids, longest, self._blueprint.vocabulary).tolist()
        if self._calls.paused:
            raise RuntimeError("engine sglang: score while paused; SGLang computes nothing before resume")
        scores = np.zeros(len(row), dtype=np.float32)
        if len(row) > 1:
            ask = self._score_prompt(row) if temperature == 1 else self._score_tokens(row, temperature)
            scores[1:] = await self._calls.run(ask)
        return scores

    async def _score_prompt(self, row: list[int]) -> list[float]:
        asked = {
            "input_ids": row,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            **self._cache_key(),
        }
        answer = await self._client.post("/generate", asked, within_s=None)
        return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]

    async def _score_tokens(self, row: list[int], temperature: float) -> list[float]:
        asked = {
            "input_ids": [row[:end] for end in range(1, len(row))],
            "sampling_params": {"max_new_tokens": 1, "temperature": temperature, "ignore_eos": True},
            "return_logprob": True,
            "token_ids_logprob": [[token] for token in row[1:]],
            **self._cache_key(),
        }
        answers = await self._client.post("/generate", asked, within_s=None)
        return [answer["meta_info"]["output_token_ids_logprobs"][0][0][0] for answer in answers]

    async def pause(self) -> None:
        """Requests stay where they are (``engine.kv=keep``), or return to the queue to be computed anew."""
        self._calls.require_serving()
        if self._calls.paused:
            return
        self._calls.pause()
        self._pauses += 1
        self._meter.pause()
        mode = "in_place" if self._config.engine.kv == "keep" else "retract"
        await self._calls.run(self._client.post("/pause_generation", {"mode": mode}))

    async def resume(self) -> None:
        self._calls.require_serving()
        if not self._calls.paused:
            return
        await self._calls.run(self._client.post("/continue_generation", {"torch_empty_cache": False}))
        self._meter.resume()
        self._calls.resume()

    async def load(self, version: int, tensors: Mapping[str, object]) -> None:
        """As ``ports.Engine``. Once the first byte has gone there is no way back: what fails then ends the engine."""
        self._calls.require_serving()
        if not self._calls.paused:
            raise WeightSyncError(f"load of version {version} while generating: pause the engine first")
        verified = await asyncio.to_thread(self._blueprint.verify, tensors)  # which may copy what it puts together
        session = await self._begin_update()
        with self._calls.loading(version):
            async for body in self._bodies(version, verified):
                await self._calls.run(self._client.post("/update_weights_from_tensor", body))
            if session:
                await self._calls.run(self._client.post("/end_weight_update", {}))

    async def _bodies(self, version: int, verified: dict[str, torch.Tensor]) -> AsyncIterator[bytes]:
        """The last one has the label, and tells the server to forget what the old weights computed (``recompute``)."""
        copies, flush = self._abilities.copies, self._config.engine.kv == "recompute"
        if self._sees_shelf:
            where = await asyncio.to_thread(self._shelf.put, verified)
            yield placed(where, version=version, flush=flush, copies=copies)
            return
        *parts, last = buckets(verified.items())
        for bucket in parts:
            yield await asyncio.to_thread(by_value, bucket, version=None, flush=False, copies=copies)
        yield await asyncio.to_thread(by_value, last, version=version, flush=flush, copies=copies)

    async def _begin_update(self) -> bool:
        """Open a session; False where the server is of a release that has none."""
        try:
            await self._calls.run(self._client.post("/begin_weight_update", {}))
        except Refused as error:
            if error.status == 404:
                return False
            raise WeightSyncError(str(error)) from error
        return True

    async def close(self) -> None:
        """End our server, or leave the other one as it is; requests in flight end with ``CancelledError``."""
        if not await self._calls.close():
            return
        if self._watch:
            self._watch.cancel()
            await asyncio.wait({self._watch})
        if not self._server and self._calls.paused and not self._calls.failed:  # one that is not ours runs on
            await self._last_word("/continue_generation", {"torch_empty_cache": False})
        await self._client.close()
        if self._server:
            await self._server.close()
        self._shelf.close()

    async def _watch_server(self, server: SglangServer) -> None:
        self._calls.fail(await server.ended())


def _read_model(folder: str, dtype: str) -> tuple[Blueprint, Decode]:
    """What the model consists of, and its tokenizer's way from tokens to text, special tokens included."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def decode(token_ids: list[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return Blueprint.of(folder, dtype), decode
