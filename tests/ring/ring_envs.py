"""Environments for runs with an untrained model: rewards that vary from the first step on."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import numpy as np

from streamrl.buffers.wire.messages import GroupMeta
from streamrl.envs.environment import Policy, Reward, Task


class Digits:
    """Reward: the share of digits in the answer."""

    def task(self, index: int) -> Task:
        return Task(prompt=f"{index % 97}:")

    async def episode(self, task: Task, policy: Policy) -> float:
        answer = await policy.complete(task.prompt)
        return sum(character.isdigit() for character in answer.text) / max(len(answer.text), 1)


class Sometimes(Digits):
    """Raises for every third prompt, until the end of time."""

    async def episode(self, task: Task, policy: Policy) -> float:
        reward = await super().episode(task, policy)
        if int(task.prompt[:-1]) % 3 == 0:
            raise ValueError(f"no idea about {task.prompt}")
        return reward


class SometimesOneMember(Digits):
    """One trajectory in four fails, more or less."""

    async def episode(self, task: Task, policy: Policy) -> float:
        answer = await policy.complete(task.prompt)
        if sum(answer.token_ids) % 4 == 0:
            raise ValueError("unlucky sum")
        return sum(character.isdigit() for character in answer.text) / max(len(answer.text), 1)


async def always_raises(task: Task, policy: Policy) -> float:
    await policy.complete("1+1=")
    raise RuntimeError("the judge is out of order")


class WithColumns(Digits):
    """Every trajectory carries 4 KiB that nobody asked for."""

    async def episode(self, task: Task, policy: Policy) -> Reward:
        return Reward(await super().episode(task, policy), columns={"router": np.zeros((256, 16), np.uint8)})


def by_prompt(group: GroupMeta) -> float:
    """Later prompts first."""
    return float(group.prompt)


class Hangs(Digits):
    """In a process that is told to: after its turn every episode leaves a mark, and waits for ever."""

    async def episode(self, task: Task, policy: Policy) -> float:
        reward = await super().episode(task, policy)
        if mark := os.environ.get("STREAMRL_TEST_HANG"):
            Path(mark).touch()  # noqa: ASYNC240 the test looks for it
            await asyncio.Event().wait()
        return reward


class Letters:
    """Tasks of its own, and a name that the run's environment does not have."""

    name = "letters"

    def task(self, index: int) -> Task:
        return Task(prompt=f"{index % 89}=")

    async def episode(self, task: Task, policy: Policy) -> float:
        answer = await policy.complete(task.prompt)
        return sum(character.isalpha() for character in answer.text) / max(len(answer.text), 1)
