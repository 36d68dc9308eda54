"""What every process of the ring has in common: its lifecycle, its control socket and its heartbeat.

======== ==================================== =========================================
state    entered when                         left when
======== ==================================== =========================================
starting the process begins                   ``setup`` returned
ready    ``Ready`` was sent                   ``Start`` came
running  ``run`` is called                    ``run`` returned, or ``Stop`` cancelled it
draining ``close`` is called                  ``close`` returned
stopped  the control socket is flushed        the process exits
======== ==================================== =========================================

An exception anywhere becomes one ``Failed`` message and exit code 1; silence from the controller ends the actor too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio

from streamrl.errors import ActorDied, StreamRLError, WireError
from streamrl.runtime.messages import (
    Event,
    Failed,
    Finished,
    Heartbeat,
    Hello,
    Message,
    Ready,
    Start,
    Stop,
    Tick,
    decode,
    encode,
)
from streamrl.schema import Config

log = logging.getLogger(__name__)

OUTBOX_MESSAGES = 10_000
"""Control messages that may wait for the controller; passed only when it has been gone for long."""

Result = TypeVar("Result")


class State(Enum):
    STARTING = "starting"
    READY = "ready"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPED = "stopped"


class ActorSpec(msgspec.Struct, frozen=True):
    """Everything that a process needs to become an actor."""

    kind: str
    name: str
    """Unique in the run: ``rollouter-3``."""
    incarnation: int
    """0 at first, +1 with every replacement."""
    index: int
    """Rank of a trainer, number of a rollouter."""
    run_dir: str
    ipc_dir: str
    config: Config
    model: str = ""
    """Folder of the initial checkpoint; empty for the actor that prepares it."""
    endpoints: dict[str, str] = {}
    """Addresses of planes that are not ``ipc://`` sockets in the run's folder."""

    @property
    def holder(self) -> str:
        """The name of its leases: what a dead incarnation held is not its successor's."""
        return f"{self.name}.{self.incarnation}"

    @property
    def identity(self) -> bytes:
        """Of the control socket: a late word of a dead incarnation is not taken for its successor's."""
        return f"{self.name}#{self.incarnation}".encode()

    def endpoint(self, plane: str) -> str:
        """Address of the ``control``, ``queue``, ``store-N`` or ``sync`` plane of this run."""
        return self.endpoints.get(plane, f"ipc://{self.ipc_dir}/{plane}")

    @property
    def log_path(self) -> Path:
        return Path(self.run_dir) / "logs" / f"{self.name}.log"


class Actor:
    """Base of the processes of the ring. Subclasses override ``setup``, ``run``, ``close`` and ``receive``."""

    def __init__(self, spec: ActorSpec) -> None:
        self.spec = spec
        self.config = spec.config
        self.state = State.STARTING
        self.cleanup = contextlib.AsyncExitStack()
        self._waits: list[tuple[str, float]] = []
        self._outbox: asyncio.Queue[Message] = asyncio.Queue(OUTBOX_MESSAGES)
        self._started = asyncio.Event()
        self._stop = asyncio.Event()
        self._failed = False
        self._set_up = False
        """``setup`` has returned: gauges can be read."""

    # What subclasses fill in ------------------------------------------------------------------------------------------

    async def setup(self) -> dict[str, Any]:
        """Load everything; the result travels with ``Ready``."""
        return {}

    async def run(self) -> dict[str, Any]:
        """The actor's work; cancelled by ``Stop``. The result travels with ``Finished``."""
        await asyncio.Event().wait()
        return {}

    async def close(self) -> None:
        """Free what ``setup`` and ``run`` took: everything that was pushed to ``cleanup``, newest first."""
        await self.cleanup.aclose()

    def receive(self, message: Message) -> None:
        """A control message that the lifecycle does not handle itself."""
        raise WireError(f"{self.spec.name} got {type(message).__name__}, which is not for a {self.spec.kind}")

    def gauges(self) -> dict[str, float]:
        """Numbers for the next heartbeat; asked for once ``setup`` has returned."""
        return {}

    # What subclasses use ----------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Queue a message to the controller. On the event loop only."""
        self._outbox.put_nowait(message)

    def emit(self, event: str, fields: dict[str, Any] | None = None) -> None:
        """Report a lifecycle event for ``events.jsonl``. On the event loop only."""
        self.send(Event(event=event, fields=fields or {}))

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Say in heartbeats that the actor waits for ``what`` (C9)."""
        entry = (what, time.monotonic())
        self._waits.append(entry)
        try:
            yield
        finally:
            self._waits.remove(entry)

    async def blocking(self, executor: Any, what: Callable[[], Result]) -> Result:
        """Run blocking work on ``executor``, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(executor, what)

    # Lifecycle --------------------------------------------------------------------------------------------------------

    async def live(self) -> int:
        """From process start to exit code."""
        context = zmq.asyncio.Context()
        control = context.socket(zmq.DEALER)
        control.setsockopt(zmq.IDENTITY, self.spec.identity)
        control.setsockopt(zmq.LINGER, 2000)
        control.connect(self.spec.endpoint("control"))
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signal_number, self._stop.set)
        try:
            await self._live(control)
            code = 0
        except BaseExceptionGroup as group:
            log.error("%s failed", self.spec.name, exc_info=group)
            await self._report(group, control)
            code = 1
        finally:
            self.state = State.STOPPED
            control.close()
            context.term()
        return code

    async def _live(self, control: zmq.asyncio.Socket) -> None:
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(self._listen(control)),
                tasks.create_task(self._speak(control)),
                tasks.create_task(self._beat()),
            ]
            self.send(Hello(pid=os.getpid(), host=socket.gethostname()))
            try:
                await self._until_stop(self._work())
            except Exception as error:
                await self._report(error, control)  # before the clean-up, which may hang or fail as well
                raise
            finally:
                self.state = State.DRAINING
                async with asyncio.timeout(self.config.liveness.drain_timeout_s):
                    await self.close()
            self.send(self._heartbeat())  # the final gauges
            await self._flush(control)
            for task in background:
                task.cancel()

    async def _work(self) -> None:
        info = await self.setup()
        self._set_up = True
        self.state = State.READY
        self.send(Ready(info=info))
        with self.waiting("start: the other actors"):
            await self._started.wait()
        self.state = State.RUNNING
        result = await self.run()
        self.send(Finished(result=result))
        with self.waiting("stop: the run to end"):
            await self._stop.wait()

    async def _until_stop(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` to its end, or cancel it when ``Stop`` comes."""
        task = asyncio.create_task(work)
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            task.cancel()
            await asyncio.wait({task})  # its clean-up is ours to wait for
        if not task.cancelled():
            task.result()

    async def _listen(self, control: zmq.asyncio.Socket) -> None:
        deadline = self.config.liveness.actor_timeout_s
        while True:
            try:
                async with asyncio.timeout(deadline):
                    frames = await control.recv_multipart()
            except TimeoutError:
                raise ActorDied(f"the controller sent nothing for {deadline:g} s; {self.spec.name} ends") from None
            try:
                message = decode(frames[-1])
            except WireError as error:
                log.error("from the controller: %s", error)
                self.emit("malformed_frame", {"sender": "controller", "error": str(error)})
                continue
            match message:
                case Tick():
                    pass
                case Start():
                    self._started.set()
                case Stop():
                    self._stop.set()
                case _:
                    self.receive(message)

    async def _report(self, error: BaseException, control: zmq.asyncio.Socket) -> None:
        """Send ``Failed`` once: the first failure is the cause."""
        if not self._failed:
            self._failed = True
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            self.send(_failure(error))
            await self._flush(control)

    async def _flush(self, control: zmq.asyncio.Socket) -> None:
        while not self._outbox.empty():
            await control.send(encode(self._outbox.get_nowait()))

    async def _speak(self, control: zmq.asyncio.Socket) -> None:
        while True:
            await control.send(encode(await self._outbox.get()))

    async def _beat(self) -> None:
        while True:
            self.send(self._heartbeat())
            await asyncio.sleep(self.config.liveness.heartbeat_s)

    def _heartbeat(self) -> Heartbeat:
        what, since = self._waits[-1] if self._waits else ("", time.monotonic())
        gauges = self.gauges() if self._set_up else {}
        return Heartbeat(state=self.state.value, waiting_for=what, waiting_s=time.monotonic() - since, gauges=gauges)


def _failure(error: BaseException) -> Failed:
    """One line for people, and the whole story for the event log."""
    text = " ".join(str(error).split()) or type(error).__name__
    reason = text if isinstance(error, StreamRLError) else f"{type(error).__name__}: {text}"
    return Failed(kind=type(error).__name__, reason=reason, traceback="".join(traceback.format_exception(error)))
