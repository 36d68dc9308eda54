"""Every call of the model is answered: by the tool, or by what was wrong with it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from scripted import CharTokenizer
from virtual_time import run_in_virtual_time

from streamrl.envs.chat.tool_calls import ToolCall
from streamrl.envs.clipping import clip
from streamrl.envs.guard import left_behind
from streamrl.envs.tools import Toolbox, ToolFatal
from streamrl.errors import ConfigError


class Clipper:
    """The part of a policy that a toolbox needs."""

    async def clip(self, text: str, tokens: int) -> str:
        return clip(text, tokens, CharTokenizer())


@dataclass
class Diary:
    entries: list[str] = field(default_factory=list)

    def write(self, entry: str) -> None:
        """Add an entry."""
        self.entries.append(entry)


def add(a: int, b: int = 1) -> int:
    return a + b


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall("call00000", name, arguments, f"{name}(…)")


def answers(
    tools: list[Callable[..., Any]], *calls: ToolCall, state: Any = None, **limits: Any
) -> tuple[list[str], Toolbox]:
    async def main() -> tuple[list[str], Toolbox]:
        async with Toolbox(tools, Clipper(), state, **limits) as box:
            return [message["content"] for message in await box.answer(calls)], box

    return asyncio.run(main())


def test_an_answer_is_a_tool_message_that_names_its_call() -> None:
    async def main() -> list[dict[str, Any]]:
        async with Toolbox([add], Clipper()) as box:
            return await box.answer([ToolCall("call00007", "add", {"a": 2, "b": 3}, "")])

    assert asyncio.run(main()) == [{"role": "tool", "tool_call_id": "call00007", "name": "add", "content": "5"}]


def test_a_toolbox_describes_its_tools_as_openai_does() -> None:
    schema = Toolbox([Diary().write], Clipper()).schemas
    parameters = {
        "type": "object",
        "properties": {"entry": {"type": "string"}},
        "required": ["entry"],
        "additionalProperties": False,
    }
    function = {"name": "write", "description": "Add an entry.", "parameters": parameters}
    assert schema == [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    ("value", "text"),
    [("as it is", "as it is"), (None, "ok"), (2.5, "2.5"), ([1, {"a": None}], '[1,{"a":null}]'), (1j, "1j")],
)
def test_what_a_tool_returns_reaches_the_model_as_text(value: object, text: str) -> None:
    def give() -> Any:
        return value

    assert answers([give], call("give"))[0] == [text]


def test_calls_of_one_turn_run_at_the_same_time_and_are_answered_in_order() -> None:
    async def main() -> list[dict[str, Any]]:
        met = asyncio.Barrier(2)

        async def meet(who: str) -> str:
            await met.wait()
            return who

        async with Toolbox([meet], Clipper()) as box:
            return await box.answer([call("meet", who="a"), call("meet", who="b")])

    assert [message["content"] for message in asyncio.run(main())] == ["a", "b"]


def test_a_plain_tool_runs_beside_the_event_loop_with_the_callers_context() -> None:
    def where() -> str:
        return str(threading.current_thread() is threading.main_thread())

    assert answers([where], call("where"))[0] == ["False"]


def test_a_tool_with_a_parameter_called_state_gets_that_of_the_episode() -> None:
    def write(entry: str, state: Diary) -> None:
        state.write(entry)

    diary = Diary()
    _, box = answers([write], call("write", entry="a"), call("write", entry="b"), state=diary)
    assert sorted(diary.entries) == ["a", "b"]
    assert "state" not in box.schemas[0]["function"]["parameters"]["properties"]


def raises() -> str:
    raise KeyError("lost")


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (call("ad"), "error: there is no tool 'ad'; did you mean 'add'?"),
        (call("add", a="two"), "error: add: Expected int, got str at argument 'a'"),
        (call("raises"), "error: KeyError: 'lost'"),
        (ToolCall("1", "add", None, "{", "the call is not JSON"), "error: the call is not JSON"),
    ],
)
def test_a_call_that_does_not_work_is_answered_by_what_is_wrong_and_counted(wrong: ToolCall, text: str) -> None:
    texts, box = answers([add, raises], call("add", a=1), wrong)
    assert texts == ["2", text]
    assert box.metrics == {"tool_calls": 2, "tool_errors": 1}


def test_only_the_first_calls_of_a_turn_are_carried_out() -> None:
    texts, box = answers([add], *[call("add", a=each) for each in range(3)], max_parallel=2)
    assert texts == ["1", "2", "error: only the first 2 calls of a turn are carried out"]
    assert box.metrics == {"tool_calls": 3, "tool_errors": 1}


def test_an_async_tool_that_takes_too_long_is_ended() -> None:
    ended = []

    async def wait() -> str:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(True)
        raise AssertionError

    async def main() -> list[dict[str, Any]]:
        async with Toolbox([wait], Clipper(), timeout_s=30) as box:
            return await box.answer([call("wait")])

    assert run_in_virtual_time(main())[0]["content"] == "error: wait took longer than 30 s"
    assert ended == [True]


def test_a_plain_tool_that_hangs_is_left_behind_until_it_ends() -> None:
    release = threading.Event()
    ended = threading.Event()

    def hang() -> str:
        release.wait(60)
        ended.set()
        return "too late"

    before = len(left_behind)
    assert answers([hang], call("hang"), timeout_s=0.05)[0] == ["error: hang took longer than 0.05 s"]
    assert len(left_behind) == before + 1
    release.set()
    assert ended.wait(60)
    while len(left_behind) > before:  # its thread is at its last lines
        time.sleep(0)


def test_a_tool_may_raise_timeouterror_itself() -> None:
    def slow() -> str:
        raise TimeoutError("the database did not answer")

    assert answers([slow], call("slow"))[0] == ["error: TimeoutError: the database did not answer"]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_tool_that_wants_to_end_the_process_is_an_error(is_async: bool) -> None:
    def parse() -> str:
        raise SystemExit(2)

    async def parse_async() -> str:
        raise SystemExit(2)

    name = "parse_async" if is_async else "parse"
    assert answers([parse, parse_async], call(name))[0] == ["error: SystemExit: 2"]


def test_a_tool_that_awaits_what_was_cancelled_is_an_error_of_its_own() -> None:
    async def wait() -> str:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future
        raise AssertionError

    assert answers([wait], call("wait"))[0] == ["error: wait awaited something that was cancelled"]


def test_a_fatal_error_ends_the_other_calls_and_is_raised_as_it_is() -> None:
    ended = []

    async def wait() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
        raise AssertionError

    async def broken() -> str:
        raise ToolFatal("the game server is gone")

    with pytest.raises(ToolFatal, match="^the game server is gone$"):
        answers([wait, broken], call("wait"), call("broken"))
    assert ended == [True]


def test_a_long_answer_loses_its_middle_and_fits_its_limit() -> None:
    def read() -> str:
        return "a" * 500 + "z" * 500

    text = answers([read], call("read"), max_result_tokens=64)[0][0]
    start, mark, end = text.partition(" ...[")
    count, _, rest = end.partition(" characters left out]... ")
    assert set(start) == {"a"} and set(rest) == {"z"} and mark
    assert int(count) == 1000 - len(start) - len(rest)
    # The tokenizer knows no brackets, so the mark has 35 characters and 33 tokens; the rest is for the two ends.
    assert len(CharTokenizer().encode(text, add_special_tokens=False)) == 64


def test_a_text_that_fits_is_not_clipped() -> None:
    assert clip("a" * 64, 64, CharTokenizer()) == "a" * 64


def test_a_limit_without_room_for_the_mark_is_refused() -> None:
    with pytest.raises(ValueError, match="clip: 8 tokens leave no room for the mark"):
        clip("a" * 100, 8, CharTokenizer())


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two are called 'add'"):
        Toolbox([add, add], Clipper())
