"""An environment whose reward is the run's reward model."""

from __future__ import annotations

from streamrl.envs.environment import Policy, Reward, Task
from streamrl.envs.rewards import load_reward


class Scored:
    """Reward: what the reward model says, between 0 and 1."""

    def __init__(self) -> None:
        self._reward = load_reward({"name": "model", "sigmoid": True})

    def task(self, index: int) -> Task:
        return Task(prompt=f"{index % 97}:")

    async def episode(self, task: Task, policy: Policy) -> float | Reward:
        completion = await policy.complete(task.prompt)
        return await self._reward(task, completion.text)

    async def close(self) -> None:
        await self._reward.close()
