"""Requests to an OpenAI-compatible endpoint: paced, tried again where that may help, and given up in time."""

from __future__ import annotations

import asyncio
import email.utils
import json
import math
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamrl.errors import ConfigError, EnvironmentFailed

if TYPE_CHECKING:
    import aiohttp

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
REPLY_BYTES = 4 << 20
_AGAIN = (408, 409, 425, 429)
"""Status codes beside 5xx after which the same request may succeed."""


@dataclass(frozen=True)
class Pace:
    """How fast, how often and how long."""

    at_once: int
    per_s: float
    """Requests that may begin in a second; 0: any number."""
    timeout_s: float
    """Of one request."""
    retries: int
    deadline_s: float
    """Of one ``complete``, with everything that it waits for."""

    def __post_init__(self) -> None:
        for name, value, least in (
            ("at_once", self.at_once, 1),
            ("retries", self.retries, 0),
            ("per_s", self.per_s, 0),
        ):
            if not least <= value < math.inf:
                raise ConfigError(f"{name}={value}: must be at least {least}")
        for name, seconds in (("timeout_s", self.timeout_s), ("deadline_s", self.deadline_s)):
            if not 0 < seconds < math.inf:
                raise ConfigError(f"{name}={seconds}: must be positive")


class _Again(Exception):
    """The request failed in a way that may pass; ``wait_s`` is what the server asks for."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class JudgeClient:
    """Any number of coroutines may wait for replies. Connections are made with the first request of an event loop."""

    def __init__(self, url: str, key: str, pace: Pace) -> None:
        try:
            import aiohttp  # noqa: F401 asked for here, so that it is missed at the start of a run
        except ModuleNotFoundError as error:
            raise ConfigError("aiohttp is not installed; pip install 'streamrl[rewards]'") from error
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"url={url!r}: expected http://… or https://…, up to /chat/completions")
        self.url = url.rstrip("/") + "/chat/completions"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._pace = pace
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next_start = 0.0
        """Event loop's time before which no further request may begin."""

    async def complete(self, request: dict[str, Any]) -> str:
        """The content of the reply's first choice. Raises ``EnvironmentFailed``."""
        self._enter_loop()
        last: _Again | None = None
        try:
            async with asyncio.timeout(self._pace.deadline_s):
                for attempt in range(self._pace.retries + 1):
                    if last is not None:
                        await asyncio.sleep(_wait_s(last, attempt))
                    try:
                        return await self._once(request)
                    except _Again as again:
                        last = again
        except TimeoutError:
            cause = f"; the last request: {last}" if last is not None else ""
            raise EnvironmentFailed(f"judge: no score within deadline_s={self._pace.deadline_s:g}{cause}") from None
        raise EnvironmentFailed(f"judge: gave up after {self._pace.retries + 1} requests: {last}")

    async def close(self) -> None:
        """End the connections."""
        session, self._session, self._loop = self._session, None, None
        if session is not None:
            await session.close()

    def _enter_loop(self) -> None:
        import aiohttp

        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._next_start = loop, 0.0
            self._room = asyncio.Semaphore(self._pace.at_once)
            timeout = aiohttp.ClientTimeout(total=self._pace.timeout_s)
            self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout)

    async def _once(self, request: dict[str, Any]) -> str:
        import aiohttp

        assert self._session is not None
        async with self._room:
            await self._turn()
            try:
                async with self._session.post(self.url, json=request, allow_redirects=False) as response:
                    body = await response.content.read(REPLY_BYTES + 1)
                    while len(body) <= REPLY_BYTES and (more := await response.content.read(REPLY_BYTES + 1)):
                        body += more
            except TimeoutError:
                raise _Again(f"no reply within timeout_s={self._pace.timeout_s:g}") from None
            except aiohttp.ClientError as error:
                raise _Again(f"{type(error).__name__}: {error}") from error
        if len(body) > REPLY_BYTES:
            raise EnvironmentFailed(f"judge: expected a reply of at most {REPLY_BYTES} bytes")
        if response.status in _AGAIN or response.status >= 500:
            wait_s = _retry_after_s(response.headers.get("Retry-After", ""))
            raise _Again(f"status {response.status}: {_words(body)}", wait_s)
        if response.status != 200:
            raise EnvironmentFailed(f"judge: {self.url} answered with status {response.status}: {_words(body)}")
        return _content(body)

    async def _turn(self) -> None:
        """Wait until another request may begin."""
        if self._pace.per_s:
            now = asyncio.get_running_loop().time()
            start = max(now, self._next_start)
            self._next_start = start + 1 / self._pace.per_s
            await asyncio.sleep(start - now)


def _wait_s(again: _Again, attempt: int) -> float:
    """What the server asked for; else twice as long each time, with jitter, so that clients do not come in step."""
    if again.wait_s is not None:
        return again.wait_s
    most = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (attempt - 1))
    return most * random.uniform(0.5, 1.0)


def _retry_after_s(header: str) -> float | None:
    """Seconds, given as such or as a date (RFC 9110, 10.2.3)."""
    if header.strip().isdecimal():
        return float(header)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    except (ValueError, TypeError):
        return None


def _content(body: bytes) -> str:
    try:
        content = json.loads(body)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise EnvironmentFailed(f"judge: the reply has no choices[0].message.content: {_words(body)}") from error
    if not isinstance(content, str):
        raise EnvironmentFailed(f"judge: expected text as content, got {type(content).__name__}")
    return content


def _words(body: bytes) -> str:
    return " ".join(body[:400].decode(errors="replace").split())[:200]
