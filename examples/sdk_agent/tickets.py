"""The training side of the agent: tickets to send it, and what its decisions are worth."""

import random

from examples.sdk_agent.agent import handle
from streamrl.envs import Task

TEAMS = {"billing": ("refund", "invoice", "price"), "support": ("crash", "error", "login"), "sales": ("demo", "offer")}
SUBJECTS = [(word, team) for team, words in TEAMS.items() for word in words]
MOODS = [("please", "no"), ("thanks", "no"), ("now!", "yes"), ("today!", "yes")]


class Tickets:
    def task(self, index):
        draw = random.Random(index)
        word, team = draw.choice(SUBJECTS)
        mood, urgent = draw.choice(MOODS)
        ticket = f"{word} {draw.randint(100, 999)} {mood}"
        guesses = draw.choice(list(TEAMS)), draw.choice(["yes", "no"])  # the form of an answer, not the right one
        shown = [ticket, guesses[0], "urgent?", guesses[1]]
        messages = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, shown)]
        return Task(ticket, metadata={"team": team, "urgent": urgent}, demonstration=messages)

    async def episode(self, task, policy):
        team, urgent = await handle(task.prompt, policy.base_url, policy.api_key)
        return 0.5 * (team == task.metadata["team"]) + 0.5 * (urgent == task.metadata["urgent"])
