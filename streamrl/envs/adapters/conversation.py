"""How an environment that speaks in observations is put to the policy: as plain text, or as chat messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from streamrl.envs.adapters.templates import fields_of
from streamrl.errors import ConfigError

Message = dict[str, Any]


@dataclass(frozen=True)
class Wording:
    """Templates over ``{observation}``: ``first`` for what an episode begins with, ``turn`` for what follows."""

    first: str = "{observation}"
    turn: str = "{observation}"
    chat: bool = False
    system: str | None = None
    """The system message; chat only."""

    def __post_init__(self) -> None:
        for key, template in (("first", self.first), ("turn", self.turn)):
            unknown = [name for name in fields_of(template, f"env.args.{key}") if name != "observation"]
            if unknown:
                raise ConfigError(f"env.args.{key}={template!r}: the one field is {{observation}}, not {unknown[0]!r}")
        if self.system is not None and not self.chat:
            raise ConfigError("env.args.system: a system message needs env.args.chat=true; or write it into first")


class Conversation:
    """What was said in one episode. ``ask`` gives what ``policy.complete`` or ``policy.chat`` takes."""

    def __init__(self, wording: Wording) -> None:
        self._wording = wording
        self._turns = 0
        self._messages: list[Message] = []
        if wording.system is not None:
            self._messages.append({"role": "system", "content": wording.system})

    def text(self, observation: str) -> str:
        """What is appended to the transcript for ``observation``."""
        template = self._wording.turn if self._turns else self._wording.first
        self._turns += 1
        return template.format(observation=observation)

    def messages(self, observation: str) -> list[Message]:
        """The whole history up to ``observation``, for ``policy.chat``."""
        self._messages.append({"role": "user", "content": self.text(observation)})
        return list(self._messages)

    def answered(self, message: Message) -> None:
        """The policy's message, which the next history has in it."""
        self._messages.append(message)
