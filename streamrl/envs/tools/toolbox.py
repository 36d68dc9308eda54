"""The tools of one episode: what the model is told of them, and the answers to its calls.

::

    turn.tool_calls ── unknown, malformed, too many ──────────────────► error text ─┐
                    └─ call with a time limit ─ raises or runs out ───► error text ─┤ clipped ─► tool messages
                                              └ returns ──────────────► text ───────┘
                                              └ ToolFatal ────────────► the episode fails
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol

from streamrl.envs.loading import nearest
from streamrl.envs.tools.function import FunctionTool, Tool, ToolError, ToolFatal, schema_of
from streamrl.envs.tools.mcp_server import McpServer
from streamrl.envs.tools.signature import BadArguments
from streamrl.errors import ConfigError, EnvironmentFailed


class Call(Protocol):
    """What the model asked for (``streamrl.envs.chat``)."""

    @property
    def id(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def arguments(self) -> dict[str, Any] | None:
        """None where what the model wrote is no call."""
        ...

    @property
    def raw(self) -> str: ...

    @property
    def error(self) -> str:
        """What is wrong with a call that could not be read."""
        ...


class Clips(Protocol):
    """The part of a policy that a toolbox needs."""

    async def clip(self, text: str, tokens: int) -> str: ...


class Toolbox:
    """Answers the calls of one episode. An async context manager: MCP servers of the episode live as long as it.

    ``tools`` are functions, bound methods and ``McpServer``; ``state`` is what tools with a parameter ``state`` get.
    Raises ``ConfigError`` for what cannot be a tool and for names that occur twice.
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., Any] | McpServer],
        policy: Clips,
        state: Any = None,
        *,
        max_parallel: int = 8,
        timeout_s: float = 30.0,
        max_result_tokens: int = 256,
    ) -> None:
        """``max_parallel``: calls of one turn that are carried out. ``max_result_tokens``: of one answer."""
        self.calls = 0
        self.errors = 0
        self._policy = policy
        self._state = state
        self._max_parallel = max_parallel
        self._timeout_s = timeout_s
        self._max_result_tokens = max_result_tokens
        self._servers = [each for each in tools if isinstance(each, McpServer)]
        self._stack = AsyncExitStack()
        self._tools: dict[str, Tool] = {}
        for each in tools:
            if not isinstance(each, McpServer):
                self._add(FunctionTool.of(each))

    async def __aenter__(self) -> Toolbox:
        async with AsyncExitStack() as stack:
            for server in self._servers:
                for each in await stack.enter_async_context(server.tools()):
                    self._add(each)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.__aexit__(*error)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """For ``policy.chat(messages, tools=…)``."""
        return [schema_of(each) for each in self._tools.values()]

    @property
    def metrics(self) -> dict[str, float]:
        return {"tool_calls": self.calls, "tool_errors": self.errors}

    async def answer(self, calls: Sequence[Call]) -> list[dict[str, Any]]:
        """A message of the role ``tool`` for each call, in their order; the calls run at the same time.

        Raises ``ToolFatal`` where a tool did, and ``EnvironmentFailed`` where too many tools hang.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                texts = [tasks.create_task(self._text(place, call)) for place, call in enumerate(calls)]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text.result()}
            for call, text in zip(calls, texts, strict=True)
        ]

    async def _text(self, place: int, call: Call) -> str:
        self.calls += 1
        try:
            text = await self._result(place, call)
        except ToolError as error:
            self.errors += 1
            text = f"error: {error}"
        return await self._policy.clip(text, self._max_result_tokens)

    async def _result(self, place: int, call: Call) -> str:
        """What the tool gave. Raises ``ToolError`` with what the model should know."""
        if place >= self._max_parallel:
            raise ToolError(f"only the first {self._max_parallel} calls of a turn are carried out")
        if call.arguments is None:
            raise ToolError(call.error or f"this call cannot be read: {call.raw:.200}")
        if call.name not in self._tools:
            raise ToolError(f"there is no tool {call.name!r}{nearest(call.name, self._tools)}")
        tool, limit = self._tools[call.name], asyncio.timeout(self._timeout_s)
        await tool.ready()
        try:
            async with limit:
                return await tool.call(call.arguments, self._state)
        except (ToolFatal, ToolError, EnvironmentFailed):
            raise
        except BadArguments as error:
            raise ToolError(str(error)) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise ToolError(f"{call.name} awaited something that was cancelled") from None
        except (Exception, SystemExit) as error:  # a tool may raise anything; the model reads what
            if isinstance(error, TimeoutError) and limit.expired():
                raise ToolError(f"{call.name} took longer than {self._timeout_s:g} s") from error
            message = " ".join(str(error).split())
            raise ToolError(f"{type(error).__name__}: {message}" if message else type(error).__name__) from error

    def _add(self, tool: Tool) -> None:
        if tool.name in self._tools:
            raise ConfigError(f"tools: two are called {tool.name!r}; rename one, or give its McpServer a prefix")
        self._tools[tool.name] = tool
