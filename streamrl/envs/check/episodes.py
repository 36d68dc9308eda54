"""Episodes with a policy: what they are worth, and whether they can be compared and repeated."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from streamrl.envs.check.findings import Finding, fine, problem, shortened, warning
from streamrl.envs.check.stalls import LoopWatch
from streamrl.envs.check.teacher import Teacher
from streamrl.envs.codec import Codec, Tokenizer
from streamrl.envs.environment import Reward, Task
from streamrl.envs.episode import Host
from streamrl.envs.group import GroupRunner
from streamrl.envs.split import Split
from streamrl.ports import Sampler
from streamrl.schema import Config
from streamrl.types import Lease, Trajectory

STALL_S = 0.1
"""Seconds for which an episode may hold the event loop; at ten times that it is a problem."""

_REASONS = 3
"""Different failures that are shown."""


@dataclass
class Played:
    """Groups of episodes, and how long the user's code took."""

    groups: list[list[Trajectory]]
    """By prompt; an episode that failed has none."""
    failures: list[str] = field(default_factory=list)
    episode_s: list[float] = field(default_factory=list)

    @property
    def trajectories(self) -> list[Trajectory]:
        return [each for group in self.groups for each in group]

    @property
    def episodes(self) -> int:
        return len(self.episode_s)


class Stage:
    """Plays the first training prompts of an environment, again and again the same ones."""

    def __init__(
        self, split: Split, tokenizer: Tokenizer, config: Config, groups: int, host: Host | None = None
    ) -> None:
        self.split = split
        self.tokenizer = tokenizer
        self.groups = groups
        self._host = host
        group = replace(config.group, min_size=1, on_straggler="wait", straggler_s=0.0)
        self._config = replace(config, group=group)

    async def play(self, engine: Sampler, size: int) -> Played:
        """A group of ``size`` episodes of each prompt, all at once."""
        return await self._play([(place, engine) for place in range(self.groups)], size)

    async def teach(self) -> Played:
        """One episode of each prompt, whose policy gives the task's own answer."""
        codec = Codec(self.tokenizer, self._config.model.tool_format)
        return await self._play([(place, Teacher(self.task(place), codec)) for place in range(self.groups)], 1)

    def task(self, place: int) -> Task:
        return self.split.train(place)

    async def _play(self, leased: Sequence[tuple[int, Sampler]], size: int) -> Played:
        played = Played([])
        split = Split(self._timed(played.episode_s), self._config.seed, self.split.share)
        runners = [GroupRunner(split, engine, self.tokenizer, self._config, self._host) for _, engine in leased]
        leases = [Lease(place, place, size, 0, deadline_s=float("inf")) for place, _ in leased]
        for each in await asyncio.gather(*map(GroupRunner.run_group, runners, leases)):
            played.groups.append([] if each.group is None else each.group.trajectories)
            played.failures += [failure.reason for failure in each.failures]
        return played

    def _timed(self, episode_s: list[float]) -> Any:
        environment = self.split.environment

        async def episode(task: Task, policy: Any) -> float | Reward:
            began = time.perf_counter()
            try:
                return await environment.episode(task, policy)
            finally:
                episode_s.append(time.perf_counter() - began)

        return replace(environment, episode=episode)


def check_failures(played: Played) -> list[Finding]:
    """One finding for each kind of failure."""
    if not played.failures:
        metrics = Counter(name for each in played.trajectories for name in each.metrics)
        named = f"; metrics: {', '.join(sorted(metrics))}" if metrics else ""
        return [fine("episodes", f"{played.episodes} finished{named}")]
    kinds = Counter(played.failures).most_common(_REASONS)
    consequence = "such a trajectory is lost, its prompt issued again, and a run that only fails ends"
    return [
        problem("episodes", f"{count} of {played.episodes} failed: {reason}", consequence) for reason, count in kinds
    ]


def check_prompts(played: Played) -> Finding:
    """Whether the episodes of a group begin alike."""
    for place, group in enumerate(played.groups):
        openings = {tuple(each.tokens[: each.prompt_length].tolist()) for each in _first_of_episodes(group)}
        if len(openings) > 1:
            detail = f"the {len(openings)} episodes of prompt {place} begin with different texts"
            consequence = "they are compared with each other: draw from task.random, not from the module random"
            return problem("prompt of a group", detail, consequence)
    return fine("prompt of a group", "the same in all of its episodes")


def check_lengths(played: Played, config: Config) -> Finding | None:
    """Whether there is room for an answer after what an episode begins with, chat template included."""
    longest = max((each.prompt_length for each in played.trajectories), default=0)
    room = config.model.max_length - longest
    if room >= config.sampling.max_tokens:
        return None
    detail = f"up to {longest} tokens with what stands round the prompt, {room} of model.max_length are left"
    return warning("room for answers", detail, "answers are cut: raise model.max_length")


def check_repeated(first: Played, second: Played) -> list[Finding]:
    """What differs between two times that the same policy played the same tasks with the same seeds."""
    rewards: list[str] = []
    for one, other in zip(_by_tokens(first), _by_tokens(second), strict=True):
        for tokens in one.keys() & other.keys():
            worth = sorted(one[tokens] | other[tokens])
            if len(worth) > 1:
                rewards.append(f"one transcript was worth {worth[0]:g} and {worth[-1]:g}")
    if rewards:
        consequence = "noise in the reward is noise in the gradient: draw from task.random, and pin judges to a seed"
        return [warning("reward repeats", rewards[0], consequence)]
    contexts = _first_difference(first, second)
    if contexts:
        consequence = "a lease that is issued again meets other observations: draw from task.random"
        return [warning("observations repeat", contexts, consequence)]
    return [fine("episodes repeat", "the same observations and rewards when played again")]


def check_rewards(played: Played, taught: Played) -> Finding:
    """Whether rewards differ: within groups, or at least between random and right answers."""
    samples = [{(each.episode, each.reward) for each in group} for group in played.groups]
    rewards = [reward for group in samples for _, reward in group]
    if not rewards:
        return problem("rewards", "no episode finished", "there is nothing to learn from")
    if min(rewards) < max(rewards):
        varied = sum(len({reward for _, reward in group}) > 1 for group in samples)
        spread = f"{min(rewards):g} to {max(rewards):g} for random answers"
        return fine("rewards", f"{spread}, different within {varied} of {len(samples)} groups")
    best = max((each.reward for each in taught.trajectories), default=rewards[0])
    if best > rewards[0]:
        return fine("rewards", f"always {rewards[0]:g} for random answers, up to {best:g} for the task's own")
    consequence = "groups of equal rewards teach nothing: easier tasks, partial credit, or a model that is warmed up"
    return warning("rewards", f"always {rewards[0]:g} for random answers", consequence)


def check_taught(taught: Played, stage: Stage) -> Finding | None:
    """Whether a task's own answer is counted as right; None where no task has one."""
    tasks = [stage.task(place) for place in range(stage.groups)]
    with_answers = [place for place, task in enumerate(tasks) if task.answer or task.demonstration]
    if not with_answers:
        return None
    if taught.failures:
        return problem("own answers", f"an episode that gives them failed: {taught.failures[0]}", "so will right ones")
    for place in with_answers:
        best = max((each.reward for each in taught.groups[place]), default=0.0)
        if best < 1.0:
            given = tasks[place].answer or "its demonstration"
            detail = f"task {tasks[place].index}: {shortened(given)} is worth {best:g}"
            consequence = "evaluation counts an answer as right from a reward of 1 on, and the warm-up teaches this one"
            return warning("own answers", detail, consequence)
    return fine("own answers", f"worth 1 or more in {len(with_answers)} tasks")


def check_time(taught: Played, timeout_s: float) -> Finding:
    """How long the user's code takes where the policy takes no time."""
    longest = max(taught.episode_s, default=0.0)
    detail = f"up to {longest:.2f} s without the policy's time, env.timeout_s={timeout_s:g}"
    if longest > 0.5 * timeout_s:
        return warning("time of an episode", detail, "with a large model it will run out: raise env.timeout_s")
    return fine("time of an episode", detail)


def check_stalls(watch: LoopWatch) -> Finding:
    """Whether user code held the event loop."""
    if watch.longest_s < STALL_S:
        return fine("event loop", f"never held for more than {STALL_S:g} s")
    detail = f"held for {watch.longest_s:.2f} s at {watch.place}"
    consequence = "no other episode goes on meanwhile: await it, or write a plain `def`, which runs in a thread"
    return (problem if watch.longest_s > 10 * STALL_S else warning)("event loop", detail, consequence)


def _first_of_episodes(group: Sequence[Trajectory]) -> list[Trajectory]:
    seen: dict[int, Trajectory] = {}
    for each in group:
        seen.setdefault(each.episode, each)
    return list(seen.values())


def _by_tokens(played: Played) -> list[dict[tuple[Any, ...], set[float]]]:
    """For each group the rewards by what was given and sampled."""
    found: list[dict[tuple[Any, ...], set[float]]] = []
    for group in played.groups:
        rewards: dict[tuple[Any, ...], set[float]] = {}
        for each in group:
            rewards.setdefault((each.tokens.tobytes(), each.sampled.tobytes()), set()).add(each.reward)
        found.append(rewards)
    return found


def _first_difference(first: Played, second: Played) -> str:
    """Where the environment said something else after the same tokens; nothing where only the policy did."""
    for place, (one, other) in enumerate(zip(first.groups, second.groups, strict=True)):
        for a, b in zip(_first_of_episodes(one), _first_of_episodes(other), strict=False):
            length = min(a.length, b.length)
            differs = np.flatnonzero(a.tokens[:length] != b.tokens[:length])
            if differs.size and a.episode == b.episode and not a.sampled[differs[0]]:
                return f"prompt {place}, episode {a.episode}: another text at token {differs[0]} after the same tokens"
    return ""
