"""An engine in another process does what every engine must, over its socket: the weights come to its host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conformance import Conformance
from conformance_case import SLOTS, EngineCase
from conformance_model import MAX_LENGTH, ConformanceModel, build_model
from shared_support import Shared

from streamrl.engines.embedded import EmbeddedEngine
from streamrl.policy.model import load_model
from streamrl.policy.tokenizer import character_tokenizer

TOKENIZER = character_tokenizer()


def decode(token_ids: list[int]) -> str:
    return str(TOKENIZER.decode(token_ids, skip_special_tokens=False))


@pytest.fixture(scope="module")
def engine_case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCase]:
    model = build_model(tmp_path_factory.mktemp("model"), tied=True)
    with EngineCase("embedded", model, lambda: started(model), "keep") as case:
        yield case


async def started(model: ConformanceModel) -> Shared:
    engine = EmbeddedEngine(load_model(model.folder, "float32"), slots=SLOTS, max_length=MAX_LENGTH, decode=decode)
    await engine.start()
    shared = Shared([engine], SLOTS)
    await shared.begin()
    return shared


class TestShared(Conformance):
    pass
