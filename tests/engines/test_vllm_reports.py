"""What threads of vLLM's workers say at their end, through a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest
import uvloop

from streamrl.engines.vllm.reports import BEGUN, reports
from streamrl.errors import ActorDied

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    run = cast(Run, request.param)
    run(asyncio.sleep(0))  # the first loop of a process opens pipes of its own, for signals
    return run


def begin(path: str) -> int:
    """As a worker does before the call that starts its thread returns."""
    pipe = os.open(path, os.O_WRONLY)
    os.write(pipe, BEGUN)
    return pipe


def open_pipes() -> int:
    """A transport closes its end in a later turn of the loop: to be asked when the loop has ended."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum(link.startswith("pipe:") for link in links)


def test_every_worker_is_heard_in_any_order_and_no_pipe_stays_open(run: Run) -> None:
    async def scenario() -> None:
        pipes: list[int] = []

        async def start(path: str) -> None:
            pipes.extend(begin(path) for _ in range(3))

        waiting = asyncio.create_task(reports(start))
        while len(pipes) < 3:  # noqa: ASYNC110 start is called within the first turns of the loop
            await asyncio.sleep(0)
        for pipe, said in zip(pipes, (b'""', b'"ValueError: no"', b'""'), strict=True):
            assert not waiting.done()
            os.write(pipe, said + b"\n")
            os.close(pipe)
        assert await waiting == ["", "ValueError: no", ""]

    before = open_pipes()
    run(asyncio.wait_for(scenario(), 60))
    assert open_pipes() == before


def test_a_worker_that_ends_without_a_word_is_dead(run: Run) -> None:
    async def start(path: str) -> None:
        silent, other = begin(path), begin(path)
        os.write(other, b'""\n')
        os.close(other)
        os.close(silent)

    with pytest.raises(ActorDied, match="1 of vLLM's workers ended while they staged weights"):
        run(reports(start))


def test_a_call_that_fails_leaves_no_pipe(run: Run) -> None:
    async def start(path: str) -> None:
        raise ActorDied("it is gone")

    before = open_pipes()
    with pytest.raises(ActorDied, match="it is gone"):
        run(reports(start))
    assert open_pipes() == before
