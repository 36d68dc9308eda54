"""Gymnasium-style text environments: ``env=streamrl.envs.adapters.text_gym:TextGym env.args.id=my_module:MyEnv``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from streamrl.envs.adapters.conversation import Conversation, Wording
from streamrl.envs.environment import Reward, Task
from streamrl.envs.failure import one_line
from streamrl.envs.loading import load_function
from streamrl.errors import ConfigError, EnvironmentFailed

_SEEDS = 1_000_000


class TextGym:
    """An object with ``reset(seed=…) -> (observation, info)`` and ``step(action) -> (observation, reward, terminated,
    truncated, info)`` whose observations are text.

    Task ``index`` is the seed ``seed + index``; the seed decides what is held out, since the first observation may be
    the same for all. Each episode has an environment of its own, made, played and closed in one thread. The reward of a
    step is that of the turn.
    """

    def __init__(
        self,
        id: str,
        args: Mapping[str, Any] | None = None,
        action: str = "text",
        observe: str | None = None,
        max_turns: int = 32,
        invalid_reward: float = 0.0,
        size: int = _SEEDS,
        seed: int = 0,
        first: str = "{observation}",
        turn: str = "{observation}",
        chat: bool = False,
        system: str | None = None,
        name: str | None = None,
    ) -> None:
        """``id``: ``package.module:Name`` of a class or function that makes one from ``args``, or a gymnasium id.

        ``action``: ``text`` (without surrounding spaces), ``int`` (the first whole number), or the
        ``package.module:function`` of a function from the policy's text to an action. Where it raises ``ValueError``
        the episode ends with ``invalid_reward`` for that turn. ``observe``: a function from an observation to text.
        """
        if max_turns < 1:
            raise ConfigError(f"env.args.max_turns={max_turns}: an episode needs at least one turn")
        self.name = name or re.sub(r"[^A-Za-z0-9_.-]+", "-", id.rpartition(":")[2]).lower()
        self._make = _maker(id, dict(args or {}))
        self._act = _PARSERS.get(action) or load_function(action, "env.args.action")
        self._observe = _as_text if observe is None else load_function(observe, "env.args.observe")
        self._wording = Wording(first, turn, chat, system)
        self._max_turns = max_turns
        self._invalid_reward = invalid_reward
        self._size = size
        self._seed = seed
        self._try()

    def __len__(self) -> int:
        return self._size

    def task(self, index: int) -> Task:
        return Task(metadata={"seed": self._seed + index})

    def episode(self, task: Task, policy: Any) -> Reward:
        env = self._make()
        try:
            return self._play(env, task, policy)
        finally:
            env.close()

    def _play(self, env: Any, task: Task, policy: Any) -> Reward:
        observation = self._reset(env, task.metadata["seed"])
        conversation = Conversation(self._wording)
        for turns in range(1, self._max_turns + 1):
            if self._wording.chat:
                answer = policy.chat(conversation.messages(observation))
                conversation.answered(answer.message)
            else:
                answer = policy.complete(conversation.text(observation))
            try:
                action = self._act(answer.text)
            except ValueError:
                policy.reward(self._invalid_reward)
                return _reward(turns, invalid=True)
            stepped, reward, terminated, truncated = _stepped(env.step(action))
            policy.reward(reward)
            if terminated or truncated:
                return _reward(turns, cut=not terminated)
            observation = self._observed(stepped)
        return _reward(self._max_turns, cut=True)

    def _reset(self, env: Any, seed: int) -> str:
        returned = env.reset(seed=seed)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise EnvironmentFailed(f"reset must return (observation, info), got {returned!r:.80}")
        return self._observed(returned[0])

    def _observed(self, observation: Any) -> str:
        text = self._observe(observation)
        if not isinstance(text, str):
            raise EnvironmentFailed(f"env.args.observe must return a str, got {text!r:.80}")
        return text

    def _try(self) -> None:
        """Make one and reset it, so that what cannot work is refused at launch."""
        try:
            env = self._make()
            try:
                self._reset(env, self._seed)
            finally:
                env.close()
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"env.args.id: {self.name} cannot be made and reset: {one_line(error)}") from error


def _reward(turns: int, invalid: bool = False, cut: bool = False) -> Reward:
    """What the turns were not given is nothing; the metrics say how the episode ended."""
    return Reward(0.0, {"turns": turns, "invalid_action": float(invalid), "cut": float(cut)})


def _stepped(returned: Any) -> tuple[Any, float, bool, bool]:
    if not isinstance(returned, tuple) or len(returned) != 5:
        raise EnvironmentFailed(
            f"step must return (observation, reward, terminated, truncated, info), got {returned!r:.80}"
        )
    observation, reward, terminated, truncated, _ = returned
    if not isinstance(reward, Real) or not math.isfinite(reward):
        raise EnvironmentFailed(f"step must return a finite number as reward, got {reward!r:.80}")
    return observation, float(reward), bool(terminated), bool(truncated)


def _as_text(observation: Any) -> str:
    if not isinstance(observation, str):
        raise EnvironmentFailed(
            f"expected an observation of text, got {type(observation).__name__}; env.args.observe names a function "
            "that writes it as text"
        )
    return observation


def _whole_number(text: str) -> int:
    found = re.search(r"-?\d+", text)
    if found is None:
        raise ValueError("no whole number")
    return int(found[0])


_PARSERS: dict[str, Callable[[str], Any]] = {"text": str.strip, "int": _whole_number}


def _maker(id: str, args: dict[str, Any]) -> Callable[[], Any]:
    if ":" in id:
        target = load_function(id, "env.args.id")
        return lambda: target(**args)
    try:
        import gymnasium
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"env.args.id={id!r}: {error.name} is not installed; pip install 'streamrl[gym]', or name a class as "
            "package.module:Name"
        ) from error
    return lambda: gymnasium.make(id, **args)
