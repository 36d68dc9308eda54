"""A small OpenAI-compatible server whose answers are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from aiohttp import web


def completion(content: Any) -> web.Response:
    return web.json_response({"choices": [{"message": {"role": "assistant", "content": content}}]})


class JudgeServer:
    """Answers request N with ``answers[N]``, the last one for ever; remembers the requests."""

    def __init__(self, *answers: Any) -> None:
        self._answers = answers
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.at: list[float] = []
        self.running = 0
        self.most_at_once = 0
        self.url = ""

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.at.append(asyncio.get_running_loop().time())
        self.requests.append(await request.json())
        self.headers.append(dict(request.headers))
        answer = self._answers[min(len(self.requests), len(self._answers)) - 1]
        self.running += 1
        self.most_at_once = max(self.most_at_once, self.running)
        try:
            if callable(answer):
                response: web.StreamResponse = await answer(request)
                return response
            return completion(answer)
        finally:
            self.running -= 1

    def serve(self, use: Callable[[JudgeServer], Awaitable[Any]]) -> Any:
        """The result of ``use``, called while the server runs on a port of the loopback interface."""

        async def main() -> Any:
            application = web.Application()
            application.router.add_post("/v1/chat/completions", self._answer)
            runner = web.AppRunner(application, handler_cancellation=True)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            assert site._server is not None
            self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"  # type: ignore[attr-defined]
            try:
                return await use(self)
            finally:
                await runner.cleanup()

        return asyncio.run(main())


Handler = Callable[[web.Request], Coroutine[Any, Any, web.StreamResponse]]


def status(code: int, headers: dict[str, str] | None = None, text: str = "not now") -> Handler:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(status=code, headers=headers, text=text)

    return answer


async def never(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def hang_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()
