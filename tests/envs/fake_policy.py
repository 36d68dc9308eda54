"""A policy that answers from a list, without an engine: for adapters, which only see its methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any


class FakePolicy:
    """``asked`` is what it was given: texts, or whole histories of messages; ``rewards`` by turn."""

    def __init__(self, *answers: str) -> None:
        self._answers = list(answers)
        self.asked: list[Any] = []
        self.stops: list[Any] = []
        self.rewards: list[float] = []

    async def complete(self, prompt: str, max_tokens: int | None = None, stop: Any = None) -> Any:
        self.asked.append(prompt)
        self.stops.append(stop)
        return SimpleNamespace(text=self._answers.pop(0))

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None, max_tokens: int | None = None, stop: Any = None
    ) -> Any:
        self.asked.append([dict(message) for message in messages])
        self.stops.append(stop)
        text = self._answers.pop(0)
        return SimpleNamespace(text=text, message={"role": "assistant", "content": text})

    def reward(self, value: float) -> None:
        self.rewards.append(value)
