"""From settings to a running engine: one entry per ``engine.name``."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from streamrl.lora_schema import LoraConfig
from streamrl.ports import Engine
from streamrl.schema import Config


async def load_engine(config: Config, model_folder: str, url: str = "", scratch: str | None = None) -> Engine:
    """The engine that ``config.engine`` names, started, with the architecture in ``model_folder``.

    ``scratch``: a folder for files of the engine's processes, removed with the run; None: the engine makes its own.

    ``url``: of a running server, instead of an engine of the run. A run on servers (``engine.urls``) keeps an embedded
    engine for whatever else needs one.

    It serves version -1 until the first weights are loaded. Raises ``ConfigError`` where the engine's package is
    missing, or cannot run the model.
    """
    match "embedded" if config.engine.urls and not url else config.engine.name:
        case "embedded":
            return await load_embedded(config, model_folder)
        case "vllm" if url:
            from streamrl.engines.vllm.server_engine import VllmServerEngine

            return await VllmServerEngine.start(config, model_folder, url)
        case "vllm":
            from streamrl.engines.vllm.engine import VllmEngine

            return await VllmEngine.start(config, model_folder, scratch)
        case "sglang":
            from streamrl.engines.sglang.engine import SglangEngine

            return await SglangEngine.start(config, model_folder, url, scratch)
        case name:
            raise AssertionError(f"engine.name={name} passed validation and has no engine")


async def load_frozen_engine(config: Config, model_folder: str, scratch: str | None = None) -> Engine:
    """As ``load_engine``; it serves the weights in ``model_folder`` as version 0, without adapters."""
    from streamrl.policy.model import load_model

    whole = replace(config, model=replace(config.model, lora=LoraConfig()))
    engine = await load_engine(without_stage(whole), model_folder, scratch=scratch)
    try:
        model = await asyncio.to_thread(load_model, model_folder, config.model.dtype)
        await engine.pause()
        await engine.load(0, dict(model.named_parameters()))
        await engine.resume()
    except BaseException:  # whatever ends it, also a cancellation: nothing may stay behind
        await engine.close()
        raise
    return engine


def without_stage(config: Config) -> Config:
    """For an engine that gets its weights while it is paused, whatever ``sync.stage`` has rollouters do: room for a
    second set of them would be taken for nothing."""
    return replace(config, sync=replace(config.sync, stage="host"))


async def load_embedded(config: Config, model_folder: str) -> Engine:
    """An embedded engine that serves the weights in ``model_folder``, with adapters of 0 if any, as version -1."""
    from streamrl.engines.embedded import EmbeddedEngine
    from streamrl.policy.model import load_tokenizer
    from streamrl.policy.trained import load_served

    model = await asyncio.to_thread(load_served, config, model_folder, config.engine.device)
    tokenizer = await asyncio.to_thread(load_tokenizer, model_folder)  # the engine's own: its thread reads with it

    def decode(token_ids: list[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    engine = EmbeddedEngine(
        model,
        slots=config.engine.slots,
        max_length=config.model.max_length,
        kv=config.engine.kv,
        threads=config.engine.threads,
        head_dtype=config.model.head_dtype,
        decode=decode,
    )
    await engine.start()
    return engine
