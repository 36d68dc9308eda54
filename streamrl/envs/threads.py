"""User code without ``async``: it runs in a thread of its own, with a ``policy`` whose calls block.

A thread cannot be ended from outside. When its episode is over, its calls of the policy are refused; where it hangs
elsewhere it is left behind (``guard.py``) and its place reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from streamrl.envs.failure import Interrupted, one_line, stack_of
from streamrl.envs.guard import left_behind
from streamrl.errors import EnvironmentFailed

if TYPE_CHECKING:
    from streamrl.envs.chat.capture import ChatTurn
    from streamrl.envs.environment import Completion, Policy, Reward, Task

log = logging.getLogger(__name__)

_T = TypeVar("_T")

THREAD_GRACE_S = 2.0
"""Seconds that a thread has to come back from a call that was interrupted; less than ``guard.GRACE_S``."""

MOST_REFUSED = 100
"""Calls of a policy whose episode is over, after which the thread that makes them is stopped for good."""


class EpisodeOver(BaseException):
    """Raised in a thread by the policy's methods when its episode was ended; no ``except Exception`` holds it."""


class UserThread:
    """A thread that runs one call of user code after the other, as an async context manager.

    ``interrupt`` is called where one is cancelled: it must end the waits of the code that are ours.
    """

    def __init__(self, interrupt: Callable[[], None] = lambda: None) -> None:
        self._interrupt = interrupt
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._at_end: Callable[[], object] | None = None
        self._thread = threading.Thread(target=self._work, name="episode", daemon=True)

    def at_end(self, function: Callable[[], object]) -> None:
        """Call ``function`` in the thread after everything else, however that ended. Nobody waits for it."""
        self._at_end = function

    async def __aenter__(self) -> UserThread:
        self._thread.start()
        return self

    async def __aexit__(self, kind: object, error: object, frames: TracebackType | None) -> None:
        self._calls.put(None)

    async def call(self, function: Callable[..., _T], *args: Any) -> _T:
        """``function(*args)`` in the thread. Cancelled, it raises ``Interrupted``, which says where the thread was."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[tuple[_T | None, BaseException | None]] = loop.create_future()
        context = contextvars.copy_context()

        def work() -> None:
            outcome: tuple[_T | None, BaseException | None]
            try:
                outcome = context.run(function, *args), None
            except BaseException as error:  # noqa: BLE001 it is raised in the episode
                outcome = None, error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_settle, ended, outcome)

        self._calls.put(work)
        try:
            result, error = await asyncio.shield(ended)
        except asyncio.CancelledError:
            raise await self._leave(ended) from None
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    async def _leave(self, ended: asyncio.Future[Any]) -> Interrupted:
        """End what the thread waits for of ours; where it goes on nevertheless it is left behind."""
        place, stack = stack_of(self._thread.ident)
        self._interrupt()
        try:
            await asyncio.wait({ended}, timeout=THREAD_GRACE_S)
        finally:
            if not ended.done():
                left_behind.add(id(self._thread), place)
        return Interrupted(place, stack, hangs=not ended.done())

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
        try:
            if self._at_end is not None:
                self._at_end()
        except Exception as error:  # noqa: BLE001 the episode is over; user code may raise anything
            log.warning("cleaning up after an episode raised %s", one_line(error))
        left_behind.remove(id(self._thread))


def _settle(ended: asyncio.Future[Any], outcome: object) -> None:
    if not ended.done():
        ended.set_result(outcome)


def in_thread(function: Callable[..., Any], options: dict[str, Any]) -> Callable[[Task, Any], Coroutine[Any, Any, Any]]:
    """A plain ``function(task, policy, **options)`` as an episode."""

    async def episode(task: Task, policy: Policy) -> Any:
        blocking = BlockingPolicy(policy)
        async with UserThread(blocking.calls.end) as thread:
            returned = await thread.call(partial(function, task, blocking, **options))
        if inspect.iscoroutine(returned):
            returned.close()
            raise EnvironmentFailed("the episode returned a coroutine; write `async def`, also around decorators")
        return returned

    return episode


class BlockingPolicy:
    """A ``policy`` for threads: the methods of a session, which block until they have a result."""

    def __init__(self, session: Policy, calls: Calls | None = None) -> None:
        self._session = session
        self.calls = calls or Calls(asyncio.get_running_loop())

    def complete(
        self, prompt: str | Sequence[int], max_tokens: int | None = None, stop: str | Iterable[str] | None = None
    ) -> Completion:
        """As ``Session.complete``."""
        return self.calls.wait(lambda: self._session.complete(prompt, max_tokens, stop))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        stop: str | Iterable[str] | None = None,
    ) -> ChatTurn:
        """As ``Session.chat``."""
        return self.calls.wait(lambda: self._session.chat(messages, tools, max_tokens, stop))

    def branch(self) -> BlockingPolicy:
        """As ``Session.branch``; threads that user code starts may use branches at the same time."""
        return BlockingPolicy(self.calls.now(self._session.branch), self.calls)

    def reward(self, value: float) -> None:
        """As ``Session.reward``."""
        self.calls.now(lambda: self._session.reward(value))

    def finish(self, reward: float | Reward) -> None:
        """As ``Session.finish``."""
        self.calls.now(lambda: self._session.finish(reward))

    def clip(self, text: str, tokens: int) -> str:
        """As ``Session.clip``."""
        return self.calls.wait(lambda: self._session.clip(text, tokens))

    @property
    def base_url(self) -> str:
        return self.calls.now(lambda: self._session.base_url)

    @property
    def api_key(self) -> str:
        return self.calls.now(lambda: self._session.api_key)


class Calls:
    """Calls from threads to the event loop of an episode, until it is over."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._waiting: set[Future[Any]] = set()
        self._over = False
        self._refused = 0

    def wait(self, make: Callable[[], Coroutine[Any, Any, _T] | Awaitable[_T]]) -> _T:
        """The result of the coroutine that ``make`` makes, run on the loop. Raises ``EpisodeOver`` once it is over."""

        async def run() -> _T:
            return await make()

        with self._lock:
            over = self._over
            if not over:
                future = asyncio.run_coroutine_threadsafe(run(), self._loop)
                self._waiting.add(future)
        if over:
            self._refuse()
        try:
            return future.result()
        except CancelledError:
            if self._over:
                raise EpisodeOver from None
            raise
        finally:
            self._waiting.discard(future)

    def now(self, call: Callable[[], _T]) -> _T:
        """The result of a plain function, called on the loop."""

        async def run() -> _T:
            return call()

        return self.wait(run)

    def end(self) -> None:
        """The episode is over: calls under way end, later ones are refused."""
        with self._lock:
            self._over = True
            waiting = list(self._waiting)
        for future in waiting:
            future.cancel()

    def _refuse(self) -> NoReturn:
        self._refused += 1
        if self._refused > MOST_REFUSED:
            threading.Event().wait()  # it holds every exception and calls again and again: it may not take the CPU
        raise EpisodeOver
