"""Whatever an agent does to its history, every sampled token is trained once, behind exactly what the policy read."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine, Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest
from chat_templates import CHATML, HEADERS, assistant, result, system, tokenizer, tool, user
from scripted import ScriptedEngine

from streamrl.envs.chat.alignment import REALIGN_TOKENS
from streamrl.envs.chat.capture import ChatTurn
from streamrl.envs.codec import Codec
from streamrl.envs.environment import Reward
from streamrl.envs.episode import ContextFull, Episode, Limits
from streamrl.envs.session import Session
from streamrl.types import Generation, SamplingParams, Trajectory

Messages = list[dict[str, Any]]
Script = Callable[[Session], Coroutine[Any, Any, None]]
ADD = tool("add", "a", "b")
END = "<|im_end|>"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'


class Replies(ScriptedEngine):
    """Says ``texts`` in order, one token per byte where ``split``; each token has a log-prob of its own."""

    def __init__(self, *texts: str, template: str = CHATML, split: bool = False) -> None:
        self.reader = tokenizer(template)
        self.left = list(texts)
        self.said: list[tuple[list[int], list[int], list[float]]] = []
        self._split = split
        self._numbers = count(1)
        super().__init__(self._reply)

    def _reply(self, prompt: list[int], params: SamplingParams) -> Generation:
        text = self.left.pop(0)
        ids = self._ids(text)[: params.max_tokens]
        logprobs = [-next(self._numbers) / 1024 for _ in ids]
        self.said.append((prompt, ids, logprobs))
        ended = ids[-1] in params.stop_token_ids or any(stop in text for stop in params.stop_strings)
        reason = "stop" if ended else "length"
        return Generation(np.array(ids, np.int32), np.array(logprobs, np.float32), [(0, len(ids))], reason)

    def _ids(self, text: str) -> list[int]:
        if not self._split:
            return self.reader.encode(text, add_special_tokens=False)
        body, end, _ = text.partition(END)
        pieces = [self.reader.encode(each, add_special_tokens=False) for each in [*body, *([end] if end else [])]]
        return [each for piece in pieces for each in piece]


class Played:
    """An episode that was played, and what came of it."""

    def __init__(self, engine: Replies, script: Script, max_length: int = 4096) -> None:
        limits = Limits(temperature=1.0, top_k=0, top_p=1.0, max_tokens=256, max_length=max_length)
        self.engine = engine
        self.episode = Episode(engine, Codec(engine.reader), limits, (0, 0, 0, 0))  # type: ignore[arg-type]
        self.session = Session(self.episode)
        asyncio.run(script(self.session))
        self.trajectories = self.episode.trajectories(Reward(1.0), 0)

    @property
    def counts(self) -> dict[str, int]:
        return dict(self.episode.matched)

    def texts(self) -> list[str]:
        """What each trajectory reads, sampled parts in brackets."""
        return [self._marked(each) for each in self.trajectories]

    def _marked(self, trajectory: Trajectory) -> str:
        text, inside = "", False
        ids: list[int] = []
        for token, sampled in [
            *zip(trajectory.tokens.tolist(), trajectory.sampled.tolist(), strict=True),
            (None, False),
        ]:
            if sampled != inside or token is None:
                text += self.engine.reader.decode(ids) + ("[" if sampled else "]" if inside else "")
                ids, inside = [], sampled
            ids.append(token)
        return text

    def check(self, dropped: int = 0) -> None:
        """Every sampled token stands behind the prompt that it was sampled from, with its log-prob, in one trajectory.

        ``dropped``: tokens that the engine sampled and no trajectory trains.
        """
        requests = list(self.engine.said)
        trained = 0
        for trajectory in self.trajectories:
            tokens = trajectory.tokens.tolist()
            edges = np.flatnonzero(np.diff([0, *trajectory.sampled.astype(int), 0]))
            assert len(edges) == 2 * trajectory.turns
            for start, end in edges.reshape(-1, 2).tolist():
                said = tokens[start:end]
                behaviour = np.float32(trajectory.behaviour[start:end]).tolist()
                (found,) = [
                    (prompt, ids, logprobs)
                    for prompt, ids, logprobs in requests
                    if prompt == tokens[:start] and ids[: end - start] == said and logprobs[: end - start] == behaviour
                ]
                requests.remove(found)
                trained += end - start
            assert not trajectory.behaviour[~trajectory.sampled].any()
        assert requests == []
        assert trained == sum(len(ids) for _, ids, _ in self.engine.said) - dropped


async def answers(policy: Session, *histories: Messages, tools: Sequence[Any] | None = None) -> list[ChatTurn]:
    return [await policy.chat(history, list(tools or [])) for history in histories]


def talk(*questions: str) -> Script:
    async def script(policy: Session) -> None:
        history: Messages = []
        for question in questions:
            history.append(user(question))
            history.append((await policy.chat(history)).message)

    return script


def test_a_history_that_grows_is_one_trajectory() -> None:
    played = Played(Replies("hello" + END, "world" + END), talk("a", "b"))
    assert played.texts() == [
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[hello<|im_end|>]\n"
        "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n[world<|im_end|>]"
    ]
    assert played.counts == {"start": 1, "extend": 1}
    played.check()


def test_tokens_that_the_tokenizer_would_not_choose_stay_as_sampled() -> None:
    engine = Replies("the answer" + END, "is" + END, split=True)
    assert engine._ids("the answer") != engine.reader.encode("the answer")
    played = Played(engine, talk("a", "b"))
    assert len(played.trajectories) == 1
    played.check()


def test_a_turn_without_its_end_token_is_closed_by_the_template() -> None:
    played = Played(Replies("hel", "world" + END), talk("a", "b"))
    assert "assistant\n[hel]<|im_end|>\n<|im_start|>user\nb" in played.texts()[0]
    played.check()


def edited(edit: Callable[[Messages], Messages], tools: list[Any] | None = None) -> Script:
    """Two questions, ``edit`` of the history, and a third one."""

    async def script(policy: Session) -> None:
        history: Messages = [system("S"), user("a")]
        for question in ("b", "c"):
            history += [(await policy.chat(history)).message, user(question)]
        await policy.chat(edit(history), tools)

    return script


def without_thinking(messages: Messages) -> Messages:
    return [{key: value for key, value in each.items() if key != "reasoning_content"} for each in messages]


HEAD = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
TO_B, TO_C = (f"\n<|im_start|>user\n{each}<|im_end|>\n<|im_start|>assistant\n" for each in "bc")


@pytest.mark.parametrize(
    ("replies", "edit", "kinds", "last", "dropped"),
    [
        pytest.param(
            ("one", "two", "three"),
            lambda m: m,
            {"start": 1, "extend": 2},
            [HEAD + "[one<|im_end|>]" + TO_B + "[two<|im_end|>]" + TO_C + "[three<|im_end|>]"],
            0,
            id="clean append",
        ),
        pytest.param(
            ("one", "two \n ", "three"),
            lambda m: [*m[:4], assistant("two"), m[5]],
            {"start": 1, "extend": 1, "realign": 1},
            [
                HEAD + "[one<|im_end|>]" + TO_B + "[two]<|im_end|>" + TO_C + "[three<|im_end|>]",
            ],
            3 + 1,
            id="trailing white space stripped",
        ),
        pytest.param(
            ("one", "two", "three"),
            lambda m: [*m[:4], assistant("two  "), m[5]],
            {"start": 1, "extend": 1, "realign": 1},
            [
                HEAD + "[one<|im_end|>]" + TO_B + "[two]  <|im_end|>" + TO_C
                + "[three<|im_end|>]",
            ],
            1,
            id="trailing white space added",
        ),
        pytest.param(
            ("one", '{"x":1}', "three"),
            lambda m: [*m[:4], assistant('{"x": 1}'), m[5]],
            {"start": 1, "extend": 1, "realign": 1},
            [
                HEAD + "[one<|im_end|>]" + TO_B + '[{"x":] 1}<|im_end|>' + TO_C
                + "[three<|im_end|>]",
            ],
            2 + 1,
            id="JSON written again",
        ),
        pytest.param(
            ("one", "two " + "!" * (REALIGN_TOKENS + 1), "three"),
            lambda m: [*m[:4], assistant("two"), m[5]],
            {"start": 1, "extend": 1, "fork": 1},
            [
                HEAD + "[one<|im_end|>]" + TO_B + "[two " + "!" * (REALIGN_TOKENS + 1) + "<|im_end|>]",
                HEAD + "one<|im_end|>" + TO_B + "two<|im_end|>" + TO_C + "[three<|im_end|>]",
            ],
            0,
            id="more than drift",
        ),
        pytest.param(
            ("one", "<think>\nhm\n</think>\n\ntwo", "three"),
            without_thinking,
            {"start": 1, "extend": 1, "fork": 1},
            [
                HEAD + "[one<|im_end|>]" + TO_B + "[<think>\nhm\n</think>\n\ntwo<|im_end|>]",
                HEAD + "one<|im_end|>" + TO_B + "two<|im_end|>" + TO_C + "[three<|im_end|>]",
            ],
            0,
            id="thinking stripped",
        ),
        pytest.param(
            ("one", "<think>\nhm\n</think>\n\ntwo", "three"),
            lambda m: m,
            {"start": 1, "extend": 2},
            [
                HEAD + "[one<|im_end|>]" + TO_B + "[<think>\nhm\n</think>\n\ntwo<|im_end|>]"
                + TO_C + "[three<|im_end|>]",
            ],
            0,
            id="thinking kept",
        ),
        pytest.param(
            ("one", "two", "three"),
            lambda m: [*m[:3], result("r"), *m[3:]],
            {"start": 1, "extend": 1, "fork": 1},
            [
                HEAD + "[one<|im_end|>]" + TO_B + "[two<|im_end|>]",
                HEAD + "one<|im_end|>\n<|im_start|>user\n<tool_response>\nr\n</tool_response><|im_end|>"
                + TO_B + "two<|im_end|>" + TO_C + "[three<|im_end|>]",
            ],
            0,
            id="tool message inserted",
        ),
        pytest.param(
            ("one", "two", "three"),
            lambda m: [m[0], user("summary"), m[5]],
            {"start": 1, "extend": 1, "fork": 1},
            [
                HEAD + "[one<|im_end|>]" + TO_B + "[two<|im_end|>]",
                HEAD.replace("\na<", "\nsummary<").removesuffix("<|im_start|>assistant\n").rstrip("\n")
                + TO_C + "[three<|im_end|>]",
            ],
            0,
            id="history summarised",
        ),
        pytest.param(
            ("one", "two", "three"),
            lambda m: [system("T"), *m[1:]],
            {"start": 1, "extend": 1, "fork": 1},
            [
                HEAD + "[one<|im_end|>]" + TO_B + "[two<|im_end|>]",
                HEAD.replace("\nS<", "\nT<") + "one<|im_end|>" + TO_B + "two<|im_end|>" + TO_C
                + "[three<|im_end|>]",
            ],
            0,
            id="system prompt changed",
        ),
        pytest.param(
            ("one", "two", "three"),
            lambda m: m[:4],
            {"start": 1, "extend": 1, "fork": 1},
            [
                HEAD + "[one<|im_end|>]" + TO_B + "[two<|im_end|>]",
                HEAD + "one<|im_end|>" + TO_B + "[three<|im_end|>]",
            ],
            0,
            id="the last answer sampled again",
        ),
        pytest.param(
            ("one", "", "three"),
            lambda m: m,
            {"start": 1, "extend": 2},
            [HEAD + "[one<|im_end|>]" + TO_B + "[<|im_end|>]" + TO_C + "[three<|im_end|>]"],
            0,
            id="empty answer",
        ),
        pytest.param(
            ("one", "two", "three"),
            lambda m: [*m[:4], assistant(""), m[5]],
            {"start": 1, "extend": 1, "fork": 1},
            [
                HEAD + "[one<|im_end|>]" + TO_B + "[two<|im_end|>]",
                HEAD + "one<|im_end|>" + TO_B + "<|im_end|>" + TO_C + "[three<|im_end|>]",
            ],
            0,
            id="an answer emptied",
        ),
        pytest.param(
            ("one ", "two", "three"),
            lambda m: [*m[:2], assistant("one"), *m[3:]],
            {"start": 1, "extend": 1, "fork": 1},
            [
                HEAD + "[one <|im_end|>]" + TO_B + "[two<|im_end|>]",
                HEAD + "one<|im_end|>" + TO_B + "two<|im_end|>" + TO_C + "[three<|im_end|>]",
            ],
            0,
            id="drift in an answer that others follow",
        ),
        pytest.param(
            ("one", "two", "three"),
            lambda m: m[:5],
            {"start": 1, "extend": 2},
            [HEAD + "[one<|im_end|>]" + TO_B + "[two<|im_end|>]\n<|im_start|>assistant\n[three<|im_end|>]"],
            0,
            id="nothing new",
        ),
    ],
)  # fmt: skip
def test_a_history_that_comes_back_changed(
    replies: tuple[str, ...],
    edit: Callable[[Messages], Messages],
    kinds: dict[str, int],
    last: list[str],
    dropped: int,
) -> None:
    played = Played(Replies(*(each + END for each in replies), split=True), edited(edit))
    assert played.texts() == last
    assert played.counts == kinds
    assert len(played.trajectories) == kinds["start"] + kinds.get("fork", 0)
    played.check(dropped)


def test_other_tools_fork_from_the_start() -> None:
    played = Played(Replies("one" + END, "two" + END, "three" + END), edited(lambda m: m, [ADD]))
    assert played.counts == {"start": 1, "extend": 1, "fork": 1}
    assert played.trajectories[1].turns == 1
    played.check()


def test_a_tool_loop_is_one_trajectory_and_results_are_not_trained() -> None:
    async def script(policy: Session) -> None:
        history: Messages = [user("3+4?")]
        turn = await policy.chat(history, [ADD])
        assert (turn.finish_reason, turn.text) == ("tool_calls", "")
        assert [(call.id, call.name, call.arguments) for call in turn.tool_calls] == [
            ("call00000", "add", {"a": 3, "b": 4})
        ]
        call = turn.message["tool_calls"][0]
        again = call | {"id": "other", "function": {"name": "add", "arguments": '{"b":4,"a":3}'}}
        history += [turn.message | {"content": "", "tool_calls": [again]}, result("7")]
        final = await policy.chat(history, [ADD])
        assert (final.text, final.message) == ("It is 7.", {"role": "assistant", "content": "It is 7."})

    played = Played(Replies(CALL + END, "It is 7." + END), script)
    assert played.counts == {"start": 1, "extend": 1}
    assert played.texts()[0].endswith(
        f"assistant\n[{CALL}<|im_end|>]\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n[It is 7.<|im_end|>]"
    )
    played.check()


def test_a_call_that_cannot_be_read_is_given_to_the_agent_and_back() -> None:
    async def script(policy: Session) -> None:
        first = await policy.chat([user("3+4?")], [ADD])
        (call,) = first.tool_calls
        assert (call.name, call.arguments, call.raw) == ("add", None, '{"name": "add", oops')
        history = [user("3+4?"), first.message, result(call.error)]
        assert (await policy.chat(history, [ADD])).text == "Sorry"

    played = Played(Replies('<tool_call>{"name": "add", oops</tool_call>' + END, "Sorry" + END), script)
    assert played.counts == {"start": 1, "extend": 1}
    played.check()


def test_a_template_of_one_call_per_answer_goes_on_after_two() -> None:
    async def script(policy: Session) -> None:
        text = '{"name": "add", "parameters": {"a": 1, "b": 2}}'
        first = await policy.chat([user("?")], [ADD])
        assert [call.name for call in first.tool_calls] == ["add", "add"]
        await policy.chat([user("?"), first.message, result(text), result("4", "call00001")], [ADD])

    one = '{"name": "add", "parameters": {"a": 1, "b": 2}}'
    played = Played(Replies(f"{one};{one}<|eot|>", "7<|eot|>", template=HEADERS), script)
    assert played.counts == {"start": 1, "extend": 1}
    played.check()


def test_the_same_request_at_the_same_time_makes_one_trajectory_each_behind_the_same_prompt() -> None:
    async def script(policy: Session) -> None:
        first = (await policy.chat([user("a")])).message
        history = [user("a"), first, user("b")]
        await asyncio.gather(*(policy.chat(history) for _ in range(3)))

    played = Played(Replies("one" + END, "two" + END, "two" + END, "four" + END), script)
    assert played.counts == {"start": 1, "extend": 1, "fork": 2}
    assert [each.turns for each in played.trajectories] == [2, 1, 1]
    assert len({tuple(prompt) for prompt, _, _ in played.engine.said[1:]}) == 1
    assert len({params.seed for _, params in played.engine.requests}) == 4
    played.check()


def test_first_requests_at_the_same_time_are_trajectories_of_their_own() -> None:
    async def script(policy: Session) -> None:
        await asyncio.gather(*(policy.chat([user("a")]) for _ in range(3)))

    played = Played(Replies("one" + END, "two" + END, "three" + END), script)
    assert played.counts == {"start": 1, "fork": 2}
    assert len(played.trajectories) == 3
    played.check()


def test_two_conversations_in_turn_grow_side_by_side() -> None:
    async def script(policy: Session) -> None:
        histories = [[user("a")], [system("S"), user("a")]]
        for question in "bcd":
            for history in histories:
                history.append((await policy.chat(history)).message)
                history.append(user(question))

    played = Played(Replies(*(f"{number}{END}" for number in range(6))), script)
    assert played.counts == {"start": 1, "fork": 1, "extend": 4}
    assert [each.turns for each in played.trajectories] == [3, 3]
    played.check()


def test_equal_answers_in_two_trajectories_each_go_on_in_their_own() -> None:
    async def script(policy: Session) -> None:
        same = await asyncio.gather(policy.chat([user("a")]), policy.chat([user("a")]))
        histories = [[user("a"), each.message, user("b")] for each in same]
        await asyncio.gather(*(policy.chat(history) for history in histories))

    played = Played(Replies("one" + END, "one" + END, "x" + END, "y" + END), script)
    assert played.counts == {"start": 1, "fork": 1, "extend": 2}
    assert [each.turns for each in played.trajectories] == [2, 2]
    played.check()


def test_a_realigned_answer_can_be_forked_as_the_client_wrote_it() -> None:
    async def script(policy: Session) -> None:
        await policy.chat([user("a")])
        history = [user("a"), assistant("one +"), user("b")]
        await policy.chat(history)
        await policy.chat([*history[:2], user("c")])
        await policy.chat([user("a"), assistant("one  +"), user("c")])

    played = Played(Replies(*(each + END for each in ("one  +", "two", "three", "four")), split=True), script)
    assert played.counts == {"start": 1, "realign": 1, "fork": 2}
    head = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert played.texts() == [
        head + "[one ]+<|im_end|>" + TO_B + "[two<|im_end|>]",
        head + "one +<|im_end|>" + TO_C + "[three<|im_end|>]",
        head + "one  +<|im_end|>" + TO_C + "[four<|im_end|>]",
    ]
    played.check(dropped=3)


def test_a_request_that_fails_changes_nothing() -> None:
    async def script(policy: Session) -> None:
        first = (await policy.chat([user("a")])).message
        with pytest.raises(ContextFull):
            await policy.chat([user("a"), first | {"content": "one"}, user("b" * 500)])
        await policy.chat([user("a"), first, user("b")])

    played = Played(Replies("one \n" + END, "two" + END, split=True), script, max_length=300)
    assert played.counts == {"start": 1, "extend": 1}
    assert played.texts()[0].count("[one \n<|im_end|>]") == 1
    played.check()


def test_requests_that_fail_leave_no_transcripts_behind() -> None:
    async def script(policy: Session) -> None:
        await policy.chat([user("a")])
        for place in range(3):
            with pytest.raises(ContextFull):
                await policy.chat([user("b" * 500), user(str(place))])
        assert [len(each.transcripts) for each in policy.episode.branches] == [1]

    Played(Replies("one" + END), script, max_length=300).check()


def test_a_content_that_stood_round_a_call_is_not_realigned() -> None:
    """Nothing that was sampled reads ``one  two``: there is no place up to which it is the same."""

    async def script(policy: Session) -> None:
        first = (await policy.chat([user("a")], [ADD])).message
        assert first["content"] == "one  two"
        await policy.chat([user("a"), first | {"content": "one two"}, result("7")], [ADD])

    call = '<tool_call>{"name":"add"}</tool_call>'
    played = Played(Replies(f"one {call} two" + END, "seven" + END), script)
    assert played.counts == {"start": 1, "fork": 1}
    assert played.texts()[1].count("</tool_call>") == played.texts()[0].count("</tool_call>")
    played.check()


def test_a_stop_string_is_cut_from_the_text_and_stays_in_the_transcript() -> None:
    async def script(policy: Session) -> None:
        first = await policy.chat([user("a")], stop="Obs:")
        assert (first.text, first.finish_reason) == ("So ", "stop")
        await policy.chat([user("a"), first.message, user("b")])

    played = Played(Replies("So Obs:", "two" + END), script)
    assert played.engine.requests[0][1].stop_strings == ("Obs:",)
    assert "[So Obs:]<|im_end|>" in played.texts()[0]
    assert played.counts == {"start": 1, "extend": 1}
    played.check()


def test_the_token_that_closes_an_answer_ends_a_turn_where_the_tokenizer_has_another_end_token() -> None:
    engine = Replies("one" + END)
    engine.reader = copy.deepcopy(engine.reader)
    engine.reader.eos_token = "<|end|>"
    played = Played(engine, talk("a"))
    ends = [engine.reader.convert_tokens_to_ids(each) for each in (END, "<|end|>")]
    assert engine.requests[0][1].stop_token_ids == tuple(ends)
    assert engine.requests[0][1].stop_strings == ()
    assert not played.trajectories[0].truncated


def test_a_branch_goes_on_from_its_parents_histories_in_trajectories_of_its_own() -> None:
    async def script(policy: Session) -> None:
        first = (await policy.chat([user("a")])).message
        branch = policy.branch()
        history = [user("a"), first, user("b")]
        await asyncio.gather(branch.chat(history), policy.chat(history))
        branch.finish(0.25)

    played = Played(Replies("one" + END, "two" + END, "three" + END), script)
    assert [each.turns for each in played.trajectories] == [2, 1]
    assert [each.reward for each in played.trajectories] == [1.0, 0.25]
    played.check()


def test_chat_and_complete_go_on_after_each_other() -> None:
    async def script(policy: Session) -> None:
        first = (await policy.chat([user("a")])).message
        await policy.complete(" more")
        await policy.chat([user("a"), first, user("b")])

    played = Played(Replies("one" + END, "two" + END, "three" + END), script)
    assert played.counts == {"start": 1, "fork": 1}
    assert [each.turns for each in played.trajectories] == [2, 1]
    played.check()


def test_what_a_turn_returns_is_what_was_sampled() -> None:
    turns: list[ChatTurn] = []
    engine = Replies("<think>\nhm\n</think>\n\nseven" + END)
    some = len(engine._ids("<think>\nhm\n"))

    async def script(policy: Session) -> None:
        turns.append(await policy.chat([user("a")], max_tokens=some))

    played = Played(engine, script)
    (turn,), ((prompt, ids, logprobs),) = turns, played.engine.said
    assert (turn.finish_reason, turn.text, turn.reasoning) == ("length", "", "hm")
    assert turn.message == {"role": "assistant", "content": "", "reasoning_content": "hm"}
    assert (turn.prompt_token_ids, turn.token_ids) == (tuple(prompt), tuple(ids))
    assert turn.logprobs == tuple(logprobs)
    assert len(ids) == some
