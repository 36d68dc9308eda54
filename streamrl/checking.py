"""``streamrl env check``: plays a few episodes of an environment with a tiny policy and says what training would meet.

The policy is the model that ``model`` names, not warmed up, on the embedded engine in this process; nothing else of a
run is started.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace

import psutil
from rich.console import Console

from streamrl.actors.engine_loading import load_embedded
from streamrl.envs.check import episodes, tasks
from streamrl.envs.check.findings import Finding, Level, problem, warning
from streamrl.envs.check.stalls import LoopWatch
from streamrl.envs.check.view import counted, show_findings, show_trajectory
from streamrl.envs.environment import Environment, Task
from streamrl.envs.gateway import Gateway
from streamrl.envs.loading import import_module_of
from streamrl.envs.split import Split
from streamrl.errors import ConfigError, EnvironmentFailed
from streamrl.policy.model import BUILT_IN, load_tokenizer, prepare_model
from streamrl.ports import Engine
from streamrl.schema import Config, WarmupConfig
from streamrl.types import Trajectory

MOST_EPISODES = 4
"""Of one group."""


def check(environment: Environment, config: Config, groups: int, console: Console | None = None) -> int:
    """Print the report on ``environment``, which ``config.env`` names.

    Returns 0 where training could begin, 1 where it would fail or learn wrong things.

    ``groups``: prompts that are played. Raises ``ConfigError`` for a model that a launch would refuse.
    """
    console = console or Console(highlight=False, soft_wrap=True)
    config = _small(config)
    console.print(f"{environment.name}, played by {config.model.name} as it is before training\n")
    findings = asyncio.run(_Check(config, environment, groups, console).run())
    console.print()
    show_findings(findings, console)
    levels = [each.level for each in findings]
    wrong, doubtful = levels.count(Level.PROBLEM), levels.count(Level.WARNING)
    console.print(f"\n{config.env.name}: {counted(wrong, 'problem')}, {counted(doubtful, 'warning')}")
    return 1 if wrong else 0


def check_left_running(before: set[psutil.Process]) -> Finding | None:
    """Whether processes run that did not before."""
    left = set(psutil.Process().children(recursive=True)) - before
    if not left:
        return None
    names = Counter(each.name() for each in left)
    named = ", ".join(f"{count} × {name}" for name, count in names.most_common())
    return warning("processes", f"left running: {named}", "they pile up: end them in the episode")


def _small(config: Config) -> Config:
    """Settings of a run whose model is not kept and not warmed up."""
    model = replace(config.model, cache=False, warmup=WarmupConfig())
    engine = replace(config.engine, slots=min(config.engine.slots, 16))
    return replace(config, model=model, engine=engine)


def _file_of(config: Config) -> str:
    """Where the environment is defined."""
    module = import_module_of(config.env.name, "env.name", "")[0]
    return module.__file__ or ""


class _Check:
    def __init__(self, config: Config, environment: Environment, groups: int, console: Console) -> None:
        self._config = config
        self._split = Split.of(environment, config)
        self._groups = groups
        self._console = console
        self._findings: list[Finding] = []

    async def run(self) -> list[Finding]:
        """All findings, those of the tasks first."""
        made = self._make_tasks()
        if made is None:
            return self._findings
        children = set(psutil.Process().children(recursive=True))
        async with AsyncExitStack() as stack:
            if self._split.environment.make_task is not None:
                self._found(tasks.check_repeated(self._config, made))
                if not self._findings:
                    self._found(await tasks.check_in_another_process(self._config, made))
                self._found(tasks.check_speed(self._split.environment, [each.index for each in made]))
            self._found(*tasks.check_split(self._split, self._config, made))
            folder = await asyncio.to_thread(prepare_model, self._config, None, lambda *_: None)
            if self._config.model.name == BUILT_IN:
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
            tokenizer = load_tokenizer(folder)
            self._found(*tasks.check_texts(made, tokenizer, self._config))
            engine = await load_embedded(self._config, str(folder))
            stack.push_async_callback(engine.close)
            gateway = Gateway(replace(self._config.gateway, host="127.0.0.1", port=0), 0)
            await gateway.start()
            stack.push_async_callback(gateway.stop)
            stack.push_async_callback(self._split.environment.close)
            stage = episodes.Stage(self._split, tokenizer, self._config, self._groups, gateway)
            await self._play(stage, engine, made)
        self._found(check_left_running(children))
        return self._findings

    def _make_tasks(self) -> list[Task] | None:
        try:
            return tasks.training_tasks(self._split)
        except (ConfigError, EnvironmentFailed) as error:
            self._found(problem("tasks", str(error), "no group of such a task can be played"))
            return None

    async def _play(self, stage: episodes.Stage, engine: Engine, made: list[Task]) -> None:
        size = min(self._config.group.size, MOST_EPISODES)
        async with LoopWatch({_file_of(self._config)}) as watch:
            first = await stage.play(engine, size)
            second = None if first.failures else await stage.play(engine, size)
            taught = await stage.teach()
        for place, group in enumerate(first.groups[:1]):
            for each in group[:2]:
                self._show(each, f"prompt {place}, episode {each.episode}", stage)
        if made[0].answer or made[0].demonstration:
            for each in taught.groups[0]:
                self._show(each, "prompt 0, with the task's own answer", stage)
        self._found(*episodes.check_failures(first), episodes.check_prompts(first))
        self._found(episodes.check_lengths(first, self._config))
        if second is not None:
            self._found(*episodes.check_repeated(first, second))
        self._found(episodes.check_rewards(first, taught), episodes.check_taught(taught, stage))
        self._found(episodes.check_time(taught, self._config.env.timeout_s), episodes.check_stalls(watch))

    def _show(self, trajectory: Trajectory, title: str, stage: episodes.Stage) -> None:
        show_trajectory(trajectory, title, stage.tokenizer, self._console)

    def _found(self, *findings: Finding | None) -> None:
        self._findings += [each for each in findings if each is not None]
