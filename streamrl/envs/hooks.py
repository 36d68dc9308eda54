"""Methods that an environment's class may have beside ``task`` and ``episode``; a mixture is made of them."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from streamrl.errors import ConfigError


@dataclass(frozen=True)
class Hooks:
    """None where the class has no such method."""

    training_task: Callable[[int], Any] | None = None
    """``task`` for training, where it depends on what was played so far; ``task`` alone draws held-out tasks."""
    env_of: Callable[[Any], str] | None = None
    """The name in ``reward/<env>/mean`` for a task, where one environment is several."""
    played: Callable[[Any, Sequence[float]], None] | None = None
    """Called with a training task and the rewards of its episodes, in the process that played it."""
    close: Callable[[], Awaitable[None]] | None = None
    """Ends what the episodes of this process left running; called once, at its end."""

    @classmethod
    def of(cls, instance: Any, where: str) -> Hooks:
        """The hooks of a user's object. Raises ``ConfigError`` for one that cannot be called as it will be."""
        found: dict[str, Any] = {}
        for name, arguments, is_async in _SHAPES:
            method = getattr(instance, name, None)
            if method is None:
                continue
            kind = "async def" if is_async else "def"
            shape = f"`{kind} {name}({', '.join(('self', *arguments))})`"
            if not callable(method) or inspect.iscoroutinefunction(method) != is_async:
                raise ConfigError(f"{where}: {type(instance).__name__}.{name} must be {shape}")
            try:
                inspect.signature(method).bind(*arguments)
            except TypeError as error:
                raise ConfigError(f"{where}: {type(instance).__name__}.{name} must be {shape}: {error}") from error
            found[name] = method
        return cls(**found)


_SHAPES = (
    ("training_task", ("index",), False),
    ("env_of", ("task",), False),
    ("played", ("task", "rewards"), False),
    ("close", (), True),
)
