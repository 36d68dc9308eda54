"""What a user writes, and how it is found: ``env.name = "package.module:Name"``.

Three forms, each in about ten lines (docs/environments.md)::

    async def my_env(task, policy):                    # makes its own prompt from task.random
        return float(...)

    class Riddles:
        def __init__(self, level: int = 1): ...        # env.args.level=2
        def task(self, index: int) -> Task: ...        # deterministic in index
        async def episode(self, task, policy) -> float | Reward: ...

    class Game:                                        # one instance per episode
        def reset(self, task) -> str: ...              # or chat messages
        def step(self, action: str) -> tuple[str, float, bool]: ...

All may be ``async`` or plain; plain code runs in a thread of its own (``threads.py``). A class may say how many tasks
there are by ``__len__`` and its name in the metrics by ``name``.
"""

from __future__ import annotations

import inspect
import random
import re
import types
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from streamrl.envs.failure import one_line
from streamrl.envs.hooks import Hooks
from streamrl.envs.loading import import_module_of, nearest
from streamrl.envs.stepping import stepped
from streamrl.envs.threads import in_thread
from streamrl.errors import ConfigError, EnvironmentFailed
from streamrl.schema import Config

if TYPE_CHECKING:
    from streamrl.envs.chat.capture import ChatTurn


@dataclass(frozen=True)
class Task:
    """One instance of a task: what an episode is about."""

    prompt: str = ""
    """The text that starts the transcript. It also decides what is held out for evaluation."""
    answer: str | None = None
    """The reference answer, where there is one; the supervised warm-up needs it."""
    metadata: dict[str, Any] = field(default_factory=dict)
    index: int = 0
    """Where the task comes from; set by the loader."""
    demonstration: Sequence[str | Mapping[str, Any]] = ()
    """A whole trajectory done right, for the supervised warm-up: texts that alternate between environment and policy,
    beginning with the prompt, or chat messages."""
    tools: Sequence[Mapping[str, Any]] = ()
    """The tools that the demonstration's messages were written with, as ``policy.chat`` takes them."""

    @cached_property
    def random(self) -> random.Random:
        """Random numbers of this task: every trajectory of a group draws the same ones from the start."""
        return random.Random(self.index)

    def copy(self) -> Task:
        """A task for one trajectory: its own ``metadata`` and its own ``random``."""
        return replace(self, metadata=dict(self.metadata))


@dataclass(frozen=True)
class Reward:
    """What an episode returns when a number is not enough."""

    value: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers to average over trajectories, by name."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Arrays that travel with the trajectory, by name: numpy or torch on the CPU, any shape and dtype but objects. They
    are not copied: do not change them after the episode."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Strings, numbers, bools, None, and lists and dicts of them, that travel with the trajectory."""


@dataclass(frozen=True)
class Completion:
    """One sampled turn."""

    text: str
    """Without special tokens such as the end token, and up to a stop string."""
    token_ids: tuple[int, ...]
    """As sampled, the end token or stop string included."""
    finish_reason: str
    """``stop`` (the end token or a stop string was sampled) or ``length`` (no tokens were left)."""
    logprobs: tuple[float, ...] = ()
    """Of ``token_ids``, under the policy that sampled them; empty where no engine did."""


class Policy(Protocol):
    """What an episode samples from (``session.Session``)."""

    async def complete(
        self, prompt: str | Sequence[int], max_tokens: int | None = None, stop: str | Iterable[str] | None = None
    ) -> Completion: ...

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        stop: str | Iterable[str] | None = None,
    ) -> ChatTurn: ...

    async def clip(self, text: str, tokens: int) -> str: ...

    def branch(self) -> Policy: ...

    def reward(self, value: float) -> None: ...

    def finish(self, reward: float | Reward) -> None: ...

    @property
    def base_url(self) -> str: ...

    @property
    def api_key(self) -> str: ...


EpisodeFunction = Callable[[Task, Any], Coroutine[Any, Any, "float | Reward"]]


@dataclass(frozen=True)
class Environment:
    """A loaded environment: user code behind one shape."""

    name: str
    """Short name for ``reward/<env>/mean``."""
    episode: EpisodeFunction
    make_task: Callable[[int], Task] | None = None
    """None where the episode makes its own prompt."""
    size: int | None = None
    """How many tasks there are; None: any index is a task."""
    hooks: Hooks = Hooks()

    def task(self, index: int) -> Task:
        """The task of ``index``; raises ``EnvironmentFailed`` naming the user's line where it cannot be made."""
        return self._made(self.make_task, index)

    def training_task(self, index: int) -> Task:
        """As ``task``, for an episode that is trained on."""
        return self._made(self.hooks.training_task or self.make_task, index)

    def name_of(self, task: Task) -> str:
        """The name in the metrics for ``task``. Raises ``ConfigError`` where the environment gives none that can be."""
        return self.name if self.hooks.env_of is None else short_name(self.hooks.env_of(task), f"{self.name}: env_of")

    def played(self, task: Task, rewards: Sequence[float]) -> None:
        """Tell the environment what the episodes of a training task were worth."""
        if self.hooks.played is not None:
            self.hooks.played(task, rewards)

    async def close(self) -> None:
        """End what the environment left running in this process."""
        if self.hooks.close is not None:
            await self.hooks.close()

    def _made(self, make_task: Callable[[int], Task] | None, index: int) -> Task:
        if make_task is None:
            return Task(index=index)
        try:
            task = make_task(index)
        except Exception as error:  # user code may raise anything; it is named
            raise EnvironmentFailed(f"{self.name}: task({index}) raised {one_line(error)}") from error
        if not isinstance(task, Task) or not isinstance(task.prompt, str):
            raise EnvironmentFailed(
                f"{self.name}: task({index}) must return streamrl.envs.Task(prompt: str, …), got {task!r:.80}"
            )
        return replace(task, index=index)


def load_environment(config: Config) -> Environment:
    """The environment that ``config.env`` names, built with ``config.env.args``.

    The current working directory can be imported from, so that ``my_env.py`` beside the run is ``env=my_env:Name``.
    Raises ``ConfigError`` of one line for everything that is wrong with the name, the object or its options.
    """
    where = f"env.name={config.env.name}"
    module, name = import_module_of(config.env.name, "env.name", "my_env:Riddles")
    target = _find(module, name, where)
    if inspect.isclass(target):
        return _from_class(target, config.env.args, where)
    return _from_function(target, name, config.env.args, where)


def refuse_unknown(given: Iterable[str], known: Iterable[str], owner: str) -> None:
    """Raise ``ConfigError`` for the first key of ``given`` that ``owner`` does not know; it names the nearest."""
    names = sorted(known)
    for key in given:
        if key not in names:
            raise ConfigError(f"env.args.{key}: {owner} has no such option{nearest(key, names)}")


def _find(module: types.ModuleType, name: str, where: str) -> Any:
    if hasattr(module, name):
        target = getattr(module, name)
    else:
        offered = [key for key, value in vars(module).items() if not key.startswith("_") and _is_kind(value)]
        raise ConfigError(f"{where}: {module.__name__} has no {name!r}{nearest(name, offered)}")
    if inspect.isclass(target):
        if not any(callable(getattr(target, method, None)) for method in ("episode", "step")):
            raise ConfigError(
                f"{where}: class {name} has no method `episode(self, task, policy)`, nor `reset` and `step`"
            )
    elif not callable(target):
        raise ConfigError(f"{where}: expected a function or a class, got {type(target).__name__}")
    return target


def _is_kind(value: object) -> bool:
    return inspect.isfunction(value) or (
        inspect.isclass(value) and (hasattr(value, "episode") or hasattr(value, "step"))
    )


def _from_function(function: Any, name: str, options: Mapping[str, Any], where: str) -> Environment:
    parameters = list(inspect.signature(function).parameters.values())
    _check_options(parameters[2:], options, f"function {name}", where)
    _check_call(function, (None, None), options, f"{name}(task, policy)", where)

    return Environment(short_name(name, where), _episode(function, name, options, where))


def _from_class(cls: type, options: Mapping[str, Any], where: str) -> Environment:
    title = f"class {cls.__name__}"
    parameters = [] if cls.__init__ is object.__init__ else list(inspect.signature(cls).parameters.values())  # type: ignore[misc]
    _check_options(parameters, options, title, where)
    try:
        instance = cls(**options)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except Exception as error:  # user code may raise anything; it is named
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise ConfigError(f"{where}: {cls.__name__}({given:.80}) raised {one_line(error)}") from error
    if hasattr(instance, "episode"):
        _check_call(instance.episode, (None, None), {}, f"{cls.__name__}.episode(self, task, policy)", where)
        episode: EpisodeFunction = _episode(instance.episode, f"{cls.__name__}.episode", {}, where)
    else:
        episode = stepped(cls, instance, options, where)
    make_task = getattr(instance, "task", None)
    if make_task is not None:
        if not callable(make_task) or inspect.iscoroutinefunction(make_task):
            raise ConfigError(f"{where}: {cls.__name__}.task must be a plain method `def task(self, index) -> Task`")
        _check_call(make_task, (0,), {}, f"{cls.__name__}.task(self, index)", where)
    name = getattr(instance, "name", cls.__name__.lower())
    hooks = Hooks.of(instance, where) if hasattr(instance, "episode") else Hooks()
    return Environment(short_name(name, where), episode, make_task, _size(instance, cls, where), hooks)


def _size(instance: Any, cls: type, where: str) -> int | None:
    if not hasattr(cls, "__len__"):
        return None
    size = len(instance)
    if size < 1:
        raise ConfigError(f"{where}: len({cls.__name__}) is {size}; an environment needs at least one task")
    return size


def short_name(name: object, where: str) -> str:
    """``name`` where it may stand in metric names; else raises ``ConfigError``."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
        raise ConfigError(
            f"{where}: name {name!r:.80} must be letters, digits, '_', '-' or '.', as it stands in metric names, "
            "64 of them at most"
        )
    return name


def _episode(function: Any, title: str, options: Mapping[str, Any], where: str) -> EpisodeFunction:
    """``function`` behind one shape: a coroutine function of task and policy."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"{where}: {title} is a generator; it must return a number or a Reward, and yield nothing")
    if not inspect.iscoroutinefunction(function):
        return in_thread(function, dict(options))
    if not options:
        return function

    async def episode(task: Task, policy: Any) -> float | Reward:
        result: float | Reward = await function(task, policy, **options)
        return result

    return episode


def _check_options(parameters: list[inspect.Parameter], options: Mapping[str, Any], owner: str, where: str) -> None:
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return  # the environment takes any option and judges for itself
    known = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    try:
        refuse_unknown(options, known, owner)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    for each in parameters:
        if each.name in known and each.default is each.empty and each.name not in options:
            raise ConfigError(f"{where}: {owner} needs the option {each.name!r}; set env.args.{each.name}=…")


def _check_call(function: Any, values: tuple[Any, ...], options: Mapping[str, Any], shape: str, where: str) -> None:
    try:
        inspect.signature(function).bind(*values, **options)
    except TypeError as error:
        raise ConfigError(f"{where}: must be callable as {shape}: {error}") from error
