"""A whole run whose rollouters share an SGLang server that runs already (``engine.urls``)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from conformance_model import ConformanceModel, build_model
from sglang_interpreter import PYTHON, needs_sglang
from urls_support import LENGTH, check_a_run_that_outlives_its_host

from streamrl.config import load_config
from streamrl.engines.sglang.engine import KEY_VARIABLE
from streamrl.engines.sglang.server import SglangServer

pytestmark = [needs_sglang, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ConformanceModel:
    return build_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: ConformanceModel) -> Iterator[SglangServer]:
    runner = asyncio.Runner()
    settings = [
        "engine=sglang",
        f"engine.python={PYTHON}",
        "engine.slots=16",
        f"model.max_length={LENGTH}",
        "sampling.max_tokens=8",
        "liveness.start_timeout_s=300",  # a busy machine needs minutes for what takes 25 s on an idle one
    ]
    server = runner.run(SglangServer.start(load_config(overrides=settings), str(model.folder)))
    yield server
    runner.run(server.close())
    runner.close()


def test_rollouters_share_a_running_server_which_outlives_its_host_and_the_run(
    model: ConformanceModel, server: SglangServer, tmp_path: Path
):
    check_a_run_that_outlives_its_host(
        "sglang", server.url, model.folder, tmp_path / "run", "eval.tasks=16",
        deadline_s=240, env={KEY_VARIABLE: server.key},
    )  # fmt: skip
    os.kill(server.pid, 0)  # it is there still
