"""One-sided reads between processes, by NIXL over UCX: what payloads by reference and weights share."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from streamrl.errors import ConfigError, StreamRLError

PROGRESS_US = 100_000
"""A progress thread sleeps until UCX has something to do; this only bounds the sleep."""
LONGEST_PAUSE_S = 1e-3
"""Between two looks at a transfer."""

UCX_DEFAULTS = {
    # Everything but named shared memory, which can stay behind when a process is killed while it makes some. On one
    # host cma reads just as fast: the reader's kernel copies out of the other process.
    "UCX_TLS": "^posix,sysv",
    # UCX would listen on every interface, and it authenticates nobody (C11). Across hosts: name a trusted network.
    "UCX_NET_DEVICES": "lo",
    # A failing transfer is expected when a process dies. It is raised, and would be reported twice.
    "NIXL_LOG_LEVEL": "FATAL",
    "UCX_LOG_LEVEL": "fatal",
    # UCX would catch SIGHUP to print its state, and a process would then outlive its terminal.
    "UCX_DEBUG_SIGNO": "0",
}

Descriptor = tuple[int, int, int]
"""(address, nbytes, device) as NIXL takes it; the device of host memory is 0."""
Pair = tuple[Descriptor, Descriptor]
"""Memory of this process, and what is read into it."""


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Where nixl is loaded and an agent made: ``UCX_DEFAULTS``, except for what the user has set.

    UCX reads its environment when its library is loaded, and again for each context. Nothing stays set: an engine in
    this process may use NIXL too, and for something else.
    """
    added = {name: value for name, value in UCX_DEFAULTS.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def require(setting: str) -> None:
    """``ConfigError`` when the package that ``setting`` needs is not installed. Loads nothing."""
    if importlib.util.find_spec("nixl") is None:
        raise _missing(setting, "it is not installed")


def _missing(setting: str, why: object) -> ConfigError:
    return ConfigError(f"{setting} needs the nixl package: pip install 'streamrl[nixl]' ({why})")


def _bindings(setting: str) -> Any:
    strict = logging.raiseExceptions
    try:
        # The bindings and not the ``nixl_agent`` class above them, which fixes ``pthrDelay`` at 0: its progress thread
        # then never sleeps and takes a whole core in each process.
        with _environment():
            from nixl import _bindings as nixl
    except ImportError as error:
        raise _missing(setting, error) from None
    finally:
        logging.raiseExceptions = strict  # the import turns it off for the whole process
    return nixl


class Registration:
    """Memory that an agent has registered. Whoever made it keeps the memory."""

    def __init__(self, address: int, descriptors: Any) -> None:
        self.address = address
        self.descriptors = descriptors


class Agent:
    """One end of one-sided reads. Used on one thread at a time; calls block.

    ``setting``: what asked for it, in messages. ``name``: unique among all agents that meet. ``progress``: whether a
    thread answers others who connect, and who read where only tcp leads here. Raises ``ConfigError`` without the nixl
    package, ``StreamRLError`` when UCX is not to be had.
    """

    def __init__(self, setting: str, name: str, *, progress: bool) -> None:
        self.name = name
        self._nixl = nixl = _bindings(setting)
        # Classes without a common base, and what becomes of other C++ exceptions.
        named = (getattr(nixl, name) for name in dir(nixl) if name.startswith("nixl") and name.endswith("Error"))
        self._errors: tuple[type[Exception], ...] = (RuntimeError, ValueError, *named)
        config = nixl.nixlAgentConfig()
        config.useProgThread = progress
        config.pthrDelay = PROGRESS_US
        config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT
        try:
            with _environment():
                self._agent = nixl.nixlAgent(name, config)
                self._agent.createBackend("UCX", {})
        except self._errors as error:
            chosen = " ".join(
                f"{name}={os.environ.get(name, UCX_DEFAULTS[name])}" for name in ("UCX_TLS", "UCX_NET_DEVICES")
            )
            raise StreamRLError(
                f"{name}: no UCX backend with {chosen} ({error}); UCX_LOG_LEVEL=info says why"
            ) from None

    def register(self, address: int, nbytes: int) -> Registration:
        """Raises ``StreamRLError`` when that is refused."""
        descriptors = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(address, nbytes, 0, "")])
        try:
            self._agent.registerMem(descriptors, [])
        except self._errors as error:
            raise StreamRLError(
                f"{nbytes} bytes cannot be registered for one-sided reads ({error}); is `ulimit -l` too low?"
            ) from None
        return Registration(address, descriptors)

    def deregister(self, registration: Registration) -> None:
        self._agent.deregisterMem(registration.descriptors, [])

    def metadata(self) -> bytes:
        """How others reach this agent and what is registered up to now: for their ``connect``."""
        data: bytes = self._agent.getLocalMD()
        return data

    def connect(self, name: str, metadata: bytes) -> None:
        """Learn how to reach agent ``name``. Raises ``StreamRLError``; ``ConnectionError`` when nobody is there."""
        try:
            found = self._agent.loadRemoteMD(metadata).decode()
        except self._nixl.nixlBackendError as error:
            raise ConnectionError(str(error)) from None
        except self._errors as error:
            raise StreamRLError(f"its metadata is refused ({error})") from None
        if found != name:
            self._agent.invalidateRemoteMD(found)
            raise StreamRLError(f"its metadata lead to {found!r}")

    def disconnect(self, name: str) -> None:
        self._agent.invalidateRemoteMD(name)

    def read(
        self, wanted: Mapping[str, Sequence[Pair]], timeout_s: float, stopped: Callable[[], bool]
    ) -> dict[str, Exception]:
        """Read from several agents at once; by agent what went wrong, for those with whom something did.

        ``TimeoutError``: no answer within ``timeout_s`` seconds, or before ``stopped`` became true. Such a transfer may
        still write to the memory that it was given.
        """
        failed: dict[str, Exception] = {}
        running: dict[str, int] = {}
        deadline = time.monotonic() + timeout_s
        for name, pairs in wanted.items():
            local, remote = (
                self._nixl.nixlXferDList(self._nixl.DRAM_SEG, list(side)) for side in zip(*pairs, strict=True)
            )
            try:
                running[name] = self._agent.createXferReq(self._nixl.NIXL_READ, local, remote, name, "", [])
            except self._errors as error:
                failed[name] = error
            else:
                self._look(name, self._agent.postXferReq, running, failed)
        # NIXL has no call that waits for a transfer and no descriptor to wait on; a notification goes to the other
        # side, and is fetched by asking too. Within one host nothing is left to wait for once the peers are connected,
        # as cma copies in the call that posts. Otherwise the look itself moves the transfer on.
        pause = 0.0
        while running and time.monotonic() < deadline and not stopped():
            time.sleep(pause)
            pause = min(2 * pause + 2e-5, LONGEST_PAUSE_S)
            for name in list(running):
                self._look(name, self._agent.getXferStatus, running, failed)
        for name, handle in running.items():
            self._release(handle)
            failed[name] = TimeoutError(f"no answer within {timeout_s:g} s")
        return failed

    def close(self) -> None:
        """End its threads; what was registered is so no more. Idempotent."""
        self._agent = None

    def _look(
        self, name: str, call: Callable[[int], Any], running: dict[str, int], failed: dict[str, Exception]
    ) -> None:
        try:
            if call(running[name]) != self._nixl.NIXL_SUCCESS:
                return
        except self._errors as error:
            failed[name] = error
        self._release(running.pop(name))

    def _release(self, handle: int) -> None:
        # One that cannot be cancelled stays with the agent; the memory of its transfer is not used again.
        with contextlib.suppress(*self._errors):
            self._agent.releaseXferReq(handle)
