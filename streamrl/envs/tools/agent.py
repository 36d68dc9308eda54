"""An agent that calls tools until it answers: what a user subclasses (docs/tools.md)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from streamrl.envs.environment import Policy, Reward, Task
from streamrl.envs.episode import ContextFull
from streamrl.envs.tools.function import FunctionTool, marked_methods, schema_of
from streamrl.envs.tools.mcp_server import McpServer
from streamrl.envs.tools.toolbox import Toolbox
from streamrl.envs.tools.workers import on_thread


class ToolAgent:
    """Base class of environments whose episodes are: chat, carry out the calls, chat again, until there is an answer.

    Methods of a subclass that are marked ``@tool`` are its tools, beside those in ``tools`` and the marked methods of
    the object that ``setup`` returned. A subclass defines ``task`` and ``reward``; plain methods run on threads.
    """

    system: ClassVar[str] = ""
    """The system message; empty: none."""
    tools: Sequence[Callable[..., Any] | McpServer] = ()
    """Functions and MCP servers."""
    max_turns: ClassVar[int] = 8
    """Turns of the policy; the calls of the last one are not carried out."""
    max_parallel: ClassVar[int] = 8
    """Calls of one turn that are carried out."""
    tool_timeout_s: ClassVar[float] = 30.0
    """Seconds that a call may take."""
    max_result_tokens: ClassVar[int] = 256
    """Tokens of what a call gave that the model gets to read."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for each in cls.tools if isinstance(cls.tools, Sequence) else ():
            if not isinstance(each, McpServer):
                FunctionTool.of(each)

    async def setup(self, task: Task) -> Any:
        """The state of one episode, which lives until ``teardown``; tools with a parameter ``state`` get it."""
        return None

    async def teardown(self, state: Any) -> None:
        """Release what ``setup`` took; called however the episode ended."""

    def messages(self, task: Task, state: Any) -> list[dict[str, Any]]:
        """What the conversation begins with."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": task.prompt}]

    def reward(self, task: Task, answer: str, state: Any) -> float | Reward:
        """What ``answer``, the text of the last turn, is worth."""
        raise NotImplementedError(f"class {type(self).__name__} needs `def reward(self, task, answer, state)`")

    async def episode(self, task: Task, policy: Policy) -> Reward:
        """One conversation. Its metrics are those of the reward, and ``turns``, ``tool_calls``, ``tool_errors``,
        ``turn_limit`` and ``context_full`` (1 where that ended it)."""
        state = await _called(self.setup, task)
        try:
            async with self._toolbox(policy, state) as box:
                answer, metrics = await self._converse(self.messages(task, state), policy, box)
                returned = await _called(self.reward, task, answer, state)
        finally:
            await _called(self.teardown, state)
        reward = returned if isinstance(returned, Reward) else Reward(returned)
        return replace(reward, metrics={**box.metrics, **metrics, **reward.metrics})

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools that need no episode, for ``Task(demonstration=…, tools=self.schemas)``."""
        functions = [each for each in self.tools if not isinstance(each, McpServer)]
        return [schema_of(FunctionTool.of(each)) for each in (*marked_methods(self), *functions)]

    async def close(self) -> None:
        """End the MCP servers that episodes share."""
        for each in self.tools:
            if isinstance(each, McpServer):
                await each.close()

    def _toolbox(self, policy: Any, state: Any) -> Toolbox:
        return Toolbox(
            [*marked_methods(self), *self.tools, *marked_methods(state)],
            policy,
            state,
            max_parallel=self.max_parallel,
            timeout_s=self.tool_timeout_s,
            max_result_tokens=self.max_result_tokens,
        )

    async def _converse(
        self, messages: list[dict[str, Any]], policy: Any, box: Toolbox
    ) -> tuple[str, dict[str, float]]:
        """The text of the last turn, and how the conversation ended."""
        answer, turns, full = "", 0, False
        while turns < self.max_turns:
            try:
                turn = await policy.chat(messages, tools=box.schemas or None)
            except ContextFull:
                if not turns:
                    raise  # the task itself is too long
                full = True
                break
            turns, answer = turns + 1, turn.text
            if not turn.tool_calls or turns == self.max_turns:
                break
            messages += [turn.message, *await box.answer(turn.tool_calls)]
        limited = not full and bool(turn.tool_calls)
        return answer, {"turns": turns, "turn_limit": float(limited), "context_full": float(full)}


async def _called(function: Callable[..., Any], *args: Any) -> Any:
    """An async method is awaited, a plain one runs on a thread."""
    return await (function(*args) if inspect.iscoroutinefunction(function) else on_thread(function, *args))
