"""vLLM over a mixture of experts: what travels as one tensor of all experts is loaded expert by expert."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: `make test-vllm` makes an environment that has it")

from conformance_case import EngineCase
from conformance_model import build_model
from conformance_weights import WeightConformance
from vllm_support import settings

from streamrl.config import load_config
from streamrl.engines.vllm.engine import VllmEngine
from streamrl.ports import Engine


@pytest.fixture(scope="module")
def engine_case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    model = build_model(tmp_path_factory.mktemp("model"), tied=False, experts=4)
    config = load_config(overrides=settings())

    async def start() -> Engine:
        return await VllmEngine.start(config, str(model.folder))

    with EngineCase("vllm", model, start, "keep", deadline_s=240.0) as case:
        yield case


class TestMixture(WeightConformance):
    """The weights of its experts are not a multiple of what vLLM's kernel on a CPU packs: it pads them."""
