"""A tool: something with a name, a schema and a call that gives text."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from streamrl.envs.tools.signature import STATE, Signature, check_parameters, described
from streamrl.envs.tools.workers import on_thread
from streamrl.errors import ConfigError, StreamRLError

_Function = TypeVar("_Function", bound=Callable[..., Any])
_MARK = "__streamrl_tool__"


class ToolFatal(StreamRLError):
    """Raised by a tool that the episode cannot go on without: the episode fails with this reason."""


class ToolError(Exception):
    """A call that did not work; the message is what the model is told."""


class Tool(Protocol):
    """What a toolbox holds."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def schema(self) -> Mapping[str, Any]:
        """JSON schema of the arguments."""
        ...

    async def ready(self) -> None:
        """Wait until a call can be made. Raises ``ToolFatal`` where that will not be."""
        ...

    async def call(self, arguments: Mapping[str, Any], state: Any) -> str:
        """Raises ``ToolFatal`` where the episode must end; anything else is an error for the model to read."""
        ...


def tool(function: _Function) -> _Function:
    """Mark a method as a tool that the model may call; its docstring and its types are what the model is told.

    Raises ``ConfigError`` for parameters that a model cannot fill in.
    """
    if not inspect.isfunction(function):
        _refuse(function)
    parameters = dict(list(inspect.signature(function).parameters.items())[1:])  # without self
    check_parameters(function.__name__, parameters, described(inspect.getdoc(function) or "")[1])
    setattr(function, _MARK, True)
    return function


def marked_methods(owner: Any) -> list[Callable[..., Any]]:
    """Bound methods of ``owner`` that are marked by ``@tool``, in the order of their definition."""
    names: dict[str, None] = {}
    for cls in reversed(type(owner).__mro__):
        names |= dict.fromkeys(name for name, value in vars(cls).items() if hasattr(value, _MARK))
    return [getattr(owner, name) for name in names]


@dataclass(frozen=True)
class FunctionTool:
    """A Python function or bound method as a tool."""

    signature: Signature

    @classmethod
    def of(cls, function: Any) -> FunctionTool:
        """Raises ``ConfigError`` for what cannot be a tool."""
        if not inspect.isroutine(function):
            _refuse(function)
        return cls(Signature.of(function, function.__name__))

    @property
    def name(self) -> str:
        return self.signature.name

    @property
    def description(self) -> str:
        return self.signature.description

    @property
    def schema(self) -> Mapping[str, Any]:
        return self.signature.schema

    async def ready(self) -> None:
        """A function always is."""

    async def call(self, arguments: Mapping[str, Any], state: Any) -> str:
        """An async function is awaited, a plain one runs on a thread."""
        values = self.signature.arguments(arguments)
        if self.signature.takes_state:
            values[STATE] = state
        function = self.signature.function
        result = await (function(**values) if inspect.iscoroutinefunction(function) else on_thread(function, **values))
        return as_text(result)


def schema_of(tool: Tool) -> dict[str, Any]:
    """A tool as OpenAI's API describes it."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.schema)}
    return {"type": "function", "function": function}


def as_text(result: object) -> str:
    """What the model reads: text as it is, ``ok`` for None, else JSON, or ``str`` of what JSON does not know."""
    if isinstance(result, str):
        return result
    if result is None:
        return "ok"
    try:
        return msgspec.json.encode(result).decode()
    except (TypeError, ValueError):
        return str(result)


def _refuse(given: object) -> Any:
    raise ConfigError(f"tools: expected a function with typed parameters or an McpServer, got {given!r:.80}")
