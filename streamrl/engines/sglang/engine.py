"""SGLang behind ``ports.Engine``: requests, weights and pauses by HTTP.

======== ================================== ===========================================
state    entered by                         calls
======== ================================== ===========================================
serving  ``start``                          all
paused   ``pause``                          ``generate`` waits here; ``score`` is refused
failed   server's end, half-loaded weights  raise that failure; ``close`` works
closed   ``close``                          raise ``RuntimeError``; ``close`` is a no-op
======== ================================== ===========================================

Nobody asks whether the server is alive: a child's end is told by the kernel, a distant one's by the connections that
break. So a pause, however long, is never taken for death.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from streamrl.engines.blueprint import Blueprint
from streamrl.engines.http_client import Refused, ServerClient
from streamrl.engines.meter import Meter
from streamrl.engines.requests import check_params, checked_tokens
from streamrl.engines.sglang.facts import abilities_of, checked_info, facts_of, observed_head
from streamrl.engines.sglang.requests import Abilities, Decode, generation, request
from streamrl.engines.sglang.server import SglangServer
from streamrl.engines.sglang.weights import body, buckets
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
_T = TypeVar("_T")


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
        self._version = -1
        self._paused = False
        self._closed = False
        self._failure: Exception | None = None
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._pending: set[asyncio.Task[Any]] = set()
        self._watch: asyncio.Task[None] | None = None
        self._salt = uuid.uuid4().hex
        """Of the prefix cache: a new one with every load, and none that an engine on this server had before."""
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
        except BaseException:
            await engine.close()
            raise
        return engine

    async def _begin(self) -> None:
        if self._server:
            self._watch = asyncio.create_task(self._watch_server(self._server), name="sglang-watch")
        info = checked_info(await self._guarded(self._client.get("/server_info")), self._config, self._client.url)
        self._abilities = abilities_of(info)
        if not self._server:
            await self._guarded(self._take_over())
        head = None
        if self._abilities.processes:
            head = await self._guarded(observed_head(self._client))
        self._facts = facts_of(info, self._config, self._blueprint, head)
        await self._ask_load()
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

    @property
    def version(self) -> int:
        return self._version

    @property
    def server(self) -> SglangServer | None:
        """Our child; None for a server that ran already."""
        return self._server

    def facts(self) -> EngineFacts:
        return self._facts

    def statistics(self) -> EngineStatistics:
        """Of what went through this engine; the KV share is the server's, at most a second before the last answer."""
        return self._meter.statistics(self._config.engine.slots, self._version)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Sample one continuation; ``ValueError`` for a prompt or parameters that cannot be served. Seeds are not used.

        Raises ``ActorDied`` at once when the server dies.
        """
        self._require_serving()
        longest = self._config.model.max_length
        prompt = checked_tokens("prompt", prompt_ids, longest - 1, self._blueprint.vocabulary).tolist()
        check_params(params)
        rid = uuid.uuid4().hex
        asked = request(rid, prompt, params, longest - len(prompt), self._blueprint.vocabulary, self._abilities)
        self._meter.begin()
        try:
            while self._paused:  # the next update may have begun by the time that this task runs again
                await self._guarded(self._resumed.wait())
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
        return {"extra_key": self._salt} if self._abilities.caches else {}

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
            return await self._guarded(self._client.post("/generate", asked, within_s=None))
        except Refused as error:
            raise ValueError(str(error)) from error
        except asyncio.CancelledError:
            if not self._closed and self._failure is None:
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
        if self._closed or self._failure is not None or not self._meter.due(_LOAD_EVERY_S):
            return
        loads = await self._guarded(self._client.get("/v1/loads?include=core"))
        self._meter.kv_used = float(loads["loads"][0]["token_usage"])

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        """As ``ports.Engine``; ``RuntimeError`` while paused, since SGLang computes nothing then.

        SGLang gives prompt log-probs at temperature 1. At another one every token costs a request of its own, with
        what comes before it as the prompt: exact, and slow for long sequences.
        """
        self._require_serving()
        if not temperature > 0:
            raise ValueError(f"score: temperature must be over 0, got {temperature}")
        longest = self._config.model.max_length
        row = checked_tokens("score", token_ids, longest, self._blueprint.vocabulary).tolist()
        if self._paused:
            raise RuntimeError("engine sglang: score while paused; SGLang computes nothing before resume")
        scores = np.zeros(len(row), dtype=np.float32)
        if len(row) > 1:
            ask = self._score_prompt(row) if temperature == 1 else self._score_tokens(row, temperature)
            scores[1:] = await self._guarded(ask)
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
        self._require_serving()
        if self._paused:
            return
        self._resumed.clear()
        self._paused = True
        self._pauses += 1
        self._meter.pause()
        mode = "in_place" if self._config.engine.kv == "keep" else "retract"
        await self._guarded(self._client.post("/pause_generation", {"mode": mode}))

    async def resume(self) -> None:
        self._require_serving()
        if not self._paused:
            return
        await self._guarded(self._client.post("/continue_generation", {"torch_empty_cache": False}))
        self._paused = False
        self._meter.resume()
        self._resumed.set()

    async def load(self, version: int, tensors: Mapping[str, object]) -> None:
        """As ``ports.Engine``. Once the first bucket has gone there is no way back: what fails then ends the engine."""
        self._require_serving()
        if not self._paused:
            raise WeightSyncError(f"load of version {version} while generating: pause the engine first")
        verified = self._blueprint.verify(tensors)
        session = await self._begin_update()
        try:
            await self._send(version, list(verified.items()))
            if session:
                await self._guarded(self._client.post("/end_weight_update", {}))
        except BaseException as error:
            reason = f"version {version} was half loaded when this happened: {error or type(error).__name__}"
            failure = ActorDied(f"SGLang at {self._client.url}: {reason}; the engine must be replaced")
            self._fail(failure)
            if isinstance(error, Exception):
                raise failure from error
            raise
        self._version = version
        self._salt = uuid.uuid4().hex

    async def _begin_update(self) -> bool:
        """Open a session; False where the server is of a release that has none."""
        try:
            await self._guarded(self._client.post("/begin_weight_update", {}))
        except Refused as error:
            if error.status == 404:
                return False
            raise WeightSyncError(str(error)) from error
        return True

    async def _send(self, version: int, named: list[tuple[str, Any]]) -> None:
        parts = list(buckets(named))
        for index, bucket in enumerate(parts):
            last = index == len(parts) - 1
            flush = last and self._config.engine.kv == "recompute"
            label = version if last else None
            data = await asyncio.to_thread(body, bucket, version=label, flush=flush, copies=self._abilities.copies)
            try:
                await self._guarded(self._client.post("/update_weights_from_tensor", data))
            except Refused as error:
                if "Weights were updated" not in error.message:  # else only the flush of its cache was not possible
                    raise

    async def close(self) -> None:
        """End our server, or leave the other one as it is; requests in flight end with ``CancelledError``."""
        if self._closed:
            return
        self._closed = True
        for task in list(self._pending):
            task.cancel()
        if self._pending:
            await asyncio.wait(self._pending)
        if self._watch:
            self._watch.cancel()
            await asyncio.wait({self._watch})
        if not self._server and self._paused and self._failure is None:  # one that is not ours runs on
            await self._last_word("/continue_generation", {"torch_empty_cache": False})
        await self._client.close()
        if self._server:
            await self._server.close()

    # -- the ends of it ----------------------------------------------------------------------------------------------

    def _require_serving(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise RuntimeError("engine sglang is closed: build a new one")

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

    async def _watch_server(self, server: SglangServer) -> None:
        self._fail(await server.ended())


def _read_model(folder: str, dtype: str) -> tuple[Blueprint, Decode]:
    """What the model consists of, and its tokenizer's way from tokens to text, special tokens included."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def decode(token_ids: list[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return Blueprint.of(folder, dtype), decode
