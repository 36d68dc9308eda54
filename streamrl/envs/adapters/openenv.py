"""Environments behind a server that speaks the OpenEnv protocol: ``env=streamrl.envs.adapters.openenv:OpenEnv``."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from streamrl.envs.adapters.conversation import Conversation, Wording
from streamrl.envs.adapters.openenv_client import TRANSPORTS, Observed, Server
from streamrl.envs.adapters.templates import filled
from streamrl.envs.environment import Policy, Reward, Task
from streamrl.envs.loading import load_function
from streamrl.errors import ConfigError, EnvironmentFailed

_SEEDS = 1_000_000


class OpenEnv:
    """One session of a server per episode: reset with the task's seed, then a step for every turn of the policy.

    Task ``index`` is the seed ``seed + index``, which also decides what is held out. The reward of a step is that of
    the turn; an episode in which the server gives none at all fails.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        action: str,
        observation: str | None = None,
        transport: str = "ws",
        sessions: int = 16,
        reset: Mapping[str, Any] | None = None,
        max_turns: int = 16,
        timeout_s: float = 30.0,
        token_variable: str | None = None,
        size: int = _SEEDS,
        seed: int = 0,
        first: str = "{observation}",
        turn: str = "{observation}",
        chat: bool = False,
        system: str | None = None,
        name: str = "openenv",
    ) -> None:
        """``url``: ``http://host:port``, or several; each plays up to ``sessions`` episodes of this process at once.

        ``action``: the field of the action that takes the policy's text, ``json`` (the text is the whole action), or
        ``package.module:function`` of a function from the text to the action. ``observation`` is a template over the
        fields of the observation; without it the policy reads the observation as JSON. ``reset`` are further arguments
        of the reset. ``timeout_s`` bounds every answer of the server. ``token_variable`` names the environment variable
        with the bearer token.
        """
        urls = [url] if isinstance(url, str) else list(url)
        for each in urls:
            if not each.startswith(("http://", "https://")):
                raise ConfigError(f"env.args.url={each!r}: expected http://host:port or https://…")
        if transport not in TRANSPORTS:
            raise ConfigError(f"env.args.transport={transport!r}: expected one of {', '.join(TRANSPORTS)}")
        for key, value in (("sessions", sessions), ("max_turns", max_turns), ("timeout_s", timeout_s)):
            if not value > 0:
                raise ConfigError(f"env.args.{key}={value}: must be more than 0")
        self.name = name
        self._connect = TRANSPORTS[transport]
        self._timeout_s = timeout_s
        self._headers = _authorization(token_variable)
        self._act = _action(action)
        self._observation = observation
        self._reset = dict(reset or {})
        self._max_turns = max_turns
        self._size = size
        self._seed = seed
        self._wording = Wording(first, turn, chat, system)
        self._free: asyncio.LifoQueue[str] = asyncio.LifoQueue()
        at_once = sessions if transport == "ws" else 1  # over plain HTTP a server has one episode, which all share
        for each in urls * at_once:
            self._free.put_nowait(each)

    def __len__(self) -> int:
        return self._size

    def task(self, index: int) -> Task:
        return Task(metadata={"seed": self._seed + index})

    async def episode(self, task: Task, policy: Policy) -> Reward:
        url = await self._free.get()
        try:
            async with self._connect(url, self._headers, self._timeout_s) as server:
                return await self._play(server, task, policy)
        finally:
            self._free.put_nowait(url)

    async def _play(self, server: Server, task: Task, policy: Policy) -> Reward:
        observed = await server.reset({**self._reset, "seed": task.metadata["seed"]})
        conversation = Conversation(self._wording)
        rewarded = False
        for turns in range(1, self._max_turns + 1):
            text = await self._answer(conversation, observed, server.url, policy)
            try:
                action = self._act(text)
            except ValueError:
                policy.reward(0.0)
                return _reward(turns, invalid=True)
            observed = await server.step(action)
            if observed.reward is not None:
                rewarded = True
                policy.reward(observed.reward)
            if observed.done or turns == self._max_turns:
                break
        if not rewarded:
            raise EnvironmentFailed(f"{server.url}: no reward in {turns} steps; the server must give one")
        return _reward(turns, cut=not observed.done)

    async def _answer(self, conversation: Conversation, observed: Observed, url: str, policy: Policy) -> str:
        seen = self._seen(observed, url)
        if self._wording.chat:
            turn = await policy.chat(conversation.messages(seen))
            conversation.answered(turn.message)
            return turn.text
        return (await policy.complete(conversation.text(seen))).text

    def _seen(self, observed: Observed, url: str) -> str:
        if self._observation is None:
            return json.dumps(observed.observation, ensure_ascii=False)
        try:
            return filled(self._observation, observed.observation, "env.args.observation", url)
        except ConfigError as error:
            raise EnvironmentFailed(str(error)) from error


def _reward(turns: int, invalid: bool = False, cut: bool = False) -> Reward:
    """The turns have their rewards; the metrics say how the episode ended."""
    return Reward(0.0, {"turns": turns, "invalid_action": float(invalid), "cut": float(cut)})


def _action(action: str) -> Callable[[str], dict[str, Any]]:
    if action == "json":
        return _json_action
    if ":" in action:
        return load_function(action, "env.args.action")
    return lambda text: {action: text}


def _json_action(text: str) -> dict[str, Any]:
    action = json.loads(text)
    if not isinstance(action, dict):
        raise ValueError("an action is a JSON object")
    return action


def _authorization(variable: str | None) -> dict[str, str]:
    if variable is None:
        return {}
    token = os.environ.get(variable)
    if not token:
        raise ConfigError(f"env.args.token_variable={variable}: that environment variable is not set")
    return {"Authorization": f"Bearer {token}"}
