"""A process attached over loopback plays leases as the rollouter would, token for token; its end returns them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientSession, WSMsgType, WSServerHandshakeError
from attach_support import Server, Stage, on_stage, until
from scripted import ScriptedEngine, generation, ids, lease, says, settings

from streamrl.envs.attach.agent import MOST_FAILED, AgentGone
from streamrl.envs.attach.client import ConnectionLost
from streamrl.envs.attach.protocol import Cancel, Refused
from streamrl.envs.split import Split
from streamrl.errors import ConfigError, EnvironmentFailed
from streamrl.policy.tokenizer import character_tokenizer
from streamrl.schema import Config
from streamrl.types import Generation, Group, SamplingParams

EPISODES = """
import asyncio
import numpy as np
from streamrl.envs import Reward, Task

class Sums:
    def task(self, index):
        return Task(prompt=f"{index % 50}+1=", answer=str(index % 50 + 1), metadata={"level": index % 3})

    async def episode(self, task, policy):
        completion = await policy.complete(task.prompt, max_tokens=5)
        return Reward(float(completion.text == task.answer), {"level": task.metadata["level"]},
                      columns={"ids": np.array(completion.token_ids, np.int32)}, metadata={"text": completion.text})

async def several_lines(task, policy):
    first = await policy.complete("1=")
    policy.reward(0.25)
    left, right = policy.branch(), policy.branch()
    await asyncio.gather(left.complete("<"), right.complete(">"))
    left.finish(3.0)
    await policy.complete("|", stop="|")
    right.reward(-0.5)
    return 1.0

async def chats(task, policy):
    history = [{"role": "user", "content": "3+4?"}]
    tools = [{"type": "function", "function": {"name": "add", "description": "a", "parameters": {"type": "object"}}}]
    for _ in range(2):
        turn = await policy.chat(history, tools, max_tokens=8)
        history += [turn.message, {"role": "user", "content": await policy.clip("and then? " * 9, 60)}]
    await policy.chat(history[-1:], stop=["12"])
    return Reward(1.0, metadata={"said": turn.text, "ids": list(turn.token_ids), "ended": turn.finish_reason})

def waits_for_no_loop(task, policy):
    policy.complete("1=")
    policy.reward(0.5)
    return len(policy.branch().complete("2=").token_ids)

async def raises_on_two(task, policy):
    if (await policy.complete("1=")).text == "2":
        broken = {}
        return broken["line 35"]
    return 1.0

async def talks_on(task, policy):
    while True:
        await policy.complete("1=")

async def wrong_arguments(task, policy):
    try:
        await policy.complete("1=", max_tokens=0)
    except ValueError as error:
        await policy.complete("2=")
        return Reward(1.0, metadata={"error": str(error)})

asked = asyncio.Event()

async def gives_up_a_call(task, policy):
    call = asyncio.ensure_future(policy.complete("1="))
    await asked.wait()
    call.cancel()
    await asyncio.wait([call])
    await policy.complete("2=")
    return 1.0

async def gives_up_at_once(task, policy):
    for _ in range(3):
        call = asyncio.ensure_future(policy.complete("1="))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
    await policy.complete("2=")
    return 1.0

async def says_what_json_cannot(task, policy):
    await policy.complete("1=")
    raise RuntimeError("\\udcff is no character")

async def returns_too_much(task, policy):
    await policy.complete("1=")
    return Reward(1.0, columns={"large": np.zeros(1 << 24, np.uint8)})

async def samples_by_http(task, policy):
    from aiohttp import ClientSession
    async with ClientSession(headers={"x-api-key": policy.api_key}) as http:
        async with http.post(policy.base_url + "/completions", json={"model": "policy", "prompt": "1="}) as answer:
            assert answer.status == 200, await answer.text()
    policy.reward(0.25)
    return 1.0

async def raises_always(task, policy):
    await policy.complete("1=")
    return 1 / 0

class Misnamed(Sums):
    def env_of(self, task):
        return "not a name"

class PlayedRaises(Sums):
    def played(self, task, rewards):
        raise KeyError("history")

released = []

async def cleans_up(task, policy):
    try:
        await policy.complete("1=")
    finally:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        released.append(task.index)

async def never_returns(task, policy):
    await policy.complete("1=")
    await asyncio.Event().wait()

async def keys(task, policy):
    await policy.complete("1=")
    return Reward(1.0, metadata={"url": policy.base_url, "key": policy.api_key})
"""


@pytest.fixture(autouse=True)
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "attached_episodes.py").write_text(EPISODES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "attached_episodes", raising=False)


def config_of(name: str, **changes: Any) -> Config:
    config = settings(f"attached_episodes:{name}")
    config.model.max_length = changes.get("max_length", 64)
    config.env.timeout_s = changes.get("timeout_s", 10.0)
    return config


def by_seed() -> ScriptedEngine:
    """An engine whose answer is a function of the request alone, whenever it is asked."""

    def answer(prompt: list[int], params: SamplingParams) -> Generation:
        draw = np.random.default_rng([params.seed, *prompt])
        count = int(draw.integers(1, min(params.max_tokens, 4) + 1))
        return generation([*draw.integers(0, 10, count).tolist(), ids("$")[0]][: params.max_tokens])

    return ScriptedEngine(answer)


def assert_same(one: Group | None, other: Group | None) -> None:
    assert one is not None and other is not None
    assert (one.env, one.prompt, len(one.trajectories)) == (other.env, other.prompt, len(other.trajectories))
    for mine, theirs in zip(one.trajectories, other.trajectories, strict=True):
        for name in ("tokens", "sampled", "behaviour"):
            assert np.array_equal(getattr(mine, name), getattr(theirs, name))
        for name in ("versions", "reward", "turns", "truncated", "metrics", "metadata", "episode", "turn_rewards"):
            assert getattr(mine, name) == getattr(theirs, name)
        assert mine.columns.keys() == theirs.columns.keys()
        for name, column in mine.columns.items():
            assert column.dtype == theirs.columns[name].dtype and np.array_equal(column, theirs.columns[name])


@pytest.mark.parametrize("name", ["Sums", "several_lines", "waits_for_no_loop", "talks_on"])
def test_an_attached_process_gives_the_trajectories_that_the_rollouter_itself_gives(tmp_path: Path, name: str) -> None:
    async def scene(stage: Stage) -> None:
        stage.attach(f"attached_episodes:{name}")
        attached = await stage.server.play(size=3, prompt=11)
        own = await stage.server.native.run_group(lease(3, 11))
        assert attached.failures == own.failures == []
        assert_same(attached.group, own.group)

    on_stage(tmp_path, config_of(name), by_seed, scene)


def test_an_attached_chat_gives_the_trajectories_that_a_chat_in_the_rollouter_gives(tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    words = [tokenizer.encode(text, add_special_tokens=False) for text in ("7", "12 or so", "a b")]

    def answer(prompt: list[int], params: SamplingParams) -> Generation:
        token_ids = [*words[params.seed % 3], tokenizer.eos_token_id][: params.max_tokens]
        return replace(generation(token_ids), finish_reason="stop")

    async def scene(stage: Stage) -> None:
        stage.attach("attached_episodes:chats")
        attached = await stage.server.play(size=3, prompt=11)
        own = await stage.server.native.run_group(lease(3, 11))
        assert attached.failures == own.failures == []
        assert_same(attached.group, own.group)
        assert own.group is not None and len(own.group.trajectories) > 3

    config = config_of("chats", max_length=512)
    on_stage(tmp_path, config, lambda: ScriptedEngine(answer), scene, tokenizer)


def test_the_tasks_of_the_run_come_with_their_leases(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        stage.attach("attached_episodes:Sums")
        result = await stage.server.play(prompt=5)
        task = stage.server.native.split.train(5)
        assert result.group is not None
        assert result.group.env == "sums"
        begin = ids(task.prompt)
        assert [each.tokens[: len(begin)].tolist() for each in result.group.trajectories] == [begin] * 2
        assert [each.metrics["level"] for each in result.group.trajectories] == [task.metadata["level"]] * 2

    on_stage(tmp_path, config_of("Sums"), lambda: says("7$"), scene)


def test_a_process_with_its_own_tasks_keeps_those_of_its_held_out_prompts_from_training(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        process = stage.attach("attached_episodes:Sums", workers=8, own_tasks=True)
        results = await asyncio.gather(*(stage.server.play(prompt=prompt) for prompt in range(200)))
        groups = [result.group for result in results]
        played = {each.tokens[:4].tobytes() for group in groups if group for each in group.trajectories}
        split = Split(process.attachment._played.environment, stage.server.config.seed)
        held_out = {np.array(ids(f"{number}+1=")[:4], np.int32).tobytes() for number in range(50)
                    if split.is_held_out(split.environment.task(number))}  # fmt: skip
        assert held_out and len(played) > 20
        assert played & held_out == set()
        assert {group.env for group in groups if group} == {"sums"}

    on_stage(tmp_path, config_of("several_lines"), lambda: says("7$"), scene)


def test_a_failed_episode_fails_alone_and_names_the_line_of_the_attached_code(tmp_path: Path) -> None:
    line = 1 + EPISODES.splitlines().index('        return broken["line 35"]')

    async def scene(stage: Stage) -> None:
        process = stage.attach("attached_episodes:raises_on_two")
        result = await stage.server.play(size=3)
        assert [failure.reason for failure in result.failures] == [f"KeyError: 'line 35' (attached_episodes.py:{line})"]
        assert 'broken["line 35"]' in result.failures[0].traceback
        assert result.group is not None and len(result.group.trajectories) == 2
        await until(lambda: bool(process.closed))
        (closed,) = process.closed
        assert (closed.rewards, closed.failures) == ([1.0, 1.0], [result.failures[0].reason])

    on_stage(tmp_path, config_of("raises_on_two"), lambda: says("1$", "2$", "3$"), scene)


def test_a_process_whose_groups_fail_five_times_in_a_row_is_sent_away_with_the_reason(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        process = stage.attach("attached_episodes:raises_always")
        for _ in range(MOST_FAILED):
            assert (await stage.server.play()).group is None
        bye = await process.task
        assert bye.kind == "refused"
        assert bye.reason.startswith("5 groups in a row failed; last: ZeroDivisionError: division by zero (attached")
        assert stage.server.desk.free == 0

    on_stage(tmp_path, config_of("raises_always"), lambda: says("1$"), scene)


def test_an_episode_whose_process_hangs_times_out_and_frees_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamrl.envs.attach.client._ahead", lambda timeout_s: timeout_s - 1.0)

    async def scene(stage: Stage) -> None:
        stage.attach("attached_episodes:never_returns")
        result = await stage.server.play()
        assert result.group is None
        line = 1 + EPISODES.splitlines().index("    await asyncio.Event().wait()")
        assert result.failures[0].reason == f"timed out after env.timeout_s=60 (attached_episodes.py:{line})"
        assert stage.server.desk.free == 1

    on_stage(tmp_path, config_of("never_returns", timeout_s=60), lambda: says("1$"), scene)


def test_what_a_session_refuses_is_raised_in_the_process(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        stage.attach("attached_episodes:wrong_arguments")
        result = await stage.server.play()
        assert result.group is not None
        errors = {each.metadata["error"] for each in result.group.trajectories}
        assert errors == {"policy: max_tokens=0 must be a whole number of at least 1"}

    on_stage(tmp_path, config_of("wrong_arguments"), lambda: says("1$"), scene)


def test_a_call_that_is_cancelled_in_the_process_ends_its_sampling(tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda *_: generation(ids("1$")))
    engine.hold = asyncio.Event()

    async def scene(stage: Stage) -> None:
        stage.attach("attached_episodes:gives_up_a_call")
        playing = asyncio.create_task(stage.server.play(size=2))
        await until(lambda: len(engine.requests) == 2)
        __import__("attached_episodes").asked.set()
        await until(lambda: engine.cancelled == 2)
        engine.hold.set()
        result = await playing
        assert result.group is not None
        assert [each.tokens.tolist() for each in result.group.trajectories] == [ids("2=1$")] * 2

    on_stage(tmp_path, config_of("gives_up_a_call"), lambda: engine, scene)


def test_calls_that_are_cancelled_before_they_begin_are_forgotten(tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda *_: generation(ids("1$")))

    async def scene(stage: Stage) -> None:
        stage.attach("attached_episodes:gives_up_at_once")
        agent = await stage.server.agent()
        result = await agent.run_group(lease(2))
        assert result.group is not None
        assert [each.tokens.tolist() for each in result.group.trajectories] == [ids("2=1$")] * 2
        await until(lambda: not agent._calls)

    on_stage(tmp_path, config_of("gives_up_at_once"), lambda: engine, scene)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("says_what_json_cannot", "what became of the episode cannot be sent: message failed: "),
        (
            "returns_too_much",
            "what became of the episode cannot be sent: message done: expected at most 16777216 bytes",
        ),
    ],
)
def test_an_episode_whose_end_cannot_be_sent_fails_and_says_why(tmp_path: Path, name: str, reason: str) -> None:
    async def scene(stage: Stage) -> None:
        process = stage.attach(f"attached_episodes:{name}")
        result = await stage.server.play(size=1)
        assert [failure.reason[: len(reason)] for failure in result.failures] == [reason]
        assert not process.task.done()

    on_stage(tmp_path, config_of(name, timeout_s=60), lambda: says("1$"), scene)


def test_a_name_that_cannot_stand_in_metrics_fails_the_episode_and_not_the_process(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        process = stage.attach("attached_episodes:Misnamed", own_tasks=True)
        result = await stage.server.play(size=1)
        assert "misnamed: env_of: name 'not a name' must be letters" in result.failures[0].reason
        assert not process.task.done()

    on_stage(tmp_path, config_of("Sums"), lambda: says("1$"), scene)


def test_a_hook_that_raises_ends_the_process_with_its_line(tmp_path: Path) -> None:
    line = 1 + EPISODES.splitlines().index('        raise KeyError("history")')

    async def scene(stage: Stage) -> None:
        process = stage.attach("attached_episodes:PlayedRaises", own_tasks=True)
        assert (await stage.server.play()).group is not None
        expected = rf"playedraises: played raised KeyError: 'history' \(attached_episodes.py:{line}\)"
        with pytest.raises(EnvironmentFailed, match=expected):
            await process.task

    on_stage(tmp_path, config_of("Sums"), lambda: says("1$"), scene)


def test_a_turn_that_a_client_sampled_by_http_can_be_rewarded(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        stage.attach("attached_episodes:samples_by_http")
        result = await stage.server.play(size=2)
        assert result.failures == [] and result.group is not None
        assert [each.reward for each in result.group.trajectories] == [1.25, 1.25]

    on_stage(tmp_path, config_of("samples_by_http"), lambda: says("1$"), scene)


def test_an_episode_has_an_endpoint_and_a_key_of_its_own(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        stage.attach("attached_episodes:keys")
        result = await stage.server.play(size=2)
        assert result.group is not None
        found = [each.metadata for each in result.group.trajectories]
        assert {each["url"] for each in found} == {f"{stage.server.url}/v1"}
        assert len({each["key"] for each in found}) == 2
        async with ClientSession() as http:
            answer = await http.get(found[0]["url"] + "/models", headers={"x-api-key": found[0]["key"]})
            assert answer.status == 410

    on_stage(tmp_path, config_of("keys"), lambda: says("1$"), scene)


# Coming and going -----------------------------------------------------------------------------------------------------


def held() -> ScriptedEngine:
    engine = ScriptedEngine(lambda *_: generation(ids("1$")))
    engine.hold = asyncio.Event()
    return engine


def test_the_death_of_a_process_ends_its_leases_at_once_and_their_sampling(tmp_path: Path) -> None:
    engine = held()

    async def scene(stage: Stage) -> None:
        process = stage.attach("attached_episodes:talks_on", workers=2)
        playing = [asyncio.create_task(stage.server.play(size=3)) for _ in range(2)]
        await until(lambda: len(engine.requests) == 6)
        process.task.cancel()
        for each in playing:
            with pytest.raises(AgentGone, match="the connection to agent talks_on ended") as gone:
                await each
            assert gone.value.lost
        assert engine.cancelled == 6
        assert stage.server.desk.free == 0

    server = on_stage(tmp_path, config_of("talks_on"), lambda: engine, scene)
    assert [event for event, _ in server.events] == ["agent_attached", "agent_lost"]
    assert server.events[1][1]["leases"] == 2


def test_a_process_that_detaches_plays_its_leases_to_the_end_and_gets_no_more(tmp_path: Path) -> None:
    engine = held()

    async def scene(stage: Stage) -> None:
        process = stage.attach("attached_episodes:Sums", workers=2)
        playing = asyncio.create_task(stage.server.play())
        await engine.started.wait()
        process.attachment.detach(at_once=False)
        await until(lambda: not stage.server.desk.free)
        assert not playing.done()
        engine.hold.set()
        assert (await playing).group is not None
        assert (await process.task).kind == "detached"

    server = on_stage(tmp_path, config_of("Sums"), lambda: engine, scene)
    assert [event for event, _ in server.events] == ["agent_attached", "agent_detached"]


def test_a_process_that_detaches_at_once_gives_its_leases_back(tmp_path: Path) -> None:
    engine = held()

    async def scene(stage: Stage) -> None:
        process = stage.attach("attached_episodes:Sums")
        playing = asyncio.create_task(stage.server.play())
        await engine.started.wait()
        process.attachment.detach(at_once=True)
        with pytest.raises(AgentGone, match="agent sums gave it back") as gone:
            await playing
        assert not gone.value.lost
        assert (await process.task).kind == "detached"

    on_stage(tmp_path, config_of("Sums"), lambda: engine, scene)


def test_an_attachment_ends_after_the_episodes_of_leases_that_were_cut(tmp_path: Path) -> None:
    engine = held()

    async def scene(stage: Stage) -> None:
        process = stage.attach("attached_episodes:cleans_up")
        playing = asyncio.create_task(stage.server.play())
        await until(lambda: len(engine.requests) == 2)
        playing.cancel()
        await asyncio.wait([playing])
        await stage.server.desk.close(ended=True)
        assert (await process.task).kind == "ended"
        assert len(__import__("attached_episodes").released) == 2

    on_stage(tmp_path, config_of("cleans_up"), lambda: engine, scene)


def test_the_end_of_the_run_is_said_to_the_processes(tmp_path: Path) -> None:
    processes = []

    async def scene(stage: Stage) -> None:
        processes.append(stage.attach("attached_episodes:Sums"))
        await stage.server.play()
        await stage.server.desk.close(ended=True)
        assert (await processes[0].task).kind == "ended"

    on_stage(tmp_path, config_of("Sums"), lambda: says("1$"), scene)


def test_a_lease_goes_to_the_process_with_the_most_free_workers(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        desk = stage.server.desk
        stage.attach("attached_episodes:Sums", workers=1)
        stage.attach("attached_episodes:keys", workers=3)
        while desk.free < 4:
            stage.server.changed.clear()
            await stage.server.changed.wait()
        taken = [desk.take() for _ in range(5)]
        names = [agent.name if agent else None for agent in taken]
        assert names[:2] == ["keys", "keys"]
        assert sorted(names[2:4]) == ["keys", "sums"]
        assert names[4] is None
        for agent in taken[:4]:
            assert agent is not None
            agent.release()
        assert desk.free == 4

    on_stage(tmp_path, config_of("Sums"), lambda: says("1$"), scene)


def test_a_process_that_answers_no_ping_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.envs.attach.desk.HEARTBEAT_S", 0.5)

    async def scene(stage: Stage) -> None:
        server = stage.server
        async with ClientSession() as http, http.ws_connect(
            f"{server.url}/attach", headers={"Authorization": f"Bearer {server.token}"}, autoping=False
        ) as socket:  # fmt: skip
            await socket.send_str(HELLO)
            with pytest.raises(AgentGone, match="the connection to agent other ended"):
                await server.play()

    on_stage(tmp_path, config_of("Sums"), lambda: says("1$"), scene)


def test_a_process_that_closes_its_connection_is_forgotten(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        server = stage.server
        async with ClientSession() as http, http.ws_connect(
            f"{server.url}/attach", headers={"Authorization": f"Bearer {server.token}"}
        ) as socket:  # fmt: skip
            await socket.send_str(HELLO)
            await socket.receive()
        await until(lambda: len(server.events) == 2)
        assert server.desk._agents == []

    server = on_stage(tmp_path, config_of("Sums"), lambda: says("1$"), scene)
    assert [event for event, _ in server.events] == ["agent_attached", "agent_detached"]


def test_a_process_that_reads_too_slowly_is_hung_up_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.envs.attach.agent.OUTBOX_MESSAGES", 4)

    async def scene(stage: Stage) -> None:
        server = stage.server
        async with ClientSession() as http, http.ws_connect(
            f"{server.url}/attach", headers={"Authorization": f"Bearer {server.token}"}
        ) as socket:  # fmt: skip
            await socket.send_str(HELLO)
            agent = await server.agent()
            for number in range(9):  # before anything can be sent
                agent.post(Refused(number, "value", "no"))
            assert agent.free == 0
            assert len([message async for message in socket]) < 9

    server = on_stage(tmp_path, config_of("Sums"), lambda: says("1$"), scene)
    assert [event for event, _ in server.events] == ["agent_attached", "agent_lost"]


def test_a_rollouter_that_reads_too_slowly_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.envs.attach.client.OUTBOX_MESSAGES", 4)

    async def scene(stage: Stage) -> None:
        process = stage.attach("attached_episodes:Sums")
        await stage.server.agent()
        for number in range(9):  # before anything can be sent
            process.attachment._post(Cancel(number))
        with pytest.raises(ConnectionLost, match="did not read 4 messages"):
            await process.task

    on_stage(tmp_path, config_of("Sums"), lambda: says("1$"), scene)


HELLO = '{"type":"hello","protocol":1,"agent":"other","workers":1}'


# Strangers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer ", "Basic wrong", "Bearer \udce4"])
def test_nobody_attaches_without_the_runs_token(tmp_path: Path, header: str | None) -> None:
    async def scene(stage: Stage) -> None:
        headers = {} if header is None else {"Authorization": header}
        async with ClientSession() as http:
            with pytest.raises(WSServerHandshakeError) as refused:
                await http.ws_connect(f"{stage.server.url}/attach", headers=headers)
        assert refused.value.status == 401
        assert stage.server.events == []

    on_stage(tmp_path, config_of("Sums"), lambda: says("1$"), scene)


def test_a_wrong_token_is_the_users_mistake(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        process = stage.attach("attached_episodes:Sums", token="wrong")
        with pytest.raises(ConfigError, match="does not know this token"):
            await process.task

    on_stage(tmp_path, config_of("Sums"), lambda: says("1$"), scene)


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["nonsense"], "malformed"),
        (['{"type":"detach"}'], "expected a hello, got detach"),
        ([HELLO.replace(":1,", ":99,", 1)], "protocol 99 is not spoken here"),
        (
            [HELLO.replace('"workers":1', '"workers":4096')],
            "at most 512 workers of 8 episodes each per rollouter, got 4096",
        ),
        ([HELLO, HELLO], "expected one hello only"),
        ([HELLO, '{"type":"done"}'], "missing required field"),
    ],
)
def test_who_breaks_the_protocol_is_told_so_and_harms_nobody_else(
    tmp_path: Path, texts: list[str], reason: str
) -> None:
    async def scene(stage: Stage) -> None:
        good = stage.attach("attached_episodes:Sums")
        server = stage.server
        async with ClientSession() as http, http.ws_connect(
            f"{server.url}/attach", headers={"Authorization": f"Bearer {server.token}"}
        ) as socket:  # fmt: skip
            for text in texts:
                await socket.send_str(text)
            said = [json.loads(message.data) async for message in socket if message.type is WSMsgType.TEXT]
        assert (said[-1]["type"], said[-1]["kind"]) == ("bye", "refused")
        assert reason in said[-1]["reason"]
        assert (await server.play()).group is not None
        assert not good.task.done()

    server = on_stage(tmp_path, config_of("Sums"), lambda: says("1$"), scene)
    assert [event for event, _ in server.events].count("malformed_frame") == 1


def test_any_client_that_speaks_json_can_play_a_lease(tmp_path: Path) -> None:
    async def player(server: Server) -> None:
        async with ClientSession() as http, http.ws_connect(
            f"{server.url}/attach", headers={"Authorization": f"Bearer {server.token}"}
        ) as socket:  # fmt: skip
            await socket.send_json({"type": "hello", "protocol": 1, "agent": "curl", "workers": 1})
            assert (await socket.receive_json())["type"] == "welcome"
            granted = await socket.receive_json()
            assert granted["type"] == "lease"
            for number in range(len(granted["keys"])):
                args = {"prompt": granted["task"]["prompt"]}
                await socket.send_json({"type": "call", "id": number, "lease": granted["lease"], "episode": number,
                                        "method": "complete", "args": args})  # fmt: skip
                answer = await socket.receive_json()
                reward = float(answer["result"]["text"] == "7")
                await socket.send_json({"type": "done", "lease": granted["lease"], "episode": number, "reward": reward})
            closed = await socket.receive_json()
            assert (closed["type"], closed["rewards"]) == ("closed", [1.0, 1.0])

    async def scene(stage: Stage) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(player(stage.server))
            result = await stage.server.play()
        assert result.group is not None
        assert [each.reward for each in result.group.trajectories] == [1.0, 1.0]

    on_stage(tmp_path, config_of("Sums"), lambda: says("7$"), scene)
