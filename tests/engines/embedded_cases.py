"""The embedded engine over a conformance model."""

from __future__ import annotations

from conformance_case import SLOTS
from conformance_model import MAX_LENGTH, ConformanceModel

from streamrl.engines.embedded import EmbeddedEngine
from streamrl.policy.model import load_model
from streamrl.policy.tokenizer import character_tokenizer


async def started_engine(model: ConformanceModel, kv: str) -> EmbeddedEngine:
    tokenizer = character_tokenizer()
    engine = EmbeddedEngine(
        load_model(model.folder, str(model.dtype).removeprefix("torch.")),
        slots=SLOTS,
        max_length=MAX_LENGTH,
        kv=kv,
        head_dtype=str(model.head_dtype).removeprefix("torch."),
        decode=lambda token_ids: str(tokenizer.decode(token_ids, skip_special_tokens=False)),
    )
    await engine.start()
    return engine
