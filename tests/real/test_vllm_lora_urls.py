"""A vLLM server that runs already, whose adapter a run replaces alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: `make test-vllm` makes an environment that has it")

from conformance_case import GREEDY, EngineCase, generate_all, prompts
from conformance_lora import LORA, AdapterConformance, build_adapted_model
from urls_support import check_a_run_that_outlives_its_host
from vllm_server import DEADLINE_S, Server, running_server
from vllm_support import settings

from streamrl.config import load_config
from streamrl.engines.vllm.server_engine import VllmServerEngine
from streamrl.errors import ConfigError
from streamrl.ports import Engine

pytestmark = pytest.mark.timeout(900)

LAYERS = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
CHOSEN = (f"model.lora.rank={LORA.rank}", f"model.lora.alpha={LORA.alpha}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model, log = build_adapted_model(tmp_path_factory.mktemp("model")), tmp_path_factory.mktemp("log") / "server.log"
    flags = ("--enable-lora", "--max-lora-rank=8", "--lora-target-modules", *LAYERS)
    with running_server(model, log, *flags, environment={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}) as server:
        yield server


def test_a_run_with_adapters_on_a_running_server_outlives_its_host(server: Server, tmp_path: Path):
    check_a_run_that_outlives_its_host(
        "vllm",
        server.url,
        server.model.folder,
        tmp_path / "run",
        "eval.tasks=0",
        *CHOSEN,
        deadline_s=DEADLINE_S,
        env={},
    )
    assert server.process.poll() is None


def test_a_server_without_room_for_the_adapter_is_refused_with_the_flags(server: Server):
    config = load_config(overrides=settings("model.lora.rank=9", "model.lora.targets=[q_proj,o_proj]"))
    with pytest.raises(ConfigError) as refused:
        asyncio.run(VllmServerEngine.start(config, str(server.model.folder), server.url))
    assert str(refused.value).endswith("start it with --max-lora-rank 16 --lora-target-modules o_proj q_proj")


def test_a_run_that_trains_the_whole_model_is_refused_by_a_server_of_adapters(server: Server):
    with pytest.raises(ConfigError, match="this run trains the whole model; start it without --enable-lora"):
        asyncio.run(VllmServerEngine.start(load_config(overrides=settings()), str(server.model.folder), server.url))


@pytest.fixture(scope="module")
def engine_case(server: Server) -> Iterator[EngineCase]:
    config = load_config(overrides=settings(*CHOSEN))

    async def start() -> Engine:
        return await VllmServerEngine.start(config, str(server.model.folder), server.url)

    with EngineCase("vllm 0.32", server.model, start=start, kv="keep") as case:
        yield case


def test_the_next_run_on_the_server_begins_with_the_base(engine_case: EngineCase):
    async def run() -> None:
        await engine_case.install("A")
        await engine_case.engine.close()
        engine_case.engine = await engine_case.start()
        row = prompts(1, longest=60, seed=53)[0]
        expected = engine_case.model.score("base", row)
        np.testing.assert_allclose(await engine_case.engine.score(row), expected, rtol=0, atol=1e-4)
        for which in ("B", "A"):
            await engine_case.install(which)
            await generate_all(engine_case, [(prompt, GREEDY) for prompt in prompts(4, seed=40)])

    engine_case.run(run())


class TestAdaptersOfAServer(AdapterConformance):
    """The suite's."""
