"""A vLLM server that runs already (``engine.urls``): the suite that every engine passes, and a run that shares it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: `make test-vllm` makes an environment that has it")

from conformance import GREEDY, SHAPES, SLOTS, EngineCase, generate_all, prompts
from conformance_ending import EndingConformance
from conformance_life import LifeConformance
from conformance_model import MAX_LENGTH, ConformanceModel, build_model
from conformance_weights import WeightConformance
from vllm_support import settings

from streamrl.config import load_config
from streamrl.engines.http_client import ServerClient
from streamrl.engines.vllm.server_engine import KEY_VARIABLE, VllmServerEngine
from streamrl.errors import ConfigError
from streamrl.ports import Engine

pytestmark = pytest.mark.timeout(900)

DEADLINE_S = 400.0
KEY = "a key of the test"
FLAGS = (
    "--dtype=float32", '--hf-overrides={"head_dtype": "float32"}', "--logprobs-mode=processed_logprobs",
    f"--max-model-len={MAX_LENGTH + 1}", f"--max-num-seqs={SLOTS}", "--no-async-scheduling",
    "--worker-extension-cls=streamrl.engines.vllm.worker.WorkerExtension",
    '--weight-transfer-config={"backend": "streamrl"}', "--enable-scale-out", "--enable-prompt-tokens-details",
    "--enable-prefix-caching", "--load-format=dummy", "--enforce-eager", f"--kv-cache-memory-bytes={64 << 20}",
)  # fmt: skip
"""With a cache of prefixes, which is what a server on a GPU has unless it is told otherwise."""
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1", "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "VLLM_API_KEY": KEY, "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}  # fmt: skip
DIE_WITH_PARENT = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
os.execv(sys.executable, [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *sys.argv[1:]])
"""


@dataclass
class Server:
    """vLLM's command of the same name does not start where it was installed as ``vllm-cpu``; its module does."""

    model: ConformanceModel
    url: str
    process: subprocess.Popen[bytes]

    def kill_core(self, engine: Engine) -> None:
        """End the processes that hold the model."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            if child.name().startswith("VLLM::"):
                child.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = build_model(tmp_path_factory.mktemp("model"), tied=True)
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    log = tmp_path_factory.mktemp("log") / "server.log"
    # Engines that other tests held in this process have set variables for themselves.
    untouched = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", DIE_WITH_PARENT, f"--model={model.folder}", "--host=127.0.0.1", f"--port={port}",
             *FLAGS],
            stdout=output, stderr=subprocess.STDOUT, env=untouched | ENVIRONMENT, start_new_session=True,
        )  # fmt: skip
    server = Server(model, f"http://127.0.0.1:{port}", process)
    try:
        wait_until_ready(server, log)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(KEY_VARIABLE, KEY)
            yield server
    finally:
        left = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
        for child in psutil.wait_procs(left, timeout=20)[1]:
            child.kill()


def wait_until_ready(server: Server, log: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline and server.process.poll() is None:
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=5):
                return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.2)  # the server of another program has no event to wait on
    pytest.fail(f"vLLM's server did not start: {log.read_text()[-2000:]}")


def run_lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def launch(server: Server, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "streamrl.cli", "launch", "--run-dir", str(folder), f"model.name={server.model.folder}",
         "model.max_length=64", "sampling.max_tokens=8", "env=ring_envs:Digits", "group.size=4", "group.per_step=4",
         f"engine.slots={SLOTS}", "engine=vllm", f"engine.urls=[{server.url}]", "eval.tasks=0", "wandb=disabled",
         *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=Path(__file__).parents[1] / "ring",
    )  # fmt: skip


def test_rollouters_share_a_running_server_which_outlives_its_host_and_the_run(server: Server, tmp_path: Path):
    folder = tmp_path / "run"
    run = launch(server, folder, "--rollouts", "2", "--steps", "8")
    try:
        deadline = time.monotonic() + DEADLINE_S
        while len(run_lines(folder / "metrics.jsonl")) < 2 and run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)  # a file written by another process has no event to wait on
        ready = {each["actor"]: each for each in run_lines(folder / "events.jsonl") if each["event"] == "actor_ready"}
        if run.poll() is None:
            assert ready["engine-0"]["url"] == server.url
            os.kill(ready["engine-0"]["pid"], signal.SIGKILL)
        output, _ = run.communicate(timeout=DEADLINE_S)
    finally:
        run.kill()
    assert run.returncode == 0, output
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["restarts"]) == ("completed", 8, 1)
    assert (summary["groups"]["lost"], summary["groups"]["duplicates_trained"]) == (0, 0)
    assert all(gate["passed"] for gate in summary["parity"].values())
    assert max(line["mismatch/rms"] for line in run_lines(folder / "metrics.jsonl")) <= 1e-4
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


def test_every_kind_of_sampling_crosses_the_wire_with_its_processed_logprobs(engine_case: EngineCase):
    kinds = [replace(GREEDY, temperature=t, **shape) for t in (0.0, 0.7, 1.3) for shape in SHAPES.values()]
    asked = [(prompt, replace(params, seed=index)) for index, params in enumerate(kinds) for prompt in prompts(2)]

    async def run() -> None:
        await engine_case.install("A")
        await generate_all(engine_case, asked)

    engine_case.run(run())


class TestVllmServer(LifeConformance, WeightConformance, EndingConformance):
    """Its last test ends the server."""
