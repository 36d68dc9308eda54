"""A proxy on a free port whose sessions answer from a script, and clients for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from scripted import ALPHABET, END, CharTokenizer

from streamrl.envs.chat.capture import ChatTurn
from streamrl.envs.chat.tool_calls import ToolCall
from streamrl.envs.codec import Codec
from streamrl.envs.episode import Limits
from streamrl.envs.proxy import SessionDesk, add_routes

PROMPT = (7, 8, 9)
PATIENT = aiohttp.ClientTimeout()
"""Tests end by a deadline of their own: a busy machine is no failure."""
LIMITS = Limits(temperature=1.0, top_k=0, top_p=1.0, max_tokens=64, max_length=128)


@dataclass
class ScriptedEpisode:
    limits: Limits = LIMITS
    codec: Codec = field(default_factory=lambda: Codec(CharTokenizer()))
    closed: bool = False
    engine_error: BaseException | None = None


@dataclass
class Request:
    """What the proxy asked of the session."""

    messages: Any
    tools: Any
    max_tokens: int | None
    stop: Any


def says(text: str, *calls: ToolCall, reasoning: str = "", finish: str = "") -> ChatTurn:
    """A turn of one token per character of ``text`` and the end token; its log-probs are -0.5, -1, -1.5, …"""
    ids = (*(ALPHABET.index(each) for each in text), END)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": told(call)}}
            for call in calls
        ]
    return ChatTurn(
        text=text,
        tool_calls=list(calls),
        reasoning=reasoning,
        message=message,
        finish_reason=finish or ("tool_calls" if calls else "stop"),
        token_ids=ids,
        logprobs=tuple(-0.5 * (place + 1) for place in range(len(ids))),
        prompt_token_ids=PROMPT,
    )


def told(call: ToolCall) -> Any:
    return call.raw if call.arguments is None else call.arguments


def calls(name: str, call_id: str = "call00000", **arguments: Any) -> ToolCall:
    return ToolCall(call_id, name, arguments, f"{name}({arguments})")


class ScriptedSession:
    """Answers in order; an exception in the script is raised. While ``hold`` is set, requests wait for it."""

    def __init__(self, *script: ChatTurn | BaseException, hold: bool = False) -> None:
        self.episode = ScriptedEpisode()
        self.requests: list[Request] = []
        self.started = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.hold = asyncio.Event()
        if not hold:
            self.hold.set()
        self._script = list(script)

    async def chat(self, messages: Any, tools: Any = None, max_tokens: int | None = None, stop: Any = None) -> ChatTurn:
        self.requests.append(Request(messages, tools, max_tokens, stop))
        answer = self._script.pop(0) if len(self._script) > 1 else self._script[0]
        self.started.set()
        try:
            await self.hold.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def resume(self, prompt: Any, max_tokens: int | None = None, stop: Any = None) -> ChatTurn:
        return await self.chat(prompt, None, max_tokens, stop)


@dataclass
class Served:
    """A running proxy with one session open."""

    url: str
    key: str
    desk: SessionDesk
    http: aiohttp.ClientSession
    clients: AsyncExitStack
    """Closes the SDKs' clients in the end."""

    @property
    def openai(self) -> Any:
        from openai import AsyncOpenAI

        client = AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0)
        self.clients.push_async_callback(client.close)
        return client

    @property
    def anthropic(self) -> Any:
        from anthropic import AsyncAnthropic

        client = AsyncAnthropic(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0)
        self.clients.push_async_callback(client.close)
        return client

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
        """Status, JSON body and headers; ``body`` is JSON unless it is bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Authorization": f"Bearer {self.key}", **headers}
        async with self.http.post(f"{self.url}/v1/{path}", data=data, headers=sent) as response:
            return response.status, await response.json(), response.headers


@asynccontextmanager
async def serving(session: Any, strict: bool = False) -> AsyncIterator[Served]:
    """The proxy as a rollouter serves it."""
    app = web.Application()
    desk = SessionDesk(strict)
    add_routes(app, desk)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1_024).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with AsyncExitStack() as clients:
            http = await clients.enter_async_context(
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=PATIENT)
            )
            yield Served(url, desk.open(session), desk, http, clients)
    finally:
        await runner.cleanup()


def play(make: Callable[[], Any], scene: Callable[[Any, Served], Awaitable[None]], strict: bool = False) -> None:
    """Run ``scene(session, served)`` against a proxy whose session is what ``make`` gives."""

    async def run() -> None:
        session = make()
        async with asyncio.timeout(60), serving(session, strict) as served:
            await scene(session, served)

    asyncio.run(run())


def script(*answers: ChatTurn | BaseException, hold: bool = False) -> Callable[[], ScriptedSession]:
    return lambda: ScriptedSession(*answers, hold=hold)


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
USER = [{"role": "user", "content": "1+2?"}]
