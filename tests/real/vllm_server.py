"""A vLLM server of a test's own, as somebody else would have started it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from conformance_case import SLOTS
from conformance_model import MAX_LENGTH, ConformanceModel

from streamrl.engines.vllm.server_engine import KEY_VARIABLE
from streamrl.ports import Engine

DEADLINE_S = 400.0
KEY = "a key of the test"
FLAGS = (
    "--dtype=float32", '--hf-overrides={"head_dtype": "float32"}', "--logprobs-mode=processed_logprobs",
    f"--max-model-len={MAX_LENGTH + 1}", f"--max-num-seqs={SLOTS}", "--no-async-scheduling",
    "--worker-extension-cls=streamrl.engines.vllm.worker.WorkerExtension",
    '--weight-transfer-config={"backend": "streamrl"}', "--enable-scale-out", "--enable-prompt-tokens-details",
    "--enable-prefix-caching", "--enforce-eager", f"--kv-cache-memory-bytes={64 << 20}",
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


@contextmanager
def running_server(
    model: ConformanceModel, log: Path, *flags: str, environment: dict[str, str] | None = None
) -> Iterator[Server]:
    """Over ``model``, with ``FLAGS`` and ``flags``; what it says goes to ``log``."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    # Engines that other tests held in this process have set variables for themselves.
    untouched = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    # vLLM leaves sockets behind where it is ended. Not in a folder of pytest's: their paths would be too long.
    scratch = tempfile.mkdtemp(prefix="vllm-")
    places = {"TMPDIR": scratch, "VLLM_RPC_BASE_PATH": scratch}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", DIE_WITH_PARENT, f"--model={model.folder}", "--host=127.0.0.1", f"--port={port}",
             *FLAGS, *flags],
            stdout=output, stderr=subprocess.STDOUT, env=untouched | ENVIRONMENT | places | (environment or {}),
            start_new_session=True,
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
        shutil.rmtree(scratch)


def wait_until_ready(server: Server, log: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline and server.process.poll() is None:
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=5):
                return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.2)  # the server of another program has no event to wait on
    pytest.fail(f"vLLM's server did not start: {log.read_text()[-2000:]}")
