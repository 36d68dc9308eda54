"""From a reward's setting to a reward: ``"math"``, ``"my_module:score"``, ``{name: exact, …}`` or a weighted list."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from streamrl.envs.environment import Reward, Task
from streamrl.envs.loading import load_function, nearest
from streamrl.envs.rewards.protocol import Answer, RewardFn
from streamrl.envs.tools.workers import on_thread
from streamrl.errors import ConfigError

BUILT_IN = {
    "exact": "streamrl.envs.rewards.exact:ExactReward",
    "math": "streamrl.envs.rewards.mathematics:MathReward",
    "code": "streamrl.envs.rewards.code:CodeReward",
    "judge": "streamrl.envs.rewards.judge:JudgeReward",
    "model": "streamrl.envs.rewards.model:ModelReward",
}
"""Imported only where they are named: each may need packages that others do not."""

Spec = str | Mapping[str, Any] | Sequence[Any]


def load_reward(spec: Spec, where: str = "env.args.reward") -> RewardFn:
    """The reward that ``spec`` names; ``where`` is the setting that holds it, for messages.

    A str is a built-in name or ``package.module:function``; a mapping has it as ``name`` and options beside it; a list
    is a mixture of those, each with ``weight``, ``optional`` and ``metric`` beside them (``mixture.py``).
    Raises ``ConfigError`` of one line for an unknown name or option. No process or connection outlives the call.
    """
    if isinstance(spec, str):
        return _load(spec, {}, where)
    if isinstance(spec, Mapping):
        options = {str(key): value for key, value in spec.items()}
        name = options.pop("name", None)
        if not isinstance(name, str):
            raise ConfigError(f"{where}: expected `name` with a reward's name in {dict(spec)!r:.80}")
        return _load(name, options, where)
    if isinstance(spec, Sequence) and spec:
        from streamrl.envs.rewards.mixture import load_mixture

        return load_mixture(spec, where)
    raise ConfigError(f"{where}: expected a name, a mapping with a name, or a list of them, got {spec!r:.80}")


def _load(name: str, options: dict[str, Any], where: str) -> RewardFn:
    if name in BUILT_IN:
        target: Callable[..., Any] = load_function(BUILT_IN[name], where)
        return _built(target, name, options, where)
    if ":" not in name:
        raise ConfigError(
            f"{where}={name!r}: no such reward{nearest(name, BUILT_IN)}; one of your own is package.module:function"
        )
    target = load_function(name, where)
    if inspect.isclass(target):
        return _built(target, name, options, where)
    return FunctionReward(target, options, f"{where}={name}")


def _built(target: Callable[..., Any], name: str, options: dict[str, Any], where: str) -> RewardFn:
    """A reward that is a class: its options are the parameters of its ``__init__``."""
    parameters = [each for each in inspect.signature(target).parameters.values() if each.kind is not each.VAR_KEYWORD]
    known = [each.name for each in parameters]
    for key in options:
        if key not in known:
            raise ConfigError(f"{where}: reward {name!r} has no option {key!r}{nearest(key, known)}")
    for each in parameters:
        if each.default is each.empty and each.name not in options and each.kind is not each.VAR_POSITIONAL:
            raise ConfigError(f"{where}: reward {name!r} needs the option {each.name!r}")
    try:
        reward: RewardFn = target(**options)
    except ConfigError as error:
        raise ConfigError(f"{where}: reward {name!r}: {error}") from error
    for method in ("__call__", "close"):
        if not inspect.iscoroutinefunction(getattr(reward, method, None)):
            raise ConfigError(f"{where}: class {name} needs `async def {method}`, as streamrl.envs.rewards.RewardFn")
    return reward


class FunctionReward:
    """A function of the user's, ``def score(task, answer, **options)``; a plain one runs on a thread of its own."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any], where: str) -> None:
        try:
            inspect.signature(function).bind(None, "", **options)
        except TypeError as error:
            raise ConfigError(f"{where}: must be callable as function(task, answer, **options): {error}") from error
        self._function = functools.partial(function, **options)
        self._is_async = inspect.iscoroutinefunction(function)

    async def __call__(self, task: Task, answer: Answer) -> float | Reward:
        if self._is_async:
            returned: float | Reward = await self._function(task, answer)
            return returned
        return await on_thread(self._function, task, answer)

    async def close(self) -> None:
        """Nothing is held."""
