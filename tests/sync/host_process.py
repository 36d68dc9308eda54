"""A host of its own for the tests of the chain: ``python host_process.py trainer|rollouter NAME ENDPOINT``.

Does what a line on its standard input says, prints a line when it got somewhere, and ends when its input does.

- ``trainer``: ``publish VERSION SEED`` → ``published N``; ``members NAME…`` → ``members``.
- ``rollouter``: ``asks VERSION`` before it asks for a place in a chain, for which it waits for ``go``; ``asked`` when
  it has it and the first bucket is there for it; ``staged VERSION``; ``loaded VERSION DIGEST``;
  ``hold VERSION BUCKET`` → ``holds``, and when it gets there ``held``, until ``release``.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash

from streamrl.sync.arena import describe
from streamrl.sync.manifest import plan_manifest
from streamrl.sync.publisher import Publisher
from streamrl.sync.slab import Slab
from streamrl.sync.subscriber import Subscriber
from streamrl.sync.transports.chain_links import ChainEnd
from streamrl.sync.transports.nixl_memory import Pull

BUCKETS = 8
BUCKET_BYTES = 1 << 20
MODEL_BYTES = BUCKETS * BUCKET_BYTES
TIMEOUT_S = 60.0


def tensors(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {f"w{index}": torch.rand(BUCKET_BYTES // 4, generator=random) for index in range(BUCKETS)}


def digest(weights: Mapping[str, torch.Tensor]) -> str:
    hashing = xxhash.xxh3_64()
    for name in sorted(weights):
        hashing.update(weights[name].numpy().tobytes())
    return hashing.hexdigest()


def say(word: str) -> None:
    print(word, flush=True)


async def commands() -> asyncio.Queue[list[str]]:
    """What comes in on standard input; the process ends with it, whatever it is at."""
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[list[str]]()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(queue.put_nowait, line.split())
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return queue


async def train(name: str, endpoint: str) -> None:
    queue = await commands()
    await queue.get()  # its network is there
    manifest = plan_manifest(describe(tensors(0)), BUCKET_BYTES)
    slab = Slab(manifest, endpoint=endpoint, folder=Path("unused"), timeout_s=TIMEOUT_S, transport="nixl")
    publisher = Publisher(endpoint, slab, timeout_s=TIMEOUT_S, on_event=_ignore, on_unresponsive=_ignore)
    running = asyncio.create_task(publisher.run())
    say("ready")
    while not running.done():
        match await queue.get():
            case ["members", *names]:
                publisher.set_members(set(names), set())
                say("members")
            case ["publish", version, seed]:
                publishing = asyncio.create_task(_publish(publisher, int(version), int(seed)))
                publishing.add_done_callback(lambda done: say(f"published {done.result()}"))
    await running


async def _publish(publisher: Publisher, version: int, seed: int) -> int:
    with publisher.open(version) as content:
        content.put(tensors(seed))
    return (await publisher.publish(version)).rollouters


class Engine:
    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def load(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        say(f"loaded {version} {digest(weights)}")


async def roll_out(name: str, endpoint: str) -> None:
    queue = await commands()
    await queue.get()
    going: asyncio.Queue[None] = asyncio.Queue()
    holding: list[tuple[int, int]] = []
    released = threading.Event()
    ask, fetch = ChainEnd.ask, Pull.fetch

    async def asking(end: ChainEnd, bucket: Any, own: bytes) -> bytes:
        if bucket.index:
            return await ask(end, bucket, own)
        say(f"asks {bucket.version}")
        await going.get()
        address = await ask(end, bucket, own)
        say("asked")
        return address

    def held(pull: Pull, owner: Any, bucket: Any, *arguments: Any) -> None:
        if (bucket.version, bucket.index) in holding:
            holding.clear()
            say("held")
            released.wait()
        fetch(pull, owner, bucket, *arguments)

    ChainEnd.ask, Pull.fetch = asking, held  # type: ignore[method-assign, assignment]
    engine: Any = Engine()
    running = asyncio.create_task(Subscriber(endpoint, name, engine, _staged, timeout_s=TIMEOUT_S).run())
    say("ready")
    while not running.done():
        match await queue.get():
            case ["go"]:
                going.put_nowait(None)
            case ["release"]:
                released.set()
            case ["hold", version, index]:
                holding.append((int(version), int(index)))
                say("holds")
    await running


def _staged(event: str, fields: dict[str, Any]) -> None:
    if event == "version_staged":
        say(f"staged {fields['version']}")


def _ignore(*_: Any) -> None: ...


if __name__ == "__main__":
    role, own_name, address = sys.argv[1:]
    asyncio.run({"trainer": train, "rollouter": roll_out}[role](own_name, address))
