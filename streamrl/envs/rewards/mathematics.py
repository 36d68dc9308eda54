"""Mathematical answers: boxed, LaTeX or plain, compared as expressions by math-verify.

It works with sympy, which for some expressions takes for ever; so it runs in processes that can be killed.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from streamrl.envs.environment import Reward, Task
from streamrl.envs.rewards.protocol import Answer, reference_of, text_of
from streamrl.envs.rewards.workers import WorkerPool
from streamrl.errors import ConfigError

START_TIMEOUT_S = 60.0
"""sympy takes a second to import, much more on a busy machine."""


class MathReward:
    """1.0 where the answer's last expression equals ``task.answer``, else 0.0; metric ``parsed``: there was one.

    ``workers`` processes of at most ``memory_bytes`` each compare; a comparison that takes more than ``timeout_s``
    seconds raises ``EnvironmentFailed``, as does a task whose reference cannot be read. ``digits``: decimal places of
    numbers that are compared.
    """

    def __init__(self, timeout_s: float = 5.0, workers: int = 1, digits: int = 6, memory_bytes: int = 2 << 30) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("math-verify is not installed; pip install 'streamrl[rewards]'")
        if timeout_s <= 0 or workers < 1:
            raise ConfigError(f"timeout_s={timeout_s} must be positive and workers={workers} at least 1")
        self._digits = digits
        self._pool = WorkerPool(
            Path(__file__).with_name("math_worker.py"), [str(memory_bytes)],
            size=workers, timeout_s=timeout_s, start_timeout_s=START_TIMEOUT_S,
        )  # fmt: skip

    async def __call__(self, task: Task, answer: Answer) -> Reward:
        request = {"reference": reference_of(task, "math"), "answer": text_of(answer), "digits": self._digits}
        reply = await self._pool.ask(request)
        return Reward(float(reply["equal"]), {"parsed": float(reply["parsed"])})

    async def close(self) -> None:
        """End the processes."""
        await self._pool.close()
