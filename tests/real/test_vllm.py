"""vLLM itself, on this machine: the suite that every engine passes, and what is vLLM's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: `make test-vllm` makes an environment that has it")

from conformance import Conformance
from conformance_case import EngineCase, check_64_in_flight_across_5_updates
from conformance_model import MAX_LENGTH, build_model
from vllm_support import kill_vllm, settings

from streamrl.config import load_config
from streamrl.engines.blueprint import Blueprint
from streamrl.engines.vllm.engine import VllmEngine
from streamrl.engines.vllm.settings import engine_arguments, make_engine_args
from streamrl.errors import ConfigError
from streamrl.ports import Engine


@pytest.fixture(scope="module")
def engine_case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCase]:
    model = build_model(Path(tmp_path_factory.mktemp("model")), tied=True)
    config = load_config(overrides=settings())

    async def start() -> Engine:
        return await VllmEngine.start(config, str(model.folder))

    with EngineCase("vllm 0.32", model, start=start, kv="keep", kill=kill_vllm) as case:
        yield case


def test_64_requests_in_flight_across_5_updates_all_end_and_each_token_has_its_version(engine_case: EngineCase):
    engine_case.run(check_64_in_flight_across_5_updates(engine_case))


def test_settings_that_vllm_cannot_run_are_refused_in_one_line(engine_case: EngineCase):
    blueprint = Blueprint.of(str(engine_case.model.folder), "float32")
    unknown = load_config(overrides=settings("engine.args.max_num_batched_token=64"))
    with pytest.raises(ConfigError, match="max_num_batched_token: .* did you mean 'max_num_batched_tokens'"):
        make_engine_args(engine_arguments(unknown, "folder", blueprint, cpu=True))
    long = load_config(overrides=settings(f"model.max_length={MAX_LENGTH + 1}"))
    with pytest.raises(ConfigError, match=f"model.max_length={MAX_LENGTH + 1}: .* context of {MAX_LENGTH} tokens"):
        engine_arguments(long, "folder", blueprint, cpu=True)


class TestVllm(Conformance):
    """Its last test ends the engine."""
