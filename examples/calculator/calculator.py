"""An agent with a tool: it learns that products are better worked out by the calculator than by heart."""

import random

from streamrl.envs import Task
from streamrl.envs.tools import ToolAgent, tool


class Calculator(ToolAgent):
    max_turns = 2

    def task(self, index):
        draw = random.Random(index)
        a, b = draw.randint(10, 99), draw.randint(10, 99)
        question, answer = f"{a}*{b}", f"={a * b}"
        call = {"type": "function", "function": {"name": "times", "arguments": {"a": a, "b": b}}}
        shown = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": str(a * b)},
            {"role": "assistant", "content": answer},
        ]
        if draw.random() < 0.7:  # most demonstrations guess: both ways are shown, and the reward tells which is good
            shown = [shown[0], {"role": "assistant", "content": f"={draw.randint(100, 9801)}"}]
        return Task(question, answer, demonstration=shown, tools=self.schemas)

    @tool
    def times(self, a: int, b: int) -> int:
        """The product of two numbers."""
        return a * b

    def reward(self, task, answer, state):
        return float(answer == task.answer)
