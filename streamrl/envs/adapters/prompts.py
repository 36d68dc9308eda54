"""Single-turn tasks from a file of prompts with a reward function: ``env=streamrl.envs.adapters.prompts:Prompts``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from streamrl.envs.adapters.rows import Row, open_rows
from streamrl.envs.adapters.templates import fields_of, filled
from streamrl.envs.environment import Policy, Reward, Task
from streamrl.envs.rewards import load_reward
from streamrl.errors import ConfigError

Message = dict[str, Any]

_ROLES = ("system", "developer", "user", "assistant", "tool")


class Prompts:
    """Task ``index`` is row ``index`` of ``path``; ``reward`` scores the answer (docs/rewards.md).

    Every row is checked when the environment is loaded, so a bad one ends the launch and not the night.
    """

    name = "prompts"

    def __init__(
        self,
        path: str,
        reward: str | Mapping[str, Any] | Sequence[Any],
        prompt: str | None = None,
        answer: str | None = "answer",
        messages: str | None = None,
        system: str | None = None,
        chat: bool = False,
        stop: str | Sequence[str] | None = None,
        split: str = "train",
        name: str | None = None,
    ) -> None:
        """``prompt`` is a column (``prompt`` where neither it nor ``messages`` is given), or a template over columns.

        ``messages`` is a column with a list of chat messages instead. ``answer`` is the column with the reference
        answer; null where there is none. A prompt is completed as text, or asked as the user's message where ``chat``
        is set or ``system`` or ``messages`` are given. ``split`` is that of a data set.
        """
        if prompt is not None and messages is not None:
            raise ConfigError("env.args.messages: prompt is given too; the conversation comes from one of them")
        self._prompt = _checked_template(prompt or "prompt")
        self._messages = messages
        self._answer = answer
        self._system = system
        self._chat = chat or system is not None or messages is not None
        self._stop = stop
        self._rows = open_rows(path, split)
        self._reward = load_reward(reward)
        self.name = name or type(self).name
        for number, row in enumerate(self._rows.every()):
            self._task(row, self._rows.place(number))
        if not len(self._rows):
            raise ConfigError(f"env.args.path={path}: it has no rows")

    def __len__(self) -> int:
        return len(self._rows)

    def task(self, index: int) -> Task:
        """``metadata`` is the row; the text of the prompt decides what is held out."""
        number = index % len(self._rows)
        return self._task(self._rows.row(number), self._rows.place(number))

    async def episode(self, task: Task, policy: Policy) -> float | Reward:
        if not self._chat:
            completion = await policy.complete(task.prompt, stop=self._stop)
            return await self._reward(task, completion.text)
        asked = self._asked(task.metadata, f"task {task.index}")
        turn = await policy.chat(asked, stop=self._stop)
        return await self._reward(task, turn.text)

    async def close(self) -> None:
        await self._reward.close()

    def _task(self, row: Row, place: str) -> Task:
        answer = self._answer_of(row, place)
        if not self._chat:
            return Task(self._text(row, place), answer, row)
        asked = self._asked(row, place)
        shown = () if answer is None else (*asked, {"role": "assistant", "content": answer})
        return Task("\n".join(map(_text_of, asked)), answer, row, demonstration=shown)

    def _text(self, row: Row, place: str) -> str:
        if "{" in self._prompt:
            text = filled(self._prompt, row, "env.args.prompt", place)
        else:
            text = _column(row, self._prompt, "prompt", place)
            if not isinstance(text, str):
                raise ConfigError(f"{place}: expected text in column {self._prompt!r}, got {text!r:.60}")
        if not text:
            raise ConfigError(f"{place}: env.args.prompt={self._prompt!r} gives an empty prompt")
        return text

    def _answer_of(self, row: Row, place: str) -> str | None:
        if self._answer is None:
            return None
        value = _column(row, self._answer, "answer", place, ", null for none")
        return value if value is None or isinstance(value, str) else json.dumps(value)

    def _asked(self, row: Row, place: str) -> list[Message]:
        system = [{"role": "system", "content": self._system}] if self._system is not None else []
        if self._messages is None:
            return [*system, {"role": "user", "content": self._text(row, place)}]
        return [*system, *_checked(_column(row, self._messages, "messages", place), place)]


def _column(row: Row, name: str, option: str, place: str, hint: str = "") -> Any:
    if name not in row:
        there = ", ".join(row) or "none"
        raise ConfigError(f"{place}: no column {name!r}; its columns: {there}; choose one by env.args.{option}{hint}")
    return row[name]


def _checked_template(prompt: str) -> str:
    if "{" in prompt and not fields_of(prompt, "env.args.prompt"):
        raise ConfigError(f"env.args.prompt={prompt!r}: it must use a column, such as {{question}}")
    return prompt


def _checked(messages: Any, place: str) -> list[Message]:
    """The messages of a row, without the keys that are null (a column in parquet gives all rows the same keys)."""
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{place}: expected a list of chat messages, got {messages!r:.60}")
    checked = []
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise ConfigError(f"{place}: message {number} needs a role out of {', '.join(_ROLES)}, got {message!r:.60}")
        if not isinstance(message.get("content"), str | list) and not message.get("tool_calls"):
            raise ConfigError(f"{place}: message {number} needs content, got {message!r:.60}")
        checked.append({key: value for key, value in message.items() if value is not None})
    if checked[-1]["role"] == "assistant":
        raise ConfigError(f"{place}: the last message is the assistant's; the policy is to write that one")
    return checked


def _text_of(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else json.dumps(content, sort_keys=True)
