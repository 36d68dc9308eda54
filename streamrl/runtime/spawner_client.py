"""The controller's end of the spawner: start actors, signal them, hear of their deaths."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from streamrl.errors import ActorDied
from streamrl.runtime.actor import ActorSpec
from streamrl.runtime.spawner import GRACE_S, MESSAGE_BYTES, Exited, Kill, Spawn, Spawned


class SpawnerClient:
    """One spawner process. ``on_exit`` is called on the event loop for every actor that ended."""

    def __init__(self, run_dir: Path, ipc_dir: str, on_exit: Callable[[Exited], None]) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        self._on_exit = on_exit
        self._decoder = msgspec.msgpack.Decoder(Spawned | Exited)
        self._pids: dict[str, int] = {}
        # Spinning OpenMP threads starve the others when there are more threads than cores.
        environment = {"OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"} | dict(os.environ)
        with (run_dir / "logs" / "spawner.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "streamrl.runtime.spawner", str(theirs.fileno()), ipc_dir],
                pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, env=environment,
            )  # fmt: skip
        theirs.close()

    async def listen(self) -> None:
        """Report exits until cancelled; raises ``ActorDied`` when the spawner itself ends."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                frame = await loop.sock_recv(self._channel, MESSAGE_BYTES)
            except ConnectionResetError:
                frame = b""
            if not frame:
                raise ActorDied("the spawner process ended; every actor ended with it (see logs/spawner.log)")
            report = self._decoder.decode(frame)
            if isinstance(report, Exited):
                self._pids.pop(report.name, None)
                self._on_exit(report)
            else:
                self._pids[report.name] = report.pid

    async def spawn(self, spec: ActorSpec) -> None:
        await asyncio.get_running_loop().sock_sendall(self._channel, msgspec.msgpack.encode(Spawn(spec=spec)))

    def signal(self, name: str, number: int) -> None:
        """Signal the process group of ``name``; of no effect when it is gone."""
        self._channel.send(msgspec.msgpack.encode(Kill(name=name, signal=number)))

    def close(self) -> None:
        """End every actor that still lives, and the spawner. Blocks for at most its grace times."""
        self._channel.close()
        try:
            self.process.wait(2 * GRACE_S + 2)
        except subprocess.TimeoutExpired:
            self.process.kill()  # the kernel then kills its children
            for pid in self._pids.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)  # and this, what they had started
            self.process.wait()
