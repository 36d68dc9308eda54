"""A process of its own for the tests: ``python sync_process.py publisher|stuck ENDPOINT``.

Prints a word per line when it got somewhere; ends when it is killed.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path

from sync_support import Events, FakeEngine, manifest_of, small_model

from streamrl.sync.arrival import Arrival
from streamrl.sync.publisher import Publisher
from streamrl.sync.slab import Slab
from streamrl.sync.subscriber import Subscriber


def say(word: str) -> None:
    print(word, flush=True)


async def publish(endpoint: str) -> None:
    """Bring version 0 to ``rollouter-0``, then write version 1 and wait for a member that never comes."""
    slab = Slab(manifest_of(small_model(0)), endpoint=endpoint, folder=Path("unused"), timeout_s=60)
    publisher = Publisher(endpoint, slab, timeout_s=60, on_event=Events(), on_unresponsive=lambda member, phase: None)
    task = asyncio.create_task(publisher.run())
    publisher.set_members({"rollouter-0"}, set())
    with publisher.open(0) as content:
        content.put(small_model(0).named_parameters())
    await publisher.publish(0)
    publisher.set_members({"rollouter-0", "rollouter-9"}, set())
    with publisher.open(1) as content:
        content.put(small_model(1).named_parameters())
    say("published")
    await publisher.publish(1)
    await task


async def get_stuck(endpoint: str) -> None:
    """Stop for good in the middle of staging, with the publisher's memory mapped."""
    check = Arrival.check

    def stuck(self: Arrival, index: int, code: memoryview | None) -> None:
        check(self, index, code)
        say("verifying")
        threading.Event().wait()

    Arrival.check = stuck  # type: ignore[method-assign]
    await Subscriber(endpoint, "rollouter-1", FakeEngine(), Events()).run()


if __name__ == "__main__":
    role, address = sys.argv[1:]
    asyncio.run({"publisher": publish, "stuck": get_stuck}[role](address))
