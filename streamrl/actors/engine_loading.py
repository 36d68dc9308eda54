"""From settings to a running engine."""

from __future__ import annotations

import asyncio

from streamrl.engines.embedded import EmbeddedEngine
from streamrl.policy.model import load_model, load_tokenizer
from streamrl.schema import Config


async def load_engine(config: Config, model_folder: str) -> EmbeddedEngine:
    """The engine that ``config.engine`` names, started, with the architecture in ``model_folder``.

    It serves version -1 until the first weights are loaded.
    """
    model = await asyncio.to_thread(load_model, model_folder, config.model.dtype)
    tokenizer = await asyncio.to_thread(load_tokenizer, model_folder)  # the engine's own: its thread reads with it

    def decode(token_ids: list[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    engine = EmbeddedEngine(
        model,
        slots=config.engine.slots,
        max_length=config.model.max_length,
        kv=config.engine.kv,
        threads=config.engine.threads,
        decode=decode,
    )
    await engine.start()
    return engine
