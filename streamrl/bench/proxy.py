"""The capture proxy against the native API: the same conversations on the same engine, in turn, in one process.

::

    native    policy.chat(messages)
    proxy     POST /v1/chat/completions with the same messages over HTTP, by an aiohttp client

``SESSIONS`` conversations of ``TURNS`` turns of up to 64 tokens run at once. Server, client and engine share the
process, so that the client's own work counts as overhead too. Both sides sample the same tokens from the same seeds,
which is verified on every run. ``python -m streamrl.bench.proxy [JSON]``.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import torch
import uvloop
from aiohttp import web

from streamrl.bench.engine import build_model
from streamrl.bench.report import Row, publish, summarise
from streamrl.engines.embedded import EmbeddedEngine
from streamrl.envs.codec import Codec
from streamrl.envs.environment import Reward
from streamrl.envs.episode import Episode, Limits
from streamrl.envs.proxy import SessionDesk, add_routes
from streamrl.envs.session import Session
from streamrl.policy.tokenizer import character_tokenizer
from streamrl.ports import Engine

SESSIONS = 64
TURNS = 3
RUNS = 5
LIMITS = Limits(temperature=1.0, top_k=0, top_p=1.0, max_tokens=64, max_length=512)

Ask = Callable[[list[dict[str, Any]]], Awaitable[str]]


@dataclass(frozen=True)
class Measured:
    """One run of all conversations."""

    tokens_per_s: float
    cpu_ms_per_1k: float
    """CPU milliseconds of the whole process per thousand sampled tokens; hardly depends on what else runs."""


@dataclass
class Bench:
    """What both contenders share."""

    engine: Engine
    codec: Codec
    desk: SessionDesk
    url: str
    http: aiohttp.ClientSession
    sampled: int | None = None
    """Tokens of a run; the same in all."""

    async def run(self, ask_of: Callable[[Session], Ask]) -> Measured:
        """All conversations once; ``ask_of`` says how a session is asked."""
        episodes = [Episode(self.engine, self.codec, LIMITS, (0, index, 0, 0)) for index in range(SESSIONS)]
        asks = [ask_of(Session(episode)) for episode in episodes]
        started, worked = time.perf_counter(), time.process_time()
        await asyncio.gather(*(_converse(ask, index) for index, ask in enumerate(asks)))
        elapsed, worked = time.perf_counter() - started, time.process_time() - worked
        trajectories = [each for episode in episodes for each in episode.trajectories(Reward(0.0), 0)]
        tokens = sum(each.sampled_count for each in trajectories)
        assert self.sampled in (None, tokens), "both sides sample the same tokens"
        self.sampled = tokens
        return Measured(tokens / elapsed, 1e6 * worked / tokens)

    def native(self, session: Session) -> Ask:
        async def ask(messages: list[dict[str, Any]]) -> str:
            return (await session.chat(messages)).text

        return ask

    def proxied(self, session: Session) -> Ask:
        headers = {"Authorization": f"Bearer {self.desk.open(session)}", "Content-Type": "application/json"}

        async def ask(messages: list[dict[str, Any]]) -> str:
            body = msgspec.json.encode({"model": "policy", "messages": messages})
            async with self.http.post(f"{self.url}/v1/chat/completions", data=body, headers=headers) as response:
                answer = msgspec.json.decode(await response.read())
            return str(answer["choices"][0]["message"]["content"])

        return ask


async def _converse(ask: Ask, index: int) -> None:
    """One conversation: the whole history goes along with every turn."""
    messages = [{"role": "user", "content": f"conversation {index}"}]
    for turn in range(TURNS):
        messages.append({"role": "assistant", "content": await ask(messages)})
        messages.append({"role": "user", "content": f"go on {turn}"})


@asynccontextmanager
async def serving(engine: Engine, codec: Codec) -> AsyncIterator[Bench]:
    """The proxy in front of ``engine``, on a free port."""
    desk, app = SessionDesk(), web.Application()
    add_routes(app, desk)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            yield Bench(engine, codec, desk, url, http)
    finally:
        await runner.cleanup()


async def measure(runs: int) -> list[Row]:
    """Proxied and native conversations, in turn, after one round that is not counted."""
    torch.set_num_threads(1)
    codec = Codec(character_tokenizer())
    model = build_model(len(codec.tokenizer))
    engine = EmbeddedEngine(model, slots=SESSIONS, max_length=LIMITS.max_length)
    await engine.start()
    async with serving(engine, codec) as bench:
        rounds = [(await bench.run(bench.proxied), await bench.run(bench.native)) for _ in range(runs + 1)]
    await engine.close()
    proxied, native = zip(*rounds[1:], strict=True)
    name = f"proxy/{SESSIONS}-sessions"
    rates = [[each.tokens_per_s for each in side] for side in (proxied, native)]
    cpu = [[each.cpu_ms_per_1k for each in side] for side in (proxied, native)]
    return [summarise(name, "tokens/s", *rates), summarise(f"{name}/cpu", "ms/1k tokens", *cpu)]


def run(json_path: str | Path | None = None, runs: int = RUNS) -> list[Row]:
    """Measure, print the table, write ``json_path`` if given; in a process of its own (``bench.engine.run``)."""
    command = [sys.executable, "-m", "streamrl.bench.proxy", "--measure", str(runs)]
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout
    rows = [Row(**fields) for fields in json.loads(output)]
    publish(rows, json_path)
    return rows


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps([asdict(row) for row in uvloop.run(measure(int(sys.argv[2])))]))
    else:
        run(next(iter(sys.argv[1:]), None))
