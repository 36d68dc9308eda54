"""Keys of the episodes that clients reach over HTTP: given out, recognised, ended.

::

    open ──► key ──► recognise ─► Seat ─► call ─► the session samples
                        │ 401 never given out     │ 410 ended meanwhile: what runs is cancelled
    close ──► ended ────┘ 410 for the last ENDED_KEYS of them
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from streamrl.envs.episode import ContextFull, Limits
from streamrl.envs.proxy.errors import ApiError, ended, engine_closed, refused, unauthorized

CALLS_PER_SESSION = 128
"""Turns that one session samples at once at most; a client that forgets to wait must not fill the engine."""

HELD_BYTES = 1 << 30
"""Bodies of all requests that are being read or answered, together, at most."""

ENDED_KEYS = 16_384
"""Ended keys that are told apart from unknown ones."""

_log = logging.getLogger(__name__)


class Decoder(Protocol):
    """The part of a tokenizer that spells tokens beside their log-probs."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = ...) -> Any: ...


class SessionCodec(Protocol):
    @property
    def tokenizer(self) -> Decoder: ...


class SessionEpisode(Protocol):
    """What the proxy needs to know of the episode of a session."""

    @property
    def limits(self) -> Limits: ...

    @property
    def codec(self) -> SessionCodec: ...

    @property
    def closed(self) -> bool: ...

    @property
    def engine_error(self) -> BaseException | None: ...


class SampledTurn(Protocol):
    """What came of one request; ``streamrl.envs.chat.capture.ChatTurn``."""

    @property
    def text(self) -> str: ...

    @property
    def reasoning(self) -> str | None: ...

    @property
    def message(self) -> dict[str, Any]:
        """The assistant message; its tool calls are those of the turn."""
        ...

    @property
    def finish_reason(self) -> str: ...

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def logprobs(self) -> Sequence[float]: ...

    @property
    def prompt_token_ids(self) -> Sequence[int]: ...


class SampledText(Protocol):
    """What came of one prompt."""

    @property
    def text(self) -> str: ...

    @property
    def finish_reason(self) -> str: ...

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def logprobs(self) -> Sequence[float]: ...

    @property
    def prompt_token_ids(self) -> Sequence[int]: ...


class ProxySession(Protocol):
    """What a key stands for; ``streamrl.envs.session.Session`` is one."""

    @property
    def episode(self) -> SessionEpisode: ...

    async def chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        max_tokens: int | None = None,
        stop: str | Iterable[str] | None = None,
    ) -> SampledTurn: ...

    async def resume(
        self, prompt: str | Sequence[int], max_tokens: int | None = None, stop: str | Iterable[str] | None = None
    ) -> SampledText:
        """Sample after ``prompt``, which is the whole text so far, unlike that of ``policy.complete``."""
        ...


@dataclass(eq=False)
class Seat:
    """An open session: its key's secret, its calls, and what it must remember between them."""

    session: ProxySession
    secret: bytes = field(repr=False)
    counts: Counter[str]
    strict: bool
    calls: set[asyncio.Timeout] = field(default_factory=set)
    sampling: int = 0
    """Turns that are being sampled."""
    conversations: OrderedDict[str, Any] = field(default_factory=OrderedDict)
    """Of ``/v1/responses``, by response id (``responses.Conversation``)."""

    @asynccontextmanager
    async def call(self, turns: int) -> AsyncIterator[None]:
        """Sample ``turns`` turns inside. Every way in which that fails becomes an ``ApiError``.

        Closing the session cancels what runs inside and raises 410. Being cancelled, as when the client disconnects,
        stays what it is.
        """
        if self.sampling + turns > CALLS_PER_SESSION:
            raise ApiError(429, "too_many_calls", f"a session samples at most {CALLS_PER_SESSION} turns at once")
        ending = asyncio.timeout(None)
        self.sampling += turns
        try:
            async with ending:
                self.calls.add(ending)
                try:
                    yield
                except BaseException as error:  # noqa: BLE001 always raised again
                    raise _told(error, self.session.episode) from None
        except TimeoutError:
            if ending.expired():
                raise ended() from None
            raise
        finally:
            self.calls.discard(ending)
            self.sampling -= turns

    def end(self) -> None:
        """Cancel what runs."""
        now = asyncio.get_running_loop().time() if self.calls else 0.0
        for each in self.calls:
            if not each.expired():
                each.reschedule(now)


def _told(error: BaseException, episode: SessionEpisode) -> BaseException:
    """What a client is told of ``error``; a cancellation and what is an ``ApiError`` already stay as they are."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        left = task is not None and task.cancelling()  # the client did, or the session ended
        return error if left else engine_closed()
    if isinstance(error, ApiError) or not isinstance(error, Exception):
        return error
    if isinstance(error, ContextFull):
        return ApiError(400, "context_length_exceeded", str(error), "messages")
    if episode.engine_error is not None:
        return engine_closed()
    if isinstance(error, ValueError):
        return refused(error)
    if episode.closed:
        return ended()
    _log.error("the proxy could not sample", exc_info=error)
    return ApiError(500, "internal_error", "the session failed; the rollouter's log says why")


class SessionDesk:
    """All sessions that a rollouter serves. Its methods are called on the event loop."""

    def __init__(self, strict: bool = False) -> None:
        """``strict``: refuse requests that want to sample in another way than the run, instead of counting them."""
        self.counts: Counter[str] = Counter()
        """``requests``, ``errors/<status>``, ``ignored/<parameter>``, ``disconnected``."""
        self._strict = strict
        self._held = 0
        self._seats: dict[str, Seat] = {}
        self._ended: OrderedDict[str, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seats)

    def open(self, session: ProxySession) -> str:
        """A key for ``session``, good until ``close``."""
        name, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
        self._seats[name] = Seat(session, secret.encode(), self.counts, self._strict)
        return f"sk-{name}-{secret}"

    def close(self, key: str) -> None:
        """The episode of ``key`` has ended: what it samples is cancelled. Closing twice is no error."""
        name = key.split("-", 2)[1]
        seat = self._seats.pop(name, None)
        if seat is None:
            return
        self._ended[name] = seat.secret
        if len(self._ended) > ENDED_KEYS:
            self._ended.popitem(last=False)
        seat.end()

    @contextmanager
    def holding(self, count: int) -> Iterator[None]:
        """Keep a body of ``count`` bytes inside. Raises ``ApiError`` 503 where too much is kept already."""
        if self._held + count > HELD_BYTES:
            raise ApiError(503, "too_busy", f"requests of {HELD_BYTES} bytes are being answered; ask again later")
        self._held += count
        try:
            yield
        finally:
            self._held -= count

    def recognise(self, key: str | None) -> Seat:
        """The seat of ``key``. Raises ``ApiError`` 401 for a key that was never given out, 410 for one that ended."""
        if not key:
            raise unauthorized("no key; send policy.api_key as `Authorization: Bearer KEY` or `x-api-key: KEY`")
        _, _, rest = key.partition("-")
        name, _, secret = rest.partition("-")
        seat = self._seats.get(name)
        known = seat.secret if seat is not None else self._ended.get(name, b"")
        if not known or not hmac.compare_digest(known, secret.encode("utf-8", "surrogateescape")):
            raise unauthorized("this key belongs to no episode; take policy.api_key of the episode that runs")
        if seat is None:
            raise ended()
        return seat
