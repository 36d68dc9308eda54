"""What both ends of a payload by reference need of NIXL: its bindings, an agent, registered memory."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from streamrl.errors import ConfigError, StreamRLError

HUGE_PAGE_BYTES = 1 << 21
"""Regions from here on ask for huge pages: reading them takes half the time, there being 512 times fewer to look up."""
IDLE_STAGING_BYTES = 1 << 28
"""What a reader keeps registered for its next reads beyond what its views use."""
PROGRESS_US = 100_000
"""A progress thread sleeps until UCX has something to do; this only bounds the sleep."""

UCX_DEFAULTS = {
    # Everything but named shared memory, which can stay behind when a process is killed while it makes some. On one
    # host cma reads just as fast: the reader's kernel copies out of the producer.
    "UCX_TLS": "^posix,sysv",
    # UCX would listen on every interface, and it authenticates nobody (C11). Across hosts: name a trusted network.
    "UCX_NET_DEVICES": "lo",
    # A failing transfer is expected when a producer dies. It is raised, and would be reported twice.
    "NIXL_LOG_LEVEL": "FATAL",
    "UCX_LOG_LEVEL": "fatal",
    # UCX would catch SIGHUP to print its state, and a process would then outlive its terminal.
    "UCX_DEBUG_SIGNO": "0",
}


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


def bindings() -> Any:
    """The NIXL bindings. Raises ``ConfigError`` when the package is missing."""
    strict = logging.raiseExceptions
    try:
        # The bindings and not the ``nixl_agent`` class above them, which fixes ``pthrDelay`` at 0: its progress thread
        # then never sleeps and takes a whole core in each process.
        with _environment():
            from nixl import _bindings as nixl
    except ImportError as error:
        raise ConfigError(
            f"queue.backend=nixl needs the nixl package: pip install 'streamrl[nixl]' ({error})"
        ) from None
    finally:
        logging.raiseExceptions = strict  # the import turns it off for the whole process
    return nixl


def errors(nixl: Any) -> tuple[type[Exception], ...]:
    """Everything that the bindings raise: classes without a common base, and what becomes of other C++ exceptions."""
    named = (getattr(nixl, name) for name in dir(nixl) if name.startswith("nixl") and name.endswith("Error"))
    return RuntimeError, ValueError, *named


def make_agent(nixl: Any, name: str, *, progress: bool) -> Any:
    config = nixl.nixlAgentConfig()
    config.useProgThread = progress
    config.pthrDelay = PROGRESS_US
    config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT
    try:
        with _environment():
            agent = nixl.nixlAgent(name, config)
            agent.createBackend("UCX", {})
    except errors(nixl) as error:
        chosen = " ".join(
            f"{name}={os.environ.get(name, UCX_DEFAULTS[name])}" for name in ("UCX_TLS", "UCX_NET_DEVICES")
        )
        raise StreamRLError(f"{name}: no UCX backend with {chosen} ({error}); UCX_LOG_LEVEL=info says why") from None
    return agent


class Region:
    """Anonymous memory that an agent has registered. Its pages are taken when first used and die with the process."""

    def __init__(self, nixl: Any, agent: Any, nbytes: int) -> None:
        try:
            self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise StreamRLError(f"no memory of {nbytes} bytes for payloads by reference: {error}") from None
        # A child that is forked has no use for it, and the parent's next writes would copy every page.
        self._memory.madvise(mmap.MADV_DONTFORK)
        if nbytes >= HUGE_PAGE_BYTES:
            with contextlib.suppress(OSError):  # a kernel without them
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = np.frombuffer(self._memory, dtype=np.uint8)
        self.nbytes = nbytes
        self.address = int(self.bytes.ctypes.data)
        self._descriptor = nixl.nixlRegDList(nixl.DRAM_SEG, [(self.address, nbytes, 0, "")])
        try:
            agent.registerMem(self._descriptor, [])
        except errors(nixl) as error:
            raise StreamRLError(
                f"{nbytes} bytes cannot be registered for payloads by reference ({error}); is `ulimit -l` too low?"
            ) from None

    def deregister(self, agent: Any) -> None:
        agent.deregisterMem(self._descriptor, [])

    def drop_pages(self) -> None:
        """Give the memory back and keep the addresses: a transfer that still runs harms nobody."""
        self._memory.madvise(mmap.MADV_DONTNEED)


class Staging:
    """Registered memory that reads land in, used again when nothing refers to what was read. Used on one thread.

    Reusing it saves registration (0.1 ms) and page faults: a read of 1 MB into fresh pages takes five times as long.
    """

    def __init__(self, nixl: Any, agent: Any) -> None:
        self._nixl, self._agent = nixl, agent
        self._regions: set[Region] = set()
        self._idle: dict[Region, None] = {}
        """The longest idle first."""
        self._idle_bytes = 0
        # Views die on any thread, at any moment; an append is all that may happen then.
        self._returned: deque[Region] = deque()

    def take(self, nbytes: int) -> tuple[Region, np.ndarray]:
        """A region, and an array over its first ``nbytes`` whose end gives the region back."""
        self._collect()
        # Four sizes per doubling: at most a quarter is wasted, and reads of similar size share regions.
        step = max(1 << 16, 1 << max(0, (nbytes - 1).bit_length() - 3))
        size = -(-nbytes // step) * step
        region = next((region for region in reversed(self._idle) if region.nbytes == size), None)
        if region is None:
            region = Region(self._nixl, self._agent, size)
            self._regions.add(region)
        else:
            del self._idle[region]
            self._idle_bytes -= size
        staged = region.bytes[:nbytes]
        weakref.finalize(staged, self._returned.append, region).atexit = False
        return region, staged

    def _collect(self) -> None:
        while self._returned:
            region = self._returned.popleft()
            self._idle[region] = None
            self._idle_bytes += region.nbytes
        while self._idle_bytes > IDLE_STAGING_BYTES:
            region = next(iter(self._idle))
            del self._idle[region]
            self._idle_bytes -= region.nbytes
            self._regions.remove(region)
            region.deregister(self._agent)

    def close(self) -> None:
        for region in self._regions:
            region.deregister(self._agent)
