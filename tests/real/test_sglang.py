"""SGLang itself, on this machine: the suite that every engine passes, under both KV policies.

Its server runs in an environment of its own, the rest of streamrl in this one.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import psutil
import pytest
from conformance import Conformance
from conformance_case import SLOTS, EngineCase
from conformance_model import MAX_LENGTH, build_model
from sglang_interpreter import PYTHON, needs_sglang

from streamrl.config import load_config
from streamrl.engines.sglang.engine import SglangEngine
from streamrl.ports import Engine

pytestmark = [needs_sglang, pytest.mark.timeout(600)]

CASES = {"keep-tied": ("keep", True), "recompute-untied": ("recompute", False)}


def kill_scheduler(engine: Engine) -> None:
    """As the kernel does when memory runs out: the process that holds the model, not the one that we started."""
    assert isinstance(engine, SglangEngine)
    assert engine.server is not None
    (holder,) = [
        child
        for child in psutil.Process(engine.server.pid).children(recursive=True)
        if child.cmdline() and child.cmdline()[0].startswith("sglang::scheduler")
    ]
    os.kill(holder.pid, signal.SIGKILL)


@pytest.fixture(scope="module", params=CASES)
def engine_case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCase]:
    kv, tied = CASES[request.param]
    model = build_model(tmp_path_factory.mktemp("model"), tied=tied)
    config = load_config(
        overrides=[
            "engine=sglang",
            f"engine.python={PYTHON}",
            f"engine.slots={SLOTS}",
            f"engine.kv={kv}",
            f"model.max_length={MAX_LENGTH}",
            "liveness.start_timeout_s=300",
        ]
    )

    async def start() -> Engine:
        return await SglangEngine.start(config, str(model.folder))

    with EngineCase("sglang 0.5", model, start, kv, seeded=False, kill=kill_scheduler, deadline_s=300) as case:
        yield case


class TestSglang(Conformance):
    pass
