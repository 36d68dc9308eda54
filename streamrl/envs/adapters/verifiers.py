"""Environments of the ``verifiers`` package: ``env=streamrl.envs.adapters.verifiers:Verifiers env.args.taskset=…``.

Its tasks, its harness and its rubric do what they do elsewhere; the harness samples from this episode's endpoint, where
every token is recorded.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from streamrl.envs.adapters.shared import Shared
from streamrl.envs.environment import Policy, Reward, Task
from streamrl.envs.failure import one_line
from streamrl.errors import ConfigError, EnvironmentFailed

_USES = 256
"""Episodes per interception server, which keeps a client for every key that it has seen."""

_LOCAL = {"runtime": {"type": "subprocess"}}

_keys = itertools.count()


class Verifiers:
    """Task ``index`` is that of the taskset; the reward is what the task's rubric gives the trace.

    Seats that name no runtime play on this machine, and where the taskset brings no harness of its own, with the
    ``null`` harness (a chat loop with the task's tools) rather than one that runs the policy's commands here.
    """

    def __init__(
        self,
        taskset: str,
        options: Mapping[str, Any] | None = None,
        env: Mapping[str, Any] | None = None,
        size: int | None = None,
        name: str | None = None,
    ) -> None:
        """``taskset``: its id, the module that exports it. ``options`` are its settings; ``env`` is the rest of what
        verifiers calls the environment's config, such as ``agent`` with its ``harness`` and ``max_turns``. ``size``
        bounds the tasks, and must be given where the taskset has no end.
        """
        try:
            import verifiers.v1 as vf
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"env.name: {error.name} is not installed; pip install 'streamrl[verifiers]' (into an environment of "
                "its own: it needs openai<3)"
            ) from error
        self.name = name or taskset.rpartition(".")[2].rpartition("/")[2]
        try:
            self._config = _config(taskset, {**(options or {})}, {**(env or {})})
            loaded = vf.load_environment(self._config)
            if size is None and not loaded.taskset.bounded:
                raise ConfigError(f"env.args.size: taskset {taskset} has no end; say how many of its tasks to take")
            self._tasks = list(itertools.islice(iter(loaded.taskset), size))
        except ConfigError:
            raise
        except Exception as error:  # a package's own code may raise anything while it is loaded; it is named
            raise ConfigError(f"env.args.taskset={taskset}: {one_line(error)}") from error
        if not self._tasks:
            raise ConfigError(f"env.args.taskset={taskset}: it has no tasks")
        self._serving = Shared(self._served, _USES)

    def __len__(self) -> int:
        return len(self._tasks)

    def task(self, index: int) -> Task:
        """The prompt's text decides what is held out; ``answer`` is the task's where it has one."""
        number = index % len(self._tasks)
        data = self._tasks[number].data
        answer = getattr(data, "answer", None)
        return Task(data.prompt_text, answer if isinstance(answer, str) else None, {"number": number})

    async def episode(self, task: Task, policy: Policy) -> Reward:
        import verifiers.v1 as vf

        with _key_in_environment(policy.api_key) as variable:
            client = vf.EvalClientConfig(base_url=policy.base_url, api_key_var=variable)
            async with self._serving.use() as env:
                context = vf.ModelContext(model="policy", client=client)
                episode = await env.run_episode(self._tasks[task.metadata["number"]], context)
        return _reward_of(episode)

    @asynccontextmanager
    async def _served(self) -> AsyncIterator[Any]:
        import verifiers.v1 as vf

        env = vf.load_environment(self._config)
        async with env.serving():
            yield env


def _config(taskset: str, options: dict[str, Any], env: dict[str, Any]) -> Any:
    import verifiers.v1 as vf

    data = {**env, "taskset": {**options, "id": taskset}}
    harness = vf.default_agent_harness(taskset).id
    seats = vf.env_config_type(taskset, env.get("id", "")).model_fields
    for seat, field in seats.items():
        if isinstance(field.default, vf.AgentConfig):
            own = {} if harness != "bash" else {"harness": {"id": "null"}}
            data[seat] = {**_LOCAL, **own, **env.get(seat, {})}
    return vf.resolve_env_config(data)


@contextmanager
def _key_in_environment(key: str) -> Iterator[str]:
    """The name of an environment variable that holds ``key``: verifiers reads keys from nowhere else.

    Programs that its harnesses start do not inherit variables with ``API_KEY`` in their name.
    """
    variable = f"STREAMRL_EPISODE_API_KEY_{next(_keys)}"
    os.environ[variable] = key
    try:
        yield variable
    finally:
        del os.environ[variable]


def _reward_of(episode: Any) -> Reward:
    """The reward and the metrics of the one trainable trace. Raises ``EnvironmentFailed`` with what went wrong."""
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors if not trace.ok)]
    if not episode.ok:
        reason = " ".join(f"{errors[-1].type}: {errors[-1].message}".split()) if errors else "it gave no reason"
        raise EnvironmentFailed(f"the episode was not completed: {reason:.400}")
    if len(trained) != 1:
        raise EnvironmentFailed(f"{len(trained)} agents of the episode are to be trained; expected one")
    (trace,) = trained
    if not trace.rewards or any(reward is None for reward in trace.rewards.values()):
        raise EnvironmentFailed("the task gave no reward; it needs a @vf.reward that ran")
    metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
    metrics |= {f"reward_{name}": float(reward.value) for name, reward in trace.rewards.items()}
    return Reward(float(trace.reward), {**metrics, "turns": float(trace.num_turns)})
