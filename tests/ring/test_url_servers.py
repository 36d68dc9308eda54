"""Runs on several servers that somebody else started (``engine.urls``), of which some die."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "uniform_server.py"


class Server:
    def __init__(self, port: int = 0) -> None:
        self.process = subprocess.Popen([sys.executable, str(PROGRAM), str(port)], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        """Idempotent."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Start servers; they are dead when the test is over."""
    servers: list[Server] = []

    def start(port: int = 0) -> Server:
        servers.append(Server(port))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


def run_on(launch: Any, servers: list[Server], *arguments: str) -> Any:
    urls = ",".join(server.url for server in servers)
    return launch(
        "engine=sglang", f"engine.urls=[{urls}]", "--rollouts", "2", "eval.tasks=0", "parity=warn",
        "sync.canary_every=0", *arguments,
    )  # fmt: skip


def test_a_run_completes_on_the_other_servers_when_one_dies_for_good(launch: Any, serve: Callable[..., Server]):
    servers = [serve(), serve()]
    ring = run_on(launch, servers, "--steps", "12", "liveness.max_restarts=1")
    ring.wait_for_step(2)
    servers[0].kill()
    assert ring.wait() == 0, ring.output + ring.logs()
    summary = ring.summary()
    assert (summary["status"], summary["steps"], summary["restarts"]) == ("completed", 12, 0)
    assert (summary["groups"]["lost"], summary["groups"]["duplicates_trained"]) == (0, 0)
    lost = [event for event in ring.events() if event["event"] == "actor_lost" and event["actor"] == "engine-0"]
    assert len(lost) >= 2, "it was sought again"


def test_a_server_that_is_started_again_takes_part_again(launch: Any, serve: Callable[..., Server]):
    servers = [serve(), serve()]
    ring = run_on(launch, servers, "--steps", "100000", "liveness.max_restarts=0")
    ring.wait_for_step(2)
    servers[0].kill()
    ring.wait_for("actor_lost", "engine-0")
    serve(servers[0].port)
    ring.wait_for("actor_restarted", "engine-0")
    committed = len(ring.metrics())
    ring.wait_until(lambda: _rollouters(ring, committed) == 2 or None, "an update of both servers")
    ring.process.terminate()
    ring.wait()
    assert ring.summary()["restarts"] == 1


def _rollouters(ring: Any, since: int) -> float:
    """Engines that took the newest update; 0 without one after the step ``since``."""
    lines = ring.metrics()
    return lines[-1]["sync/rollouters"] if len(lines) > since else 0


def test_a_run_ends_when_its_last_server_stays_away(launch: Any, serve: Callable[..., Server]):
    server = serve()
    ring = run_on(launch, [server], "--steps", "100000", "liveness.max_restarts=2")
    ring.wait_for_step(2)
    server.kill()
    assert ring.wait() == 1
    assert "gave up after 2 restarts" in ring.summary()["reason"]
