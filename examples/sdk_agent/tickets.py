"""The training side of the agent: tickets to send it, and what its decisions are worth."""

import random

from openai import AsyncOpenAI

from examples.sdk_agent.agent import handle
from streamrl.envs import Task

TEAMS = {"billing": ("refund", "invoice"), "support": ("crash", "login"), "sales": ("demo", "offer")}
SUBJECTS = [(word, team) for team, words in TEAMS.items() for word in words]


class Tickets:
    def __init__(self):
        self.client = AsyncOpenAI(base_url="http://localhost", api_key="none")  # its connections serve all episodes

    def task(self, index):
        draw = random.Random(index)
        word, team = draw.choice(SUBJECTS)
        mood, urgent = draw.choice([("please", "no"), ("now!", "yes")])
        ticket = f"{word} {draw.randint(100, 999)} {mood}"
        done = team if draw.random() < 0.3 else "desk"  # people passed most tickets on to the front desk
        messages = [
            {"role": "user", "content": ticket},
            {"role": "assistant", "content": done},
            {"role": "user", "content": "urgent?"},
            {"role": "assistant", "content": urgent},
        ]
        return Task(ticket, metadata={"team": team, "urgent": urgent}, demonstration=messages)

    async def episode(self, task, policy):
        client = self.client.with_options(base_url=policy.base_url, api_key=policy.api_key)
        team, urgent = await handle(task.prompt, client)
        return 0.5 * (team == task.metadata["team"]) + 0.5 * (urgent == task.metadata["urgent"])
