"""Words of threads in vLLM's workers, whom no call can wait for while the workers step: lines in a pipe.

Each thread writes ``BEGUN`` before the call that starts it returns, and a line of JSON when it ends: the error, or "".
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable

from streamrl.errors import ActorDied

BEGUN = b"begun\n"


async def reports(start: Callable[[str], Awaitable[object]]) -> list[str]:
    """Start threads by ``start(path)``, where they find the pipe; what each said at its end, "" for no error.

    Raises ``ActorDied`` where one ended without a word, which only a dead process does.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC)
    reader, loop = asyncio.StreamReader(), asyncio.get_running_loop()
    with os.fdopen(writing, "wb") as ours:
        theirs = os.fdopen(reading, "rb")
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), theirs)
        try:
            await start(f"/proc/{os.getpid()}/fd/{writing}")
            ours.close()  # from here on the pipe ends with the last thread
            lines = (await reader.read()).splitlines(keepends=True)
        finally:
            transport.close()
    ends = [json.loads(line) for line in lines if line != BEGUN]
    if 2 * len(ends) != len(lines):
        raise ActorDied(f"{len(lines) - 2 * len(ends)} of vLLM's workers ended while they staged weights")
    return ends
