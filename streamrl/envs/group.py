"""Runs user code: the G trajectories of a lease into a ``Group``, or held-out tasks into an accuracy.

Consumes leases, produces groups. A trajectory whose episode raises, times out or returns no usable reward fails alone;
an error of the engine is not the environment's and propagates. When a group is closed: ``closing.py``.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from streamrl.envs.closing import ClosingPolicy, Straggler
from streamrl.envs.environment import Reward, Task
from streamrl.envs.failure import Failure, failure_of, traceback_of
from streamrl.envs.returned import checked_reward
from streamrl.envs.session import Codec, ContextFull, Limits, Session, Tokenizer
from streamrl.envs.split import Split
from streamrl.errors import EnvironmentFailed
from streamrl.ports import Engine
from streamrl.schema import Config
from streamrl.types import Group, Lease, Trajectory

_T = TypeVar("_T")


@dataclass(frozen=True)
class GroupResult:
    """What came of one lease."""

    group: Group | None
    """Trajectories in the order in which they were begun; None where fewer than ``group.min_size`` finished."""
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

    def __init__(self, split: Split, engine: Engine, tokenizer: Tokenizer, config: Config) -> None:
        sampling = config.sampling
        self.split = split
        self._environment = split.environment
        self._engine = engine
        self._codec = Codec(tokenizer)
        self._seed = config.seed
        self._timeout_s = config.env.timeout_s
        self._closing = ClosingPolicy.of(config.group)
        self._concurrency = config.engine.slots
        self._limits = Limits(
            sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_tokens, config.model.max_length
        )
        self._greedy = replace(self._limits, temperature=0.0, top_k=0, top_p=1.0)

    async def run_group(self, lease: Lease) -> GroupResult:
        """Run ``lease.group_size`` episodes of the lease's prompt at once; ``group.on_straggler`` says for how long.

        Cancelling the call cancels every episode and its request to the engine. The lease's deadline is the caller's
        to watch. Raises what the engine raised, and ``ConfigError`` where the environment has no task to train on.
        """
        try:
            task = self.split.train(lease.prompt)
        except EnvironmentFailed as error:
            return GroupResult(None, [Failure(str(error), traceback_of(error.__cause__ or error))])
        sessions = [
            Session(self._engine, self._codec, self._limits, (self._seed, lease.prompt, lease.attempt, member))
            for member in range(lease.group_size)
        ]
        outcomes = await self._closing.play(sessions, [self._play(task.copy(), session) for session in sessions])
        finished = [each for each in outcomes if isinstance(each, Trajectory)]
        enough = len(finished) >= self._closing.enough
        return GroupResult(
            Group(lease.id, lease.prompt, self._environment.name, finished) if enough else None,
            [each for each in outcomes if isinstance(each, Failure)],
            [each for each in outcomes if isinstance(each, Straggler)],
        )

    async def evaluate(self, tasks: Sequence[Task]) -> EvalResult:
        """Play every task once, greedily (temperature 0), as many at once as the engine has slots."""
        sessions = [
            Session(self._engine, self._codec, self._greedy, (self._seed, index, 0, 0)) for index in range(len(tasks))
        ]
        outcomes: dict[int, Trajectory | Failure] = {}
        waiting = iter(range(len(tasks)))

        async def worker() -> None:
            for index in waiting:
                outcomes[index] = await self._play(tasks[index].copy(), sessions[index])

        await _together([worker() for _ in range(min(self._concurrency, len(tasks)))])
        ordered = [outcomes[index] for index in range(len(tasks))]
        finished = [each for each in ordered if isinstance(each, Trajectory)]
        rewards = [each.reward if isinstance(each, Trajectory) else 0.0 for each in ordered]
        return EvalResult(
            accuracy=sum(reward >= 1.0 for reward in rewards) / len(rewards) if rewards else math.nan,
            answers=[
                Answer(session.prompt_text, session.answer_text, reward)
                for session, reward in zip(sessions, rewards, strict=True)
            ],
            failures=[each for each in ordered if isinstance(each, Failure)],
            versions=tuple(sorted({version for each in finished for version, _ in each.versions})),
        )

    async def _play(self, task: Task, session: Session) -> Trajectory | Failure:
        """One episode. Raises only the engine's errors, and ``CancelledError`` when it is cancelled itself."""
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                returned = await self._environment.episode(task, session)
            outcome = _finish(session, returned)
        except asyncio.CancelledError as error:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            outcome = failure_of(error, "cancelled by itself: user code awaited something that was cancelled")
        except (Exception, SystemExit) as error:  # noqa: BLE001 user code may raise anything; it fails this trajectory
            outcome = self._outcome_of(error, deadline.expired(), session)
        finally:
            session.close()
        if session.engine_error is not None:
            raise session.engine_error
        return outcome

    def _outcome_of(self, error: BaseException, expired: bool, session: Session) -> Trajectory | Failure:
        if isinstance(error, ContextFull) and session.turns:
            return session.trajectory(Reward(0.0))  # the policy talked until there was no room: truncated, reward 0
        if isinstance(error, TimeoutError) and expired:
            return failure_of(error.__cause__ or error, f"timed out after env.timeout_s={self._timeout_s:g}")
        return failure_of(error)


def _finish(session: Session, returned: object) -> Trajectory | Failure:
    """The trajectory of an episode that returned, or why it cannot be used."""
    if not session.close():
        return Failure("the episode returned while policy.complete was still running; await every call", "")
    if not session.turns:
        return Failure("the episode returned without sampling; it must await policy.complete at least once", "")
    try:
        return session.trajectory(checked_reward(returned))
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
