"""Paths of the proxy, and how one request runs: key, body, turn, answer. Clients see only ``ApiError``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
from aiohttp import hdrs, web

from streamrl.envs.proxy.chat_completions import ChatCompletion
from streamrl.envs.proxy.completions import TextCompletion
from streamrl.envs.proxy.desk import Seat, SessionDesk
from streamrl.envs.proxy.errors import ApiError, too_large
from streamrl.envs.proxy.exchange import Dialect, Exchange
from streamrl.envs.proxy.messages import AnthropicErrors, Messages
from streamrl.envs.proxy.openai_errors import OpenAIErrors
from streamrl.envs.proxy.responses import Responses

BODY_BYTES = 8 << 20
"""Of one request at most, after decompression."""

BODY_S = 60.0
"""Seconds in which a body must have arrived."""

KEEP_ALIVE_S = 10.0
"""Between two comments in a stream whose turn is still being sampled."""

WRITE_S = 60.0
"""Seconds for which a client may leave what it was sent unread."""

_WRITE_BYTES = 64 << 10
_MODEL = "policy"

_log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_EXCHANGES: dict[str, Callable[[Seat, bytes], Exchange]] = {
    "chat/completions": ChatCompletion,
    "completions": TextCompletion,
    "responses": Responses,
    "messages": Messages,
}


def add_routes(app: web.Application, desk: SessionDesk) -> None:
    """Serve the sessions of ``desk`` under ``/v1``.

    ``app`` must run with ``AppRunner(app, handler_cancellation=True)``: a client that disconnects ends its sampling.
    The Anthropic SDK puts ``/v1`` before its paths itself, so its path exists twice: one base URL does for both SDKs.
    """
    router = app.router
    for path, exchange in _EXCHANGES.items():
        dialect = exchange.dialect  # type: ignore[attr-defined]
        router.add_post(f"/v1/{path}", _guard(desk, dialect, _sampling(desk, exchange)))
    router.add_post("/v1/v1/messages", _guard(desk, Messages.dialect, _sampling(desk, Messages)))
    router.add_get("/v1/models", _guard(desk, OpenAIErrors(), _models(desk)))
    router.add_get("/v1/models/{name:.+}", _guard(desk, OpenAIErrors(), _model(desk)))
    router.add_get("/health", _health)
    router.add_route("*", "/v1/v1/{rest:.*}", _guard(desk, AnthropicErrors(), _unknown))
    router.add_route("*", "/v1/{rest:.*}", _guard(desk, OpenAIErrors(), _unknown))


def _guard(desk: SessionDesk, dialect: Dialect, handle: Handler) -> Handler:
    """``handle``, whose errors are answered in ``dialect``."""

    async def guarded(request: web.Request) -> web.StreamResponse:
        desk.counts["requests"] += 1
        try:
            return await handle(request)
        except ApiError as caught:
            error = caught
        except (asyncio.CancelledError, ConnectionError):
            desk.counts["disconnected"] += 1
            raise
        except web.HTTPException as caught:
            error = ApiError(caught.status, "http_error", caught.reason)
        except Exception:  # noqa: BLE001 a client must never see a traceback; the log does
            _log.exception("%s %s", request.method, request.path)
            error = ApiError(500, "internal_error", "the proxy failed; the rollouter's log says why")
        desk.counts[f"errors/{error.status}"] += 1
        return _json(dialect.error(error), error.status)

    return guarded


def _sampling(desk: SessionDesk, exchange: Callable[[Seat, bytes], Exchange]) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        seat = desk.recognise(_key(request))
        with desk.holding(_most_bytes(request)):
            asked = exchange(seat, await _body(request))
            headers = {"x-streamrl-ignored": ", ".join(asked.ignored)} if asked.ignored else {}
            if asked.stream:
                return await _stream(request, asked, headers)
            await _sample(asked)
            return _json(asked.body(), 200, headers)

    return handle


async def _sample(asked: Exchange) -> None:
    async with asked.seat.call(asked.turns):
        await asked.sample()


async def _stream(request: web.Request, asked: Exchange, headers: dict[str, str]) -> web.StreamResponse:
    """Sample, then tell the turn as events.

    The answer begins with the first comment or event: what fails before is an ordinary error with its status.
    """
    response = web.StreamResponse(headers={**headers, "Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    sampling = asyncio.create_task(_sample(asked))
    try:
        while not (await asyncio.wait({sampling}, timeout=KEEP_ALIVE_S))[0]:
            if not response.prepared:
                await response.prepare(request)
            await _write(response, b": sampling\n\n")
        sampling.result()
        told = asked.events()
    except ApiError as error:
        if not response.prepared:
            raise
        told = iter((asked.dialect.error_event(error),))
    finally:
        sampling.cancel()
        await asyncio.wait({sampling})
    if not response.prepared:
        await response.prepare(request)
    for chunk in _chunks(told):
        await _write(response, chunk)
    await response.write_eof()
    return response


async def _write(response: web.StreamResponse, chunk: bytes) -> None:
    """Raises ``ConnectionError`` where the client does not read."""
    try:
        async with asyncio.timeout(WRITE_S):
            await response.write(chunk)
    except TimeoutError:
        raise ConnectionAbortedError(f"the client read nothing for {WRITE_S:g} s") from None


def _chunks(events: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes in fewer, larger pieces."""
    held = bytearray()
    for each in events:
        held += each
        if len(held) >= _WRITE_BYTES:
            yield bytes(held)
            held.clear()
    yield bytes(held)


def _most_bytes(request: web.Request) -> int:
    """What the body may take. Raises ``ApiError`` 413 where it says that it is too large."""
    length = request.content_length
    if length is not None and length > BODY_BYTES:
        raise too_large(BODY_BYTES)
    if length is None or hdrs.CONTENT_ENCODING in request.headers:
        return BODY_BYTES
    return length


async def _body(request: web.Request) -> bytes:
    """Raises ``ApiError`` for one that is too large (413) or does not arrive (408)."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.content.iter_any():
                body += part
                if len(body) > BODY_BYTES:
                    raise too_large(BODY_BYTES)
    except TimeoutError:
        raise ApiError(408, "request_timeout", f"the body did not arrive within {BODY_S:g} s") from None
    return bytes(body)


def _key(request: web.Request) -> str | None:
    scheme, _, credentials = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    if scheme.lower() == "bearer" and credentials:
        return credentials.strip()
    return request.headers.get("x-api-key")


def _models(desk: SessionDesk) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        desk.recognise(_key(request))
        return _json({"object": "list", "data": [_card(_MODEL)], "has_more": False}, 200)

    return handle


def _model(desk: SessionDesk) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        desk.recognise(_key(request))
        return _json(_card(request.match_info["name"]), 200)

    return handle


def _card(name: str) -> dict[str, Any]:
    """Every name is the same model: the policy."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "streamrl"}


async def _health(_: web.Request) -> web.Response:
    return _json({"status": "ok"}, 200)


async def _unknown(request: web.Request) -> web.Response:
    known = ", ".join(f"POST /v1/{path}" for path in _EXCHANGES)
    raise ApiError(404, "not_found", f"{request.method} {request.path}: not served here; there are {known}")


def _json(body: dict[str, Any], status: int, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, headers=headers, content_type="application/json")
