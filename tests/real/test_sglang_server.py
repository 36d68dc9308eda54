"""A running SGLang server that a run takes over by its URL, and what becomes of a server when its owner dies."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from conformance import prompts
from conformance_model import MAX_LENGTH, ConformanceModel, build_model, distribution
from file_weights import in_a_file
from sglang_interpreter import PYTHON, needs_sglang

from streamrl.config import load_config
from streamrl.engines.sglang import weights
from streamrl.engines.sglang.engine import KEY_VARIABLE, SglangEngine
from streamrl.engines.sglang.server import SglangServer
from streamrl.errors import ActorDied, ConfigError
from streamrl.schema import Config
from streamrl.types import SamplingParams

pytestmark = [needs_sglang, pytest.mark.timeout(600)]

PATIENT = "liveness.start_timeout_s=300"  # a busy machine needs minutes for what takes 25 s on an idle one
GREEDY = SamplingParams(temperature=0, max_tokens=24)


def settings(*overrides: str) -> Config:
    return load_config(
        overrides=["engine=sglang", "engine.slots=16", f"model.max_length={MAX_LENGTH}", PATIENT, *overrides]
    )


OWNER = """
import asyncio, sys
from streamrl.config import load_config
from streamrl.engines.sglang.engine import SglangEngine

async def main():
    config = load_config(overrides=sys.argv[3:])
    engine = await SglangEngine.start(config, sys.argv[1], scratch=sys.argv[2])
    print(engine.server.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_nothing_is_left_of_a_server_whose_owner_is_killed(tmp_path: Path) -> None:
    for name in ("model", "scratch", "other"):
        (tmp_path / name).mkdir()
    model = build_model(tmp_path / "model")
    overrides = [
        "engine=sglang",
        f"engine.python={PYTHON}",
        "engine.slots=4",
        f"model.max_length={MAX_LENGTH}",
        PATIENT,
    ]
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(model.folder), str(tmp_path / "scratch"), *overrides],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path / "other")},
    )  # fmt: skip
    try:
        assert owner.stdout is not None
        server = psutil.Process(int(owner.stdout.readline()))
        family = [server, *server.children(recursive=True)]
        maps = Path(f"/proc/{server.pid}/maps").read_text().splitlines()
    finally:
        owner.kill()
        owner.wait()
    assert len(family) >= 3
    _, alive = psutil.wait_procs([each for each in family if each.status() != psutil.STATUS_ZOMBIE], timeout=0)
    psutil.wait_procs(alive, timeout=10)
    assert [each for each in family if each.is_running() and each.status() != psutil.STATUS_ZOMBIE] == []
    shared = [line for line in maps if "/dev/shm/sglang" in line]
    assert shared
    assert [line for line in shared if not line.endswith("(deleted)")] == []
    assert [path for path in tmp_path.rglob("*") if path.is_socket()] == []
    assert list((tmp_path / "other").iterdir()) == [], (
        "what is left lies in the run's own folder, which the run removes"
    )


class Running:
    """A server with a prefix cache, as somebody else may have started it, and the loop that it is watched from."""

    def __init__(self, model: ConformanceModel) -> None:
        self.model = model
        self._runner = asyncio.Runner()
        config = settings(f"engine.python={PYTHON}", "engine.prefix_caching=true")
        self.server = self.run(SglangServer.start(config, str(model.folder)))

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(asyncio.wait_for(coroutine, 300))

    def close(self) -> None:
        self.run(self.server.close())
        self._runner.close()

    @asynccontextmanager
    async def engine(self, *overrides: str) -> AsyncIterator[SglangEngine]:
        engine = await SglangEngine.start(settings(*overrides), str(self.model.folder), self.server.url)
        try:
            yield engine
        finally:
            await engine.close()

    async def install(self, engine: SglangEngine, which: str) -> None:
        await engine.pause()
        await engine.load(engine.version + 1, self.model.weights[which])
        await engine.resume()

    def check(self, which: str, prompt: list[int], params: SamplingParams, answer: Any) -> None:
        """Every log-prob is the reference's under the weights ``which``."""
        said = answer.token_ids.tolist()
        rows = self.model.logits(which, [*prompt, *said])[len(prompt) - 1 : -1]
        expected = [
            distribution(row, prompt, said[:index], params)[0][token]
            for index, (row, token) in enumerate(zip(rows, said, strict=True))
        ]
        np.testing.assert_allclose(answer.logprobs, expected, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(build_model(tmp_path_factory.mktemp("model")))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(KEY_VARIABLE, running.server.key)
        yield running
    running.close()


def test_a_server_is_taken_over_left_running_and_taken_over_again_though_it_was_left_paused(running: Running) -> None:
    async def run() -> None:
        for which in ("A", "B"):
            async with running.engine() as engine:
                assert (engine.version, engine.server) == (-1, None)
                assert engine._sees_shelf, "it is on this machine"
                await running.install(engine, which)
                answer = await engine.generate([9, 10], GREEDY)
                running.check(which, [9, 10], GREEDY, answer)
                assert answer.versions == [(0, 24)]
                await engine.pause()

    running.run(run())


def test_a_server_that_does_not_see_our_memory_gets_the_weights_by_value(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "BUCKET_BYTES", 1 << 14)  # several of them

    async def run() -> None:
        async with running.engine() as engine:
            engine._sees_shelf = False
            for which in ("A", "B"):
                await running.install(engine, which)
                running.check(which, [9, 10], GREEDY, await engine.generate([9, 10], GREEDY))

    running.run(run())


def test_a_server_goes_on_with_its_own_copy_when_the_memory_it_read_changes(running: Running) -> None:
    async def run() -> None:
        async with running.engine() as engine:
            arrived = in_a_file(running.model.weights["A"])
            await engine.pause()
            await engine.load(0, arrived)
            for name, tensor in running.model.weights["B"].items():
                arrived[name].copy_(tensor)
            await engine.resume()
            running.check("A", [9, 10], GREEDY, await engine.generate([9, 10], GREEDY))
            await engine.pause()
            await engine.load(1, arrived)
            await engine.resume()
            running.check("B", [9, 10], GREEDY, await engine.generate([9, 10], GREEDY))

    running.run(run())


def test_another_key_is_refused_in_one_line(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "wrong")
    with pytest.raises(ConfigError, match="wants another key"):
        running.run(running.engine().__aenter__())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [(["model.dtype=bfloat16"], "model.dtype=bfloat16"), ([f"model.max_length={MAX_LENGTH + 99}"], "--context-length")],
)
def test_a_server_that_does_not_fit_the_run_is_refused(running: Running, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        running.run(running.engine(*overrides).__aenter__())


def test_an_equal_beginning_is_reused_within_a_version_and_never_across_an_update(running: Running) -> None:
    prompt = (prompts(1, longest=60, seed=1)[0] + list(range(8, 60)))[:60]

    async def run() -> None:
        async with running.engine() as engine:
            for which in ("A", "B", "A"):
                await running.install(engine, which)
                began = engine.statistics().prefilled_tokens
                first = await engine.generate(prompt, GREEDY)
                once = engine.statistics().prefilled_tokens
                again = await engine.generate(prompt, GREEDY)
                assert once - began == len(prompt)
                assert engine.statistics().prefilled_tokens - once < len(prompt) // 2
                running.check(which, prompt, GREEDY, first)
                running.check(which, prompt, GREEDY, again)
                for temperature in (1.0, 0.7):
                    score = await engine.score(prompt, temperature)
                    np.testing.assert_allclose(score, running.model.score(which, prompt, temperature), atol=1e-4)
            assert engine.facts().prefix_caching

    running.run(run())


@pytest.mark.parametrize("shape", [{"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.1}, {"min_p": 0.02, "top_k": 12}])
def test_without_our_processor_sglangs_own_truncation_is_renormalised(running: Running, shape: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0.7, max_tokens=16, **shape)

    async def run() -> None:
        async with running.engine() as engine:
            engine._abilities = replace(engine._abilities, processes=False)
            await running.install(engine, "A")
            for prompt in prompts(4, seed=3):
                running.check("A", prompt, params, await engine.generate(prompt, params))

    running.run(run())


def test_a_cancelled_request_frees_its_place_on_the_server(running: Running) -> None:
    async def run() -> None:
        async with running.engine() as engine:
            await running.install(engine, "A")
            task = asyncio.ensure_future(engine.generate([9], SamplingParams(max_tokens=MAX_LENGTH - 10)))
            await engine.generate([10], replace(GREEDY, max_tokens=2))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await engine.generate([10], replace(GREEDY, max_tokens=2))
            # Right after an answer its batch may still lie there; the cancelled request would take far longer.
            async with engine._client._session.post(f"{running.server.url}/flush_cache?timeout=0.3") as idle:
                assert idle.status == 200, "the cache can be flushed when nothing is under way"

    running.run(run())


def test_a_score_is_refused_while_paused_rather_than_waited_for(running: Running) -> None:
    async def run() -> None:
        async with running.engine() as engine:
            await engine.pause()
            with pytest.raises(RuntimeError, match="score while paused"):
                await engine.score([9, 10, 11])

    running.run(run())


@pytest.mark.parametrize(
    ("sees", "broken", "nth"), [(True, "/end_weight_update", 1), (False, "/update_weights_from_tensor", 3)]
)
def test_an_engine_that_was_half_loaded_never_resumes(
    running: Running, monkeypatch: pytest.MonkeyPatch, sees: bool, broken: str, nth: int
) -> None:
    monkeypatch.setattr(weights, "BUCKET_BYTES", 1 << 14)
    sent = 0

    async def run() -> None:
        nonlocal sent
        async with running.engine() as engine:
            engine._sees_shelf = sees
            await running.install(engine, "A")
            task = asyncio.ensure_future(engine.generate([9], SamplingParams(max_tokens=MAX_LENGTH - 10)))
            await engine.generate([10], replace(GREEDY, max_tokens=1))
            await engine.pause()
            post = engine._client.post

            async def break_off(path: str, body: object, **rest: Any) -> Any:
                nonlocal sent
                sent += path == broken
                if sent == nth:
                    raise ActorDied("the network is gone")
                return await post(path, body, **rest)

            monkeypatch.setattr(engine._client, "post", break_off)
            with pytest.raises(ActorDied, match="half loaded.*the network is gone"):
                await engine.load(1, running.model.weights["B"])
            assert engine.version == 0
            for call in (engine.resume(), engine.generate([9], GREEDY), engine.pause(), task):
                with pytest.raises(ActorDied, match="the network is gone"):
                    await call
            monkeypatch.undo()

    running.run(run())


def test_a_missing_sglang_is_named_with_the_way_out(tmp_path: Path) -> None:
    model = build_model(tmp_path)
    config = settings(f"engine.python={sys.executable}")
    with pytest.raises(ConfigError, match=r"sglang is not installed there.*\.venv-sglang"):
        asyncio.run(SglangServer.start(config, str(model.folder)))
