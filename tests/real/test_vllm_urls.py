"""A vLLM server that runs already (``engine.urls``): the suite that every engine passes, and a run that shares it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: `make test-vllm` makes an environment that has it")

from conformance import GREEDY, SHAPES, SLOTS, EngineCase, generate_all, prompts
from conformance_ending import EndingConformance
from conformance_life import LifeConformance
from conformance_model import MAX_LENGTH, build_model
from conformance_weights import WeightConformance
from file_weights import in_a_file
from urls_support import check_a_run_that_outlives_its_host
from vllm_server import DEADLINE_S, KEY, Server, running_server
from vllm_support import settings

from streamrl.config import load_config
from streamrl.engines.http_client import ServerClient
from streamrl.engines.vllm.server_engine import KEY_VARIABLE, VllmServerEngine
from streamrl.errors import ConfigError
from streamrl.ports import Engine

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = build_model(tmp_path_factory.mktemp("model"), tied=True)
    with running_server(model, tmp_path_factory.mktemp("log") / "server.log", "--load-format=dummy") as server:
        yield server


def test_rollouters_share_a_running_server_which_outlives_its_host_and_the_run(server: Server, tmp_path: Path):
    check_a_run_that_outlives_its_host(
        "vllm", server.url, server.model.folder, tmp_path / "run", "eval.tasks=0", deadline_s=DEADLINE_S, env={}
    )
    assert server.process.poll() is None


def test_a_server_that_was_started_otherwise_is_refused_with_the_flags(server: Server):
    config = load_config(
        overrides=settings(
            f"model.max_length={MAX_LENGTH + 9}", "model.dtype=bfloat16", "model.head_dtype=bfloat16",
            f"engine.slots={SLOTS + 1}",
        )
    )  # fmt: skip
    with pytest.raises(ConfigError) as refused:
        asyncio.run(VllmServerEngine.start(config, str(server.model.folder), server.url))
    assert str(refused.value) == (
        f"vLLM at {server.url}: it lacks what a run needs; start it with --dtype bfloat16 "
        f'--hf-overrides \'{{"head_dtype": "bfloat16"}}\' --max-model-len {MAX_LENGTH + 10} --max-num-seqs {SLOTS + 1}'
    )


def test_a_server_of_another_model_is_refused(server: Server, tmp_path: Path):
    wide = build_model(tmp_path, tied=True, hidden=96)
    with pytest.raises(ConfigError, match=r"another model: .* is \[\d+, 64\] there and \[\d+, 96\] in model"):
        asyncio.run(VllmServerEngine.start(load_config(overrides=settings()), str(wide.folder), server.url))


def test_a_server_that_wants_another_key_is_refused(server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(KEY_VARIABLE, "another")
    with pytest.raises(ConfigError, match="wants another key"):
        asyncio.run(VllmServerEngine.start(load_config(overrides=settings()), str(server.model.folder), server.url))


@pytest.fixture(scope="module")
def engine_case(server: Server) -> Iterator[EngineCase]:
    config = load_config(overrides=settings())

    async def start() -> Engine:
        return await VllmServerEngine.start(config, str(server.model.folder), server.url)

    with EngineCase("vllm 0.32", server.model, start=start, kv="keep", kill=server.kill_core) as case:
        yield case


def test_a_server_that_was_left_paused_in_the_middle_of_an_update_is_taken_over(
    server: Server, engine_case: EngineCase
):
    async def run() -> None:
        await engine_case.install("A")
        client = ServerClient("vLLM", server.url, KEY)
        await client.post("/pause?mode=keep", {})
        await client.post("/start_weight_update", {})
        await client.close()
        await engine_case.engine.close()
        engine_case.engine = await engine_case.start()
        for which in ("B", "A"):
            await engine_case.install(which)
            await generate_all(engine_case, [(prompt, GREEDY) for prompt in prompts(4, seed=40)])

    engine_case.run(run())


def test_a_server_goes_on_with_its_own_copy_when_the_memory_it_read_changes(engine_case: EngineCase):
    weights = engine_case.model.weights

    async def run() -> None:
        engine, arrived, version = engine_case.engine, in_a_file(weights["A"]), engine_case.engine.version + 1
        for which, other in (("A", "B"), ("B", "A")):
            await engine.pause()
            await engine.load(version, arrived)
            engine_case.sets[version] = which
            for name, tensor in weights[other].items():
                arrived[name].copy_(tensor)
            await engine.resume()
            await generate_all(engine_case, [(prompt, GREEDY) for prompt in prompts(4, seed=41)])
            version += 1

    engine_case.run(run())


def test_every_kind_of_sampling_crosses_the_wire_with_its_processed_logprobs(engine_case: EngineCase):
    kinds = [replace(GREEDY, temperature=t, **shape) for t in (0.0, 0.7, 1.3) for shape in SHAPES.values()]
    asked = [(prompt, replace(params, seed=index)) for index, params in enumerate(kinds) for prompt in prompts(2)]

    async def run() -> None:
        await engine_case.install("A")
        await generate_all(engine_case, asked)

    engine_case.run(run())


class TestVllmServer(LifeConformance, WeightConformance, EndingConformance):
    """Its last test ends the server."""
