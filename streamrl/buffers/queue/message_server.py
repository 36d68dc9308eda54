"""What every server of the data plane does with messages: take them apart, refuse what is wrong, answer, and survive.

Subclasses say what a request means (``handle``) and what follows from a burst of them (``settled``).
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, NamedTuple

from streamrl.buffers.journal.writer import Journal, JournalError
from streamrl.buffers.journaling import AfterSync
from streamrl.buffers.links.link_keys import LinkKeys
from streamrl.buffers.links.link_zmq import Context, ServerLink, sender_name
from streamrl.buffers.wire import codec
from streamrl.buffers.wire.messages import Body, Header, Refusal
from streamrl.buffers.wire.payload import Frame, Payload
from streamrl.clock import Clock
from streamrl.errors import ConfigError, StreamRLError, WireError

OnEvent = Callable[[str, dict[str, Any]], None]
OnFatal = Callable[[StreamRLError], None]


class Asker(NamedTuple):
    """Who sent a request, and the number to answer it by."""

    identity: bytes
    request: int

    @property
    def name(self) -> str:
        return sender_name(self.identity)

    @property
    def key(self) -> str:
        """The same when the request comes again."""
        return f"{self.identity.decode(errors='backslashreplace')}/{self.request}"


class MessageServer(ABC):
    """Serves at ``endpoint`` until ``run`` is cancelled; no message from outside ends it.

    ``on_event(name, fields)`` gets ``malformed_frame``, ``request_refused`` and ``journal_failed``; ``on_fatal(error)``
    is called once, when the server cannot go on.
    """

    def __init__(
        self,
        endpoint: str,
        clock: Clock,
        on_event: OnEvent,
        on_fatal: OnFatal,
        *,
        journal: Journal | None = None,
        context: Context | None = None,
        keys: LinkKeys | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.messages = 0
        self.bytes = 0
        """Received since the start, headers included."""
        self.malformed = 0
        """Messages that did not follow the schema."""
        self.refused = 0
        self.ended = False
        """``on_fatal`` was called."""
        self.journal = journal
        self._clock = clock
        self._on_event = on_event
        self._on_fatal = on_fatal
        self._context = context
        self._keys = keys
        self._link: ServerLink | None = None
        self._after_sync = AfterSync(journal)

    @abstractmethod
    def handle(self, asker: Asker, header: Header, payload: Payload) -> None:
        """Carry out one request. ``WireError`` and ``StreamRLError`` become refusals, ``JournalError`` ends all."""

    def settled(self) -> None:  # noqa: B027 most servers have nothing to do then
        """After each burst of messages."""

    def tasks(self) -> Iterable[Coroutine[Any, Any, None]]:
        """What runs beside the socket and the journal."""
        return ()

    def bind(self) -> None:
        """Take requests from here on. ``StreamRLError`` if the endpoint cannot be bound."""
        self._link = ServerLink(self.endpoint, self._receive, self.settled, self._context, self._keys)
        self.endpoint = self._link.endpoint

    async def run(self) -> None:
        """Serve until cancelled. Binds, unless ``bind`` was called."""
        if self._link is None:
            self.bind()
        assert self._link is not None
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._link.failed(), name="data plane: socket")
                if self.journal is not None:
                    tasks.create_task(self._journaled(self.journal.run), name="data plane: journal to disk")
                    tasks.create_task(self._journaled(self._after_sync.run), name="data plane: answers after it")
                for coroutine in self.tasks():
                    tasks.create_task(coroutine)
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the socket. Idempotent."""
        if self._link is not None:
            self._link.close()
            self._link = None

    @property
    def now(self) -> float:
        return self._clock.now()

    # Messages ---------------------------------------------------------------------------------------------------------

    def _receive(self, identity: bytes, frames: list[Frame]) -> None:
        """One multipart, which may hold several messages; each is carried out or refused alone."""
        for message in codec.split(frames):
            asker = Asker(identity, codec.request_id(message))
            self.messages += 1
            self.bytes += sum(map(len, message))
            try:
                header, payload = codec.decode(message)
                self.handle(asker, header, Payload(payload))
            except WireError as error:
                self.malformed += 1
                self.report("malformed_frame", {"sender": asker.name, "error": str(error)})
                self.answer(asker, Refusal(str(error), malformed=True))
            except JournalError as error:
                self._journal_failed(error, asker.name)
            except ConfigError as error:
                self.end(error)
            except StreamRLError as error:
                self.refused += 1
                self.report("request_refused", {"sender": asker.name, "error": str(error)})
                self.answer(asker, Refusal(str(error), malformed=False))

    def answer(self, asker: Asker, body: Body, payload: Iterable[Frame] = ()) -> bool:
        """False when the asker is gone; it asks again when it is back."""
        if self._link is None:
            return False
        return self._link.send(asker.identity, codec.encode(body, asker.request, self.now, list(payload)))

    def answer_when_synced(self, asker: Asker, body: Body) -> None:
        """Answer once what was journaled so far is as durable as ``buffer.fsync`` says."""
        self._after_sync.say(lambda: self.answer_soon(asker, body))

    def answer_soon(self, asker: Asker, body: Body, payload: Iterable[Frame] = ()) -> None:
        """With this turn's other answers to the same peer; one that is gone asks again."""
        if self._link is not None:
            self._link.send_soon(asker.identity, codec.encode(body, asker.request, self.now, list(payload)))

    def report(self, event: str, fields: dict[str, Any]) -> None:
        self._on_event(event, fields)

    # The end ----------------------------------------------------------------------------------------------------------

    def end(self, why: StreamRLError) -> None:
        """The server cannot go on."""
        if not self.ended:
            self.ended = True
            self._on_fatal(why)

    def _journal_failed(self, error: JournalError, sender: str = "") -> None:
        """Nothing was changed, and nothing is acknowledged: what is on the disk is what clients were told."""
        self.report("journal_failed", {"sender": sender, "error": str(error)})
        self.end(error)

    @contextlib.contextmanager
    def told_of_journal_failure(self) -> Iterator[None]:
        try:
            yield
        except JournalError as error:
            self._journal_failed(error)

    async def _journaled(self, task: Callable[[], Coroutine[Any, Any, None]]) -> None:
        with self.told_of_journal_failure():
            await task()
