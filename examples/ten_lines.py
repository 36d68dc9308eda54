"""An environment in ten lines: which of two numbers is larger? ``streamrl launch env=examples.ten_lines:Larger``"""

from streamrl.envs import Task


class Larger:
    def task(self, index):
        a, b = index // 100 % 100, index % 100
        return Task(prompt=f"{a}|{b}=", answer=str(max(a, b)))

    async def episode(self, task, policy):
        completion = await policy.complete(task.prompt)
        return float(completion.text == task.answer)


async def echo(task, policy):
    """The same as a bare function: it makes its own prompt from ``task.random``."""
    digit = str(task.random.randint(0, 9))
    completion = await policy.complete(f"{digit}=", max_tokens=2)
    return float(completion.text == digit)
