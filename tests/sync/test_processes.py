"""Real processes that are killed with SIGKILL; nothing may hang and nothing may be left behind."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from sync_support import Events, FakeEngine, equal, open_memfds, ring, small_model, socket_folder, weights

from streamrl.sync.subscriber import Subscriber

SCRIPT = Path(__file__).with_name("sync_process.py")


@asynccontextmanager
async def process(role: str, endpoint: str) -> AsyncIterator[asyncio.subprocess.Process]:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        str(SCRIPT),
        role,
        endpoint,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def heard(child: asyncio.subprocess.Process, word: str) -> None:
    assert child.stdout is not None
    async with asyncio.timeout(60):
        assert (await child.stdout.readline()).decode().strip() == word


def test_a_rollouter_killed_while_it_stages_holds_nobody_up_once_it_is_taken_out() -> None:
    async def scenario() -> None:
        async with ring() as it:
            engine = it.join("rollouter-0")
            async with process("stuck", it.endpoint) as child, asyncio.timeout(60):
                it.publisher.set_members({"rollouter-0", "rollouter-1"}, set())
                it.write(0, small_model(0))
                publish = asyncio.create_task(it.publisher.publish(0))
                await heard(child, "verifying")
                assert not publish.done()
                child.kill()
                await child.wait()
                it.publisher.set_members({"rollouter-0"}, set())
                assert (await publish).rollouters == 1
                assert equal(engine.weights, weights(small_model(0)))
                it.write(1, small_model(1))
                assert (await it.publisher.publish(1)).rollouters == 1

    asyncio.run(scenario())


def mapped(pid: int) -> str:
    """Every mapping of a process, with the name of its file."""
    return Path(f"/proc/{pid}/maps").read_text()


class KeepingEngine(FakeEngine):
    """Keeps the views of the shared memory that it was given."""

    views: Mapping[str, torch.Tensor]

    async def load(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        await super().load(version, tensors)
        self.views = tensors


def test_a_killed_publisher_leaves_nothing_behind_and_its_successor_takes_over() -> None:
    async def scenario(endpoint: str) -> None:
        memfds = open_memfds()
        engine, events = KeepingEngine(), Events()
        subscriber = Subscriber(endpoint, "rollouter-0", engine, events)
        task = asyncio.create_task(subscriber.run())
        async with process("publisher", endpoint) as child:
            await heard(child, "published")
            await events.wait("version_staged", version=1)
            assert "/dev/shm/" not in mapped(child.pid)  # nothing that outlives it
            child.kill()
            await child.wait()
        assert equal(engine.views, weights(small_model(0)))  # the mapping outlives its sender
        assert equal(engine.weights, weights(small_model(0)))  # version 1 was staged, never committed
        assert len(open_memfds()) == len(memfds) + 1

        del engine.views
        async with ring(endpoint=endpoint) as it:  # a restarted trainer, with the versions of its checkpoint
            it.publisher.set_members({"rollouter-0"}, set())
            it.write(0, small_model(7))
            await it.publisher.publish(0)
            assert equal(engine.weights, weights(small_model(7)))
            del engine.views
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert open_memfds() == memfds

    with socket_folder() as endpoint:
        asyncio.run(scenario(endpoint))
