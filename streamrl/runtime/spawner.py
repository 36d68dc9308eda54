"""The spawner: a small process that imports torch once and forks every actor from there.

Forking from a warm process makes an actor start in milliseconds and share the libraries' pages, so 25 actors fit on a
laptop. The spawner is also the undertaker: it reaps its children and tells the controller, and when the controller is
gone (its end of the socket pair closes, even by SIGKILL) it ends all actors and removes the run's socket folder.
When the spawner itself is killed, the kernel kills its children (``PR_SET_PDEATHSIG``) and the controller cleans up.

It must stay single-threaded and must never run a torch kernel: both would break the forked children.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import msgspec

from streamrl.runtime.actor import ActorSpec
from streamrl.runtime.living import KINDS, execute, interpreter_of, live

PRELOAD = (
    "torch",
    "torch.distributed.fsdp",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.tokenization_utils_fast",
    "streamrl.envs.reasoning_gym",
    "uvloop",
    *(path.partition(":")[0] for path in KINDS.values()),
)
MESSAGE_BYTES = 1 << 20
GRACE_S = 5.0
"""Seconds that actors get to end by themselves once the controller is gone."""

_PR_SET_PDEATHSIG = 1


class Spawn(msgspec.Struct, tag=True):
    """Controller to spawner: fork this actor."""

    spec: ActorSpec


class Kill(msgspec.Struct, tag=True):
    """Controller to spawner: signal this actor's process group."""

    name: str
    signal: int


class Spawned(msgspec.Struct, tag=True):
    name: str
    incarnation: int
    pid: int


class Exited(msgspec.Struct, tag=True):
    name: str
    incarnation: int
    pid: int
    code: int
    """Exit code, or minus the signal that ended it."""


class Spawner:
    def __init__(self, channel: socket.socket, ipc_dir: str) -> None:
        self._channel = channel
        self._ipc_dir = ipc_dir
        self._children: dict[int, ActorSpec] = {}
        self._wake = os.pipe()
        """Written by the runtime at every SIGCHLD, so that one select waits for orders and deaths."""
        self._decoder = msgspec.msgpack.Decoder(Spawn | Kill)

    def serve(self) -> None:
        """Until the controller closes its end; then bury everybody."""
        wake_write = self._wake[1]
        os.set_blocking(wake_write, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        try:
            while True:
                readable, _, _ = select.select([self._channel.fileno(), self._wake[0]], [], [])
                if self._wake[0] in readable:
                    os.read(self._wake[0], 4096)
                    self._reap()
                if self._channel.fileno() in readable:
                    frame = self._channel.recv(MESSAGE_BYTES)
                    if not frame:
                        return
                    self._obey(self._decoder.decode(frame))
        finally:
            self._bury()

    def _obey(self, order: Spawn | Kill) -> None:
        if isinstance(order, Spawn):
            self._spawn(order.spec)
            return
        for pid, spec in self._children.items():
            if spec.name == order.name:
                _signal_group(pid, order.signal)

    def _spawn(self, spec: ActorSpec) -> None:
        spawner = os.getpid()
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                self._channel.close()
                code = _become(spec, spawner)
            except BaseException:  # noqa: BLE001 - the forked child must never return into the spawner's loop
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        self._children[pid] = spec
        self._tell(Spawned(name=spec.name, incarnation=spec.incarnation, pid=pid))

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            spec = self._children.pop(pid, None)
            if spec is None:
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # whatever user code started and left behind
            code = os.waitstatus_to_exitcode(status)
            self._tell(Exited(name=spec.name, incarnation=spec.incarnation, pid=pid, code=code))

    def _tell(self, report: Spawned | Exited) -> None:
        # When the controller is gone, the loop sees the closed channel next.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._channel.send(msgspec.msgpack.encode(report))

    def _bury(self) -> None:
        for number, grace_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
            for pid in self._children:
                _signal_group(pid, number)
            deadline = time.monotonic() + grace_s
            while self._children and (left_s := deadline - time.monotonic()) > 0:
                if select.select([self._wake[0]], [], [], left_s)[0]:
                    os.read(self._wake[0], 4096)
                self._reap()
        shutil.rmtree(self._ipc_dir, ignore_errors=True)


def _signal_group(pid: int, number: int) -> None:
    for send in (os.killpg, os.kill):
        try:
            send(pid, number)
        except (ProcessLookupError, PermissionError):
            continue
        return


def _become(spec: ActorSpec, spawner: int) -> int:
    """In the forked child: own process group, own log, die with the spawner, then live as the actor.

    An actor with an interpreter of its own (``engine.python``) is executed by it and does not return.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != spawner:
        return 1  # it died before the line above
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    descriptor = os.open(spec.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    if python := interpreter_of(spec):
        execute(python, spec)
    return live(spec)


def main() -> None:
    """``python -m streamrl.runtime.spawner FD IPC_DIR``: FD is the spawner's end of the controller's socket pair."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    ipc_dir = sys.argv[2]
    sys.path.insert(0, str(Path.cwd()))  # user code beside the run is importable, as for the launch command
    for module in PRELOAD:
        importlib.import_module(module)
    importlib.import_module("transformers.utils.logging").disable_progress_bar()
    gc.freeze()  # keeps the collector from touching, and so copying, the shared pages
    Spawner(channel, ipc_dir).serve()


if __name__ == "__main__":
    main()
