"""What vLLM says of itself after every step."""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase


class Counters(StatLoggerBase):
    """One for all copies of the model: called itself where vLLM wants a factory of loggers."""

    def __init__(self) -> None:
        self.generated = self.prefilled = self.preemptions = 0
        self._running: dict[int, int] = {}
        self._used: dict[int, float] = {}

    def __call__(self, config: object, engine_index: int = 0) -> Counters:
        return self

    @property
    def running(self) -> int:
        """Sequences in a slot after the last step."""
        return sum(self._running.values())

    @property
    def kv_used(self) -> float:
        """Of the copy with the fullest cache, in [0, 1]."""
        return max(self._used.values(), default=0.0)

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: object = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is not None:
            self._running[engine_idx] = scheduler_stats.num_running_reqs
            self._used[engine_idx] = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.generated += iteration_stats.num_generation_tokens
            self.prefilled += iteration_stats.prompt_token_stats.computed
            self.preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """Nothing to say."""


class Stopwatch:
    """Seconds with something to do: vLLM steps without a break while a request is there and it is not paused."""

    def __init__(self) -> None:
        self._total = 0.0
        self._since: float | None = None

    def set(self, *, busy: bool) -> None:
        now = time.monotonic()
        if self._since is not None:
            self._total += now - self._since
        self._since = now if busy else None

    @property
    def seconds(self) -> float:
        return self._total + (0.0 if self._since is None else time.monotonic() - self._since)
