"""Runs user code: the G episodes of a lease into a ``Group``, or held-out tasks into an accuracy.

Consumes leases, produces groups. An episode that raises, times out or returns no usable reward fails alone; an error of
the engine is not the environment's and propagates. When a group is closed: ``closing.py``.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from streamrl.envs.closing import ClosingPolicy, Played, Straggler
from streamrl.envs.codec import Codec, Tokenizer
from streamrl.envs.environment import Reward, Task
from streamrl.envs.episode import Episode, Host, Limits
from streamrl.envs.failure import Failure, failure_of, timed_out, traceback_of
from streamrl.envs.guard import Expired, bounded, left_behind
from streamrl.envs.returned import checked_reward
from streamrl.envs.session import Session
from streamrl.envs.split import Split
from streamrl.envs.threads import EpisodeOver
from streamrl.errors import EnvironmentFailed
from streamrl.ports import Sampler
from streamrl.schema import Config
from streamrl.types import Group, Lease

_T = TypeVar("_T")


@dataclass(frozen=True)
class GroupResult:
    """What came of one lease."""

    group: Group | None
    """Trajectories in the order in which their episodes were begun; None where fewer than ``group.min_size`` episodes
    finished."""
    failures: list[Failure]
    stragglers: list[Straggler] = field(default_factory=list)
    """What was cancelled because the group was closed; every episode that was begun is in one of the three."""


@dataclass(frozen=True)
class Answer:
    """One greedy answer to a held-out task."""

    prompt: str
    text: str
    reward: float
    """0 where the episode failed; its failure is in ``EvalResult.failures``."""


@dataclass(frozen=True)
class EvalResult:
    """Greedy answers to held-out tasks, in their order."""

    accuracy: float
    """Share of all tasks with a reward of at least 1; a failed episode counts as wrong. NaN without tasks."""
    answers: list[Answer]
    failures: list[Failure] = field(default_factory=list)
    versions: tuple[int, ...] = ()
    """Policy versions that sampled, ascending; one where the evaluation was pinned."""


class GroupRunner:
    """Runs the episodes of one environment on one engine. Stateless but for the memory of encoded texts."""

    def __init__(
        self, split: Split, engine: Sampler, tokenizer: Tokenizer, config: Config, host: Host | None = None
    ) -> None:
        """``host`` serves the episodes to clients that speak HTTP."""
        sampling = config.sampling
        self.split = split
        self._environment = split.environment
        self._engine = engine
        self._host = host
        self._codec = Codec(tokenizer, config.model.tool_format)
        self._seed = config.seed
        self._timeout_s = config.env.timeout_s
        self._closing = ClosingPolicy.of(config.group)
        self._concurrency = config.engine.slots
        self._limits = Limits(
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.max_tokens,
            config.model.max_length,
            sampling.min_p,
        )
        self._greedy = replace(self._limits, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)

    async def run_group(self, lease: Lease) -> GroupResult:
        """Run ``lease.group_size`` episodes of the lease's prompt at once; ``group.on_straggler`` says for how long.

        Cancelling the call cancels every episode and its request to the engine. The lease's deadline is the caller's
        to watch. Raises what the engine raised, and ``ConfigError`` where the environment has no task to train on.
        """
        try:
            task = self.split.train(lease.prompt)
        except EnvironmentFailed as error:
            return GroupResult(None, [Failure(str(error), traceback_of(error.__cause__ or error))])
        episodes = [
            self._episode(self._limits, (lease.prompt, lease.attempt, member)) for member in range(lease.group_size)
        ]
        coroutines = [self._play(task.copy(), episode, member) for member, episode in enumerate(episodes)]
        outcomes = await self._closing.play(episodes, coroutines)
        finished = [each for each in outcomes if isinstance(each, Played)]
        failures = [each for each in outcomes if isinstance(each, Failure)]
        group = None
        if len(finished) >= self._closing.enough:
            try:
                group = self._group(lease, task, finished)
            except Exception as error:  # noqa: BLE001 user code may raise anything; it fails this group
                failures.append(failure_of(error))
        return GroupResult(group, failures, [each for each in outcomes if isinstance(each, Straggler)])

    def _group(self, lease: Lease, task: Task, finished: Sequence[Played]) -> Group:
        self._environment.played(task, [each.reward for each in finished])
        trajectories = [trajectory for each in finished for trajectory in each.trajectories]
        return Group(lease.id, lease.prompt, self._environment.name_of(task), trajectories)

    def _episode(self, limits: Limits, key: tuple[int, int, int]) -> Episode:
        return Episode(self._engine, self._codec, limits, (self._seed, *key), self._host)

    async def evaluate(self, tasks: Sequence[Task]) -> EvalResult:
        """Play every task once, greedily (temperature 0), as many at once as the engine has slots."""
        episodes = [self._episode(self._greedy, (index, 0, 0)) for index in range(len(tasks))]
        outcomes: dict[int, Played | Failure] = {}
        waiting = iter(range(len(tasks)))

        async def worker() -> None:
            for index in waiting:
                outcomes[index] = await self._play(tasks[index].copy(), episodes[index])

        await _together([worker() for _ in range(min(self._concurrency, len(tasks)))])
        ordered = [outcomes[index] for index in range(len(tasks))]
        rewards = [each.reward if isinstance(each, Played) else 0.0 for each in ordered]
        finished = [trajectory for each in ordered if isinstance(each, Played) for trajectory in each.trajectories]
        return EvalResult(
            accuracy=sum(reward >= 1.0 for reward in rewards) / len(rewards) if rewards else math.nan,
            answers=[Answer(*episode.texts(), reward) for episode, reward in zip(episodes, rewards, strict=True)],
            failures=[each for each in ordered if isinstance(each, Failure)],
            versions=tuple(sorted({version for each in finished for version, _ in each.versions})),
        )

    async def _play(self, task: Task, episode: Episode, member: int = 0) -> Played | Failure:
        """One episode. Raises the engine's errors, ``CancelledError`` when it is cancelled itself, and
        ``EnvironmentFailed`` where too much user code hangs for good.
        """
        try:
            outcome = await self._outcome(task, episode, member)
        except asyncio.CancelledError:
            if episode.engine_error is not None:
                raise episode.engine_error from None
            raise
        finally:
            episode.close()
        if episode.engine_error is not None:
            raise episode.engine_error
        left_behind.check()
        return outcome

    async def _outcome(self, task: Task, episode: Episode, member: int) -> Played | Failure:
        try:
            returned = await bounded(self._environment.episode(task, Session(episode)), self._timeout_s)
            return _finish(episode, returned, member)
        except asyncio.CancelledError as error:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            return failure_of(error, "cancelled by itself: user code awaited something that was cancelled")
        except Expired as error:
            return timed_out(error.__cause__, self._timeout_s)
        except (Exception, SystemExit, EpisodeOver) as error:  # noqa: BLE001 user code may raise anything
            if episode.sampled and episode.ended_full(error):
                return Played(episode.trajectories(Reward(0.0), member))  # it talked until there was no room
            return failure_of(error)


def _finish(episode: Episode, returned: object, member: int) -> Played | Failure:
    """The trajectories of an episode that returned, or why they cannot be used."""
    if not episode.close():
        return Failure("the episode returned while a call of the policy was still running; await every call", "")
    if not episode.sampled:
        return Failure("the episode returned without sampling; it must await policy.complete at least once", "")
    try:
        return Played(episode.trajectories(checked_reward(returned), member))
    except EnvironmentFailed as error:
        return Failure(str(error), "")


async def _together(coroutines: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Results in order; the first exception ends all and is raised as it is, not in a group."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(each) for each in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [each.result() for each in running]
