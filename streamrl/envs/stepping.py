"""Classes with ``reset`` and ``step`` in place of ``episode``: the loop between such a class and the policy."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any

from streamrl.envs.threads import UserThread
from streamrl.errors import ConfigError, EnvironmentFailed

if TYPE_CHECKING:
    from streamrl.envs.environment import Task

Call = Callable[..., Awaitable[Any]]
"""Calls a function of the user's, in a thread where it is not async."""


class SteppedEpisode:
    """Plays episodes of a class with ``reset`` and ``step``, each on an instance of its own."""

    def __init__(self, build: Callable[[], Any], name: str, is_async: bool, max_turns: int | None) -> None:
        self._build = build
        self._name = name
        self._is_async = is_async
        self._max_turns = max_turns

    async def __call__(self, task: Task, policy: Any) -> float:
        """One episode. Rewards of steps go to their turns, so that the episode itself returns 0."""
        if self._is_async:
            environment = self._build()
            try:
                await self._play(_direct, environment, task, policy)
            finally:
                await _direct(getattr(environment, "close", _nothing))
            return 0.0
        async with UserThread() as thread:
            environment = await thread.call(self._built, thread)
            await self._play(thread.call, environment, task, policy)
        return 0.0

    def _built(self, thread: UserThread) -> Any:
        """An instance that ``thread`` closes in the end, also where nobody waits for it any more."""
        environment = self._build()
        thread.at_end(getattr(environment, "close", _nothing))
        return environment

    async def _play(self, call: Call, environment: Any, task: Task, policy: Any) -> None:
        observation = await call(environment.reset, task)
        ask = self._asker(observation, policy)
        turns, done = 0, False
        while not done and turns != self._max_turns:
            action = await ask(observation)
            observation, reward, done = self._checked(await call(environment.step, action))
            policy.reward(reward)
            turns += 1

    def _asker(self, observation: object, policy: Any) -> Callable[[Any], Awaitable[str]]:
        """How the policy is asked: by ``complete`` for a text, by ``chat`` for messages, as the first one is."""
        if isinstance(observation, str):
            return partial(self._complete, policy)
        return partial(self._chat, policy, [])

    async def _complete(self, policy: Any, observation: object) -> str:
        if not isinstance(observation, str):
            raise EnvironmentFailed(f"{self._name}: reset gave a text, so step must too, got {observation!r:.80}")
        text: str = (await policy.complete(observation)).text
        return text

    async def _chat(self, policy: Any, history: list[dict[str, Any]], observation: object) -> str:
        messages = _messages(observation)
        if messages is None:
            raise EnvironmentFailed(
                f"{self._name}: expected an observation of text or a list of messages, got {observation!r:.80}"
            )
        history.extend(messages)
        turn = await policy.chat(list(history))
        history.append(turn.message)
        text: str = turn.text
        return text

    def _checked(self, returned: object) -> tuple[Any, float, bool]:
        if not isinstance(returned, tuple) or len(returned) != 3:
            raise EnvironmentFailed(f"{self._name}: step must return (observation, reward, done), got {returned!r:.80}")
        observation, reward, done = returned
        if not isinstance(reward, Real) or not math.isfinite(reward):
            raise EnvironmentFailed(f"{self._name}: the reward of step must be a finite number, got {reward!r:.80}")
        return observation, float(reward), bool(done)


def stepped(cls: type, instance: Any, options: Mapping[str, Any], where: str) -> SteppedEpisode:
    """The episodes of ``cls``, of which ``instance`` was made. Raises ``ConfigError`` for methods that do not fit."""
    name = cls.__name__
    for method, shape in (("reset", "def reset(self, task)"), ("step", "def step(self, action)")):
        function = getattr(instance, method, None)
        if not callable(function):
            raise ConfigError(f"{where}: class {name} has no method `{shape}`")
        try:
            inspect.signature(function).bind(None)
        except TypeError as error:
            raise ConfigError(f"{where}: must be callable as {name}.{shape.removeprefix('def ')}: {error}") from error
    is_async = inspect.iscoroutinefunction(instance.step)
    if inspect.iscoroutinefunction(instance.reset) is not is_async:
        raise ConfigError(f"{where}: {name}.reset and {name}.step must both be `async def`, or both plain methods")
    max_turns = getattr(instance, "max_turns", None)
    if max_turns is not None and (not isinstance(max_turns, int) or max_turns < 1):
        raise ConfigError(f"{where}: {name}.max_turns={max_turns!r} must be a whole number of at least 1, or None")
    return SteppedEpisode(partial(cls, **options), name, is_async, max_turns)


async def _direct(function: Callable[..., Any], *args: Any) -> Any:
    result = function(*args)
    return await result if inspect.isawaitable(result) else result


def _nothing() -> None:
    pass


def _messages(observation: object) -> list[dict[str, Any]] | None:
    if not isinstance(observation, Sequence) or isinstance(observation, str) or not observation:
        return None
    if not all(isinstance(each, Mapping) and "role" in each for each in observation):
        return None
    return [dict(each) for each in observation]
