"""vLLM's V1 ``AsyncLLM`` as ``ports.Engine``: the scheduler and the model run in processes below this one (C6).

::

    this process                     EngineCore (and workers, with more than one device)
    generate, score ── ZeroMQ ─────► schedule, step, step …; outputs carry the label of the weights
    pause ─────────────────────────► stands between two steps, requests and KV cache stay
    load: shared memory ◄─ mapped ── layer-by-layer reload (``worker.py``), then the new label
    resume ────────────────────────► goes on

A token's version is the label under which its step ran, and labels change only between two steps.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from streamrl.engines.blueprint import Blueprint
from streamrl.engines.calls import Calls
from streamrl.engines.requests import check_params, checked_tokens
from streamrl.engines.shelf import Shelf
from streamrl.engines.vllm.adapter_plan import arriving_weights, check_placed, holding_arguments
from streamrl.engines.vllm.reports import reports
from streamrl.engines.vllm.settings import (
    engine_arguments,
    make_engine_args,
    set_process_environment,
    start_environment,
)
from streamrl.errors import ActorDied, ConfigError, WeightSyncError
from streamrl.ports import EngineFacts, EngineStatistics
from streamrl.schema import Config
from streamrl.sync.workers import finished
from streamrl.types import Generation, SamplingParams

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

    from streamrl.engines.vllm.counters import Counters

T = TypeVar("T")


class VllmEngine:
    """``ports.Engine`` over vLLM. Make it with ``start``.

    With ``engine.prefix_caching`` the cache is salted by the version under which a request was submitted: a request
    never reads what weights before those computed.
    """

    def __init__(self, config: Config, llm: AsyncLLM, counters: Counters, blueprint: Blueprint) -> None:
        from streamrl.engines.vllm.counters import Stopwatch

        self._config = config
        self._llm = llm
        self._counters = counters
        self._blueprint = blueprint
        self._longest = config.model.max_length
        self._numbers = itertools.count()
        self._shelf = Shelf()
        self._calls = Calls("engine vllm")
        self._in_flight = 0
        self._staged: int | None = None
        """The version that the second set of weights holds."""
        self._busy = Stopwatch()

    @classmethod
    async def start(cls, config: Config, model_folder: str, scratch: str | None = None) -> VllmEngine:
        """A running engine with random weights. Its sockets lie in ``scratch``; None: in a folder of its own.

        Raises ``ConfigError`` where vLLM is missing, refuses an argument, or cannot run the model.
        """
        require_vllm()
        blueprint = await asyncio.to_thread(Blueprint.of, model_folder, config.model.dtype)
        arriving = await asyncio.to_thread(arriving_weights, config, model_folder, blueprint)
        own_scratch = None if scratch else tempfile.mkdtemp(prefix="streamrl-vllm-")
        folder = scratch or own_scratch
        assert folder is not None
        set_process_environment(folder)
        # vLLM starts its processes in this thread, which has to live as long as they do: the loop goes on meanwhile.
        starter = ThreadPoolExecutor(1, thread_name_prefix="vllm-start")
        make = partial(_make_llm, config, model_folder, folder, blueprint)
        try:
            llm, counters = await asyncio.get_running_loop().run_in_executor(starter, make)
        except BaseException:  # whatever ends a start, also a cancellation: nothing may stay behind
            _remove(own_scratch)
            raise
        engine = cls(config, llm, counters, blueprint)
        engine._starter, engine._scratch = starter, own_scratch
        engine._arriving = arriving
        try:
            await engine._inspect()
        except BaseException:  # as above
            await engine.close()
            raise
        return engine

    _starter: ThreadPoolExecutor
    _scratch: str | None
    """The folder that is ours to remove."""
    _arriving: Blueprint
    """What ``load`` gets: the model, or with LoRA the adapter alone."""
    _adapter: LoRARequest | None = None
    """With LoRA, what every request carries."""
    _facts: EngineFacts

    @property
    def version(self) -> int:
        return self._calls.version

    def statistics(self) -> EngineStatistics:
        running = min(self._counters.running, self._in_flight)
        return EngineStatistics(
            running=running,
            waiting=self._in_flight - running,
            generated_tokens=self._counters.generated,
            prefilled_tokens=self._counters.prefilled,
            busy_s=self._busy.seconds,
            version=self.version,
            kv_used=self._counters.kv_used,
            preemptions=self._counters.preemptions,
        )

    def facts(self) -> EngineFacts:
        """What the worker and vLLM's final settings say; the head's dtype was seen in a forward pass."""
        return self._facts

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Sample one continuation; ``ValueError`` for a prompt or parameters that cannot be served.

        The same prompt, parameters, seed and weights give the same tokens.
        """
        from streamrl.engines.vllm.translation import generation, sampling_params

        self._calls.require_serving()
        prompt = checked_tokens("prompt", prompt_ids, self._longest - 1, self._blueprint.vocabulary).tolist()
        check_params(params)
        return generation(await self._track(self._ask(prompt, sampling_params(params, self._longest - len(prompt)))))

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        """Asked again where weights changed meanwhile, so that all scores are of one version."""
        from streamrl.engines.vllm.translation import prompt_scores, scoring_params

        self._calls.require_serving()
        if not 0 < temperature < float("inf"):
            raise ValueError(f"score: temperature must be over 0 and finite, got {temperature}")
        tokens = checked_tokens("score", token_ids, self._longest, self._blueprint.vocabulary).tolist()
        if len(tokens) == 1:
            return np.zeros(1, dtype=np.float32)
        while True:
            salt = self._calls.salt
            output = await self._track(self._ask(tokens, scoring_params(temperature)))
            if salt == self._calls.salt:
                return prompt_scores(output)

    async def pause(self) -> None:
        self._calls.require_serving()
        if self._calls.paused:
            return
        self._calls.pause()
        # Not ``pause_generation``: that is this call and a sleep of 20 ms for callers who want their outputs first.
        await self._call(self._llm.engine_core.pause_scheduler_async("keep", False))
        self._busy.set(busy=False)

    async def resume(self) -> None:
        self._calls.require_serving()
        if not self._calls.paused:
            return
        await self._call(self._llm.resume_generation())
        self._calls.resume()
        self._busy.set(busy=self._in_flight > 0)

    async def stage(self, version: int, tensors: Mapping[str, object]) -> None:
        """``ports.StagesWeights``, with ``sync.stage=device``: threads of the workers fill a second set of weights."""
        self._calls.require_serving()
        self.unstage()
        await finished(self._calls.run(self._fill_second_set(tensors)))
        self._staged = version

    def unstage(self) -> None:
        self._staged = None

    async def _fill_second_set(self, tensors: Mapping[str, object]) -> None:
        placed = await asyncio.to_thread(self._placed, tensors)
        said = await reports(lambda path: self._call(self._llm.collective_rpc("streamrl_stage", args=(placed, path))))
        if failed := [each for each in said if each]:
            raise WeightSyncError(f"vLLM could not stage the weights: {failed[0]}")

    async def load(self, version: int, tensors: Mapping[str, object]) -> None:
        """``WeightSyncError`` leaves the old weights serving; after any other error the engine must not go on."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._calls.require_serving()
        if not self._calls.paused:
            raise WeightSyncError(f"version {version}: pause the engine before load")
        placed = None
        if self._staged == version:
            self._staged = None
        else:
            placed = await asyncio.to_thread(self._placed, tensors)
        with self._calls.loading(version):
            if placed is None:
                await self._call(self._llm.collective_rpc("streamrl_exchange"))
            elif self._adapter is None:
                await self._call(self._llm.start_weight_update())
                await self._call(self._llm.update_weights(WeightTransferUpdateRequest(update_info=placed)))
                await self._call(self._llm.finish_weight_update())
            else:
                await self._call(self._llm.collective_rpc("streamrl_replace_adapter", args=(placed,)))
            await self._call(self._llm.update_weight_version(str(version)))
            if self._config.engine.kv == "recompute":
                await self._call(self._llm.reset_prefix_cache(reset_running_requests=True))

    def _placed(self, tensors: Mapping[str, object]) -> dict[str, Any]:
        return self._shelf.put(self._arriving.verify(tensors))

    async def close(self) -> None:
        """End vLLM's processes; requests in flight end with ``asyncio.CancelledError``. Idempotent."""
        if not await self._calls.close():
            return
        await asyncio.get_running_loop().run_in_executor(self._starter, partial(self._llm.shutdown, timeout=0))
        del self._llm  # its destructor needs modules that the interpreter's end may take before it
        self._starter.shutdown(wait=False)
        self._shelf.close()
        _remove(self._scratch)

    async def _inspect(self) -> None:
        """Prepare the workers, send one request through the model, and note how it was computed."""
        await self._call(self._llm.collective_rpc("streamrl_live_with", args=(os.getpid(),)))
        await self._call(self._llm.collective_rpc("streamrl_prepare"))
        if self._config.model.lora.rank:
            await self._hold_adapter()
        if self._config.sync.stage == "device":
            said: list[str] = await self._call(self._llm.collective_rpc("streamrl_keep_second_set"))
            if refused := [each for each in said if each]:
                raise ConfigError(f"sync.stage=device: {refused[0]}; set sync.stage=host")
        await self._call(self._llm.update_weight_version(str(self.version)))
        try:
            await self.score([0, 0])
        except ActorDied as error:
            raise ConfigError(f"engine=vllm: vLLM cannot run this model here; its log says why ({error})") from error
        self._facts = _facts(await self._call(self._llm.collective_rpc("streamrl_facts")), self._llm, self._config)

    async def _hold_adapter(self) -> None:
        """From here on every request is computed with the adapter, which adds nothing until the first load."""
        from streamrl.engines.vllm.adapters import adapter_request

        arguments = holding_arguments(self._config, self._arriving)
        check_placed(await self._call(self._llm.collective_rpc("streamrl_hold_adapter", kwargs=arguments)))
        self._adapter = adapter_request()
        await self._call(self._llm.add_lora(self._adapter))

    async def _track(self, request: Coroutine[Any, Any, T]) -> T:
        """Run ``request`` as one of those in flight."""
        self._in_flight += 1
        if self._in_flight == 1 and not self._calls.paused:
            self._busy.set(busy=True)
        try:
            return await request
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._busy.set(busy=False)

    async def _ask(self, tokens: list[int], params: Any) -> RequestOutput:
        """The finished request. Begun while paused, it waits here, so that its salt is that of the new weights."""
        await self._calls.going()
        prompt: Any = {"type": "token", "prompt_token_ids": tokens}
        if self._config.engine.prefix_caching:
            prompt["cache_salt"] = self._calls.salt
        return await self._call(self._last_output(prompt, params))

    async def _last_output(self, prompt: Any, params: Any) -> RequestOutput:
        """vLLM aborts the request where this task is cancelled."""
        request = self._llm.generate(prompt, params, str(next(self._numbers)), lora_request=self._adapter)
        outputs = [each async for each in request]
        return outputs[-1]  # with FINAL_ONLY there is but one

    async def _call(self, call: Coroutine[Any, Any, T]) -> T:
        return await self._calls.run(_alive(call))


async def _alive(call: Coroutine[Any, Any, T]) -> T:
    """``call``; ``ActorDied`` where vLLM's processes are gone."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        return await call
    except EngineDeadError as error:
        raise ActorDied("vLLM's engine process died; its traceback is above in this log") from error


def require_vllm() -> None:
    """``ConfigError`` where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"engine=vllm: vllm is not installed in {sys.executable}; pip install 'streamrl[vllm]', or point "
            "engine.python at an interpreter that has it (docs/engines.md)"
        )


def _make_llm(config: Config, folder: str, scratch: str, blueprint: Blueprint) -> tuple[AsyncLLM, Counters]:
    """Blocking, for as long as vLLM takes to start."""
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    from streamrl.engines.vllm.counters import Counters

    counters = Counters()
    cpu = current_platform.is_cpu()
    arguments = make_engine_args(engine_arguments(config, folder, blueprint, cpu=cpu))
    try:
        with start_environment(config, scratch, cpu=cpu):
            return AsyncLLM.from_engine_args(arguments, stat_loggers=[counters]), counters
    except (ValueError, RuntimeError, NotImplementedError) as error:  # what vLLM refuses, or its process died of
        reason = " ".join(str(error).split())
        raise ConfigError(f"engine=vllm: vLLM did not start: {reason:.300} (the log says more)") from error


def _facts(found: list[dict[str, Any]], llm: AsyncLLM, config: Config) -> EngineFacts:
    """From what each worker found and the settings that vLLM made of ours."""
    import vllm

    settings, mode = llm.vllm_config, llm.vllm_config.model_config.logprobs_mode
    return EngineFacts(
        engine=f"vllm {vllm.__version__}",
        dtype=found[0]["dtype"],
        head_dtype=next(each["head_dtype"] for each in found if each["head_dtype"]),
        tied=all(each["tied"] for each in found),
        logprobs="processed" if mode == "processed_logprobs" else str(mode),
        prefix_caching=bool(settings.cache_config.enable_prefix_caching),
        async_scheduling=bool(settings.scheduler_config.async_scheduling),
        cascade_attention=False,  # vLLM 0.32 has none any more
        chunked_prefill=bool(settings.scheduler_config.enable_chunked_prefill),
        kv=config.engine.kv,
    )


def _remove(folder: str | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
