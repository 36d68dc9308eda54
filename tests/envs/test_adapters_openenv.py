"""Episodes on servers that speak the OpenEnv protocol: a session each, and every way in which a server can fail."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import WSMsgType, web
from fake_policy import FakePolicy

from streamrl.envs.adapters import openenv_client
from streamrl.envs.adapters.openenv import OpenEnv
from streamrl.envs.environment import Reward, Task
from streamrl.errors import ConfigError, EnvironmentFailed


class Doors:
    """A door is hidden by the seed; three tries."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.connections: set[int] = set()
        self.open = self.most_open = 0
        self.gathered: asyncio.Event = asyncio.Event()

    def reset(self, arguments: dict[str, Any]) -> dict[str, Any]:
        self.calls.append(("reset", arguments))
        self.door, self.tries = arguments["seed"] % 4, 0
        return {"observation": {"text": "0-3?"}, "reward": None, "done": False}

    def step(self, action: dict[str, Any]) -> dict[str, Any]:
        self.calls.append(("step", action))
        self.tries += 1
        right = action["door"] == str(self.door)
        return {"observation": {"text": "no"}, "reward": float(right), "done": right or self.tries == 3}


Answer = Callable[[str, dict[str, Any]], Awaitable[Any]]


@asynccontextmanager
async def serving(doors: Doors, answer: Answer | None = None, gather: int = 0) -> AsyncIterator[str]:
    """``answer`` instead of the game: what a request of that kind is answered with."""

    async def answered(kind: str, data: dict[str, Any]) -> Any:
        if answer is not None:
            return await answer(kind, data)
        return doors.reset(data) if kind == "reset" else doors.step(data)

    async def over_http(request: web.Request) -> web.StreamResponse:
        doors.connections.add(request.transport.get_extra_info("peername")[1])  # type: ignore[union-attr]
        body = await request.json()
        given = await answered(request.path[1:], body if request.path == "/reset" else body["action"])
        return given if isinstance(given, web.StreamResponse) else web.json_response(given)

    async def over_websocket(request: web.Request) -> web.WebSocketResponse:
        doors.connections.add(request.transport.get_extra_info("peername")[1])  # type: ignore[union-attr]
        doors.open += 1
        doors.most_open = max(doors.most_open, doors.open)
        if doors.open == gather:
            doors.gathered.set()
        if gather:
            await doors.gathered.wait()
        session = web.WebSocketResponse()
        await session.prepare(request)
        async for message in session:
            if message.type is WSMsgType.TEXT:
                asked = message.json()
                given = await answered(asked["type"], asked["data"])
                if given is None:
                    break
                await session.send_json(given if "type" in given else {"type": "observation", "data": given})
        await session.close()
        doors.open -= 1
        return session

    app = web.Application()
    app.add_routes([web.post("/reset", over_http), web.post("/step", over_http), web.get("/ws", over_websocket)])
    runner = web.AppRunner(app, shutdown_timeout=0.01)  # 0 waits for ever
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def played(policy: Any, answer: Answer | None = None, doors: Doors | None = None, **options: Any) -> Reward:
    async def run() -> Reward:
        async with serving(doors or Doors(), answer) as url:
            env = OpenEnv(url, "door", "{text}", **options)
            return await env.episode(env.task(6), policy)

    return asyncio.run(run())


def failure(answer: Answer | None = None, **options: Any) -> str:
    with pytest.raises(EnvironmentFailed) as caught:
        played(FakePolicy("1", "1", "1"), answer, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


both = pytest.mark.parametrize("transport", ["ws", "http"])


@both
def test_an_episode_is_a_reset_with_the_seed_and_a_step_per_turn(transport: str) -> None:
    doors, policy = Doors(), FakePolicy("1", "2")
    reward = played(policy, doors=doors, transport=transport, reset={"level": 3})
    assert doors.calls == [("reset", {"level": 3, "seed": 6}), ("step", {"door": "1"}), ("step", {"door": "2"})]
    assert policy.asked == ["0-3?", "no"]
    assert policy.rewards == [0.0, 1.0]
    assert reward == Reward(0.0, {"turns": 2, "invalid_action": 0.0, "cut": 0.0})


@both
def test_one_connection_carries_a_whole_episode(transport: str) -> None:
    doors = Doors()
    played(FakePolicy("1", "1", "1"), doors=doors, transport=transport)
    assert len(doors.calls) == 4
    assert len(doors.connections) == 1


def test_a_chat_has_the_whole_history() -> None:
    policy = FakePolicy("1", "2")
    played(policy, chat=True, system="Guess.", first="Doors {observation}")
    assert policy.asked[1] == [
        {"role": "system", "content": "Guess."},
        {"role": "user", "content": "Doors 0-3?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "no"},
    ]


def test_without_a_template_the_policy_reads_the_observation_as_json() -> None:
    async def run() -> list[Any]:
        async with serving(Doors()) as url:
            policy = FakePolicy('{"door": "2"}')
            await OpenEnv(url, "json").episode(Task(metadata={"seed": 2}), policy)
            return policy.asked

    assert asyncio.run(run()) == ['{"text": "0-3?"}']


def test_an_action_that_cannot_be_read_ends_the_episode_and_is_counted() -> None:
    async def run() -> tuple[Reward, list[float]]:
        async with serving(Doors()) as url:
            policy = FakePolicy("not json")
            return await OpenEnv(url, "json").episode(Task(metadata={"seed": 2}), policy), policy.rewards

    assert asyncio.run(run()) == (Reward(0.0, {"turns": 1, "invalid_action": 1.0, "cut": 0.0}), [0.0])


def test_an_episode_ends_after_max_turns_and_says_that_it_was_cut() -> None:
    assert played(FakePolicy("1", "1"), max_turns=2).metrics == {"turns": 2, "invalid_action": 0.0, "cut": 1.0}


def test_sessions_bounds_the_episodes_that_a_server_has_at_once() -> None:
    async def run() -> int:
        doors = Doors()
        async with serving(doors, gather=3) as url:  # no session is answered until three are open
            env = OpenEnv(url, "door", "{text}", sessions=3)
            await asyncio.gather(*(env.episode(env.task(2), FakePolicy("2")) for _ in range(9)))
        return doors.most_open

    assert asyncio.run(run()) == 3


def test_a_cancelled_episode_gives_its_place_back() -> None:
    async def run() -> str:
        asked = asyncio.Event()

        async def silent(kind: str, data: dict[str, Any]) -> Any:
            asked.set()
            await asyncio.Event().wait()

        async with serving(Doors(), silent) as url:
            env = OpenEnv([url], "door", sessions=1)
            episode = asyncio.create_task(env.episode(env.task(0), FakePolicy()))
            await asked.wait()
            episode.cancel()
            await asyncio.wait({episode})
            assert episode.cancelled()
            return env._free.get_nowait()

    assert asyncio.run(run()).startswith("http://127.0.0.1:")


async def refused(kind: str, data: dict[str, Any]) -> Any:
    return {"type": "error", "data": {"message": "no such\ndoor", "code": "EXECUTION_ERROR"}}


async def full(kind: str, data: dict[str, Any]) -> Any:
    return {"type": "error", "data": {"message": "busy", "code": "CAPACITY_REACHED"}}


async def hangs_up(kind: str, data: dict[str, Any]) -> Any:
    return None


async def silent(kind: str, data: dict[str, Any]) -> Any:
    await asyncio.Event().wait()


async def unrewarded(kind: str, data: dict[str, Any]) -> Any:
    return {"observation": {"text": "x"}, "reward": None, "done": kind == "step"}


async def text_reward(kind: str, data: dict[str, Any]) -> Any:
    return {"observation": {"text": "x"}, "reward": "1", "done": False}


async def bare(kind: str, data: dict[str, Any]) -> Any:
    return {"text": "x"}


async def other_field(kind: str, data: dict[str, Any]) -> Any:
    return {"observation": {"texts": "x"}, "reward": None, "done": False}


async def status_422(kind: str, data: dict[str, Any]) -> Any:
    return web.json_response({"detail": "action.door: field required"}, status=422)


async def html(kind: str, data: dict[str, Any]) -> Any:
    return web.Response(text="<html>", content_type="text/html")


async def endless(kind: str, data: dict[str, Any]) -> Any:
    return web.Response(body=b" " * 2_000)


@pytest.mark.parametrize(
    ("answer", "transport", "reason"),
    [
        (refused, "ws", "reset was refused: no such door (EXECUTION_ERROR)"),
        (full, "ws", "reset was refused: busy; start the server with more max_concurrent_envs, or lower"),
        (hangs_up, "ws", "reset: the server closed the session (close code 1000)"),
        (silent, "ws", "reset: no answer within env.args.timeout_s=1"),
        (silent, "http", "reset: no answer within env.args.timeout_s=1"),
        (unrewarded, "ws", "no reward in 1 steps; the server must give one"),
        (text_reward, "http", "reset: expected a finite number or null as reward, got 1"),
        (bare, "http", "reset: expected an `observation` with fields, got {'text': 'x'}"),
        (other_field, "http", "'text' of env.args.observation='{text}' is missing; did you mean 'texts'?"),
        (status_422, "http", 'reset was answered with 422: {"detail": "action.door: field required"}'),
        (html, "http", "reset was not answered in JSON: "),
    ],
)
def test_a_server_that_fails_fails_the_episode_with_its_url_and_the_reason(
    answer: Answer, transport: str, reason: str
) -> None:
    options = {"timeout_s": 1} if answer is silent else {}
    message = failure(answer, transport=transport, **options)
    assert message.startswith("http://127.0.0.1:")
    assert reason in message


def test_an_answer_that_is_too_large_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openenv_client, "MAX_ANSWER_BYTES", 1_000)
    assert failure(endless, transport="http").endswith("reset: the answer is larger than 1000 bytes")


@both
def test_a_server_that_is_not_there_is_named(transport: str) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, and nobody listens
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        env = OpenEnv(url, "door", transport=transport)
        with pytest.raises(EnvironmentFailed, match=f"{url}: .* failed: Cannot connect to host"):
            asyncio.run(env.episode(env.task(0), FakePolicy()))


def test_the_token_goes_with_every_request_and_stands_in_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOORS_TOKEN", "secret")
    assert OpenEnv("http://x", "door", token_variable="DOORS_TOKEN")._headers == {"Authorization": "Bearer secret"}
    with pytest.raises(ConfigError, match="token_variable=NO_SUCH: that environment variable is not set"):
        OpenEnv("http://x", "door", token_variable="NO_SUCH")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"url": "localhost:8000"}, r"env\.args\.url='localhost:8000': expected http"),
        ({"transport": "grpc"}, r"env\.args\.transport='grpc': expected one of ws, http"),
        ({"sessions": 0}, r"env\.args\.sessions=0"),
        ({"timeout_s": 0}, r"env\.args\.timeout_s=0"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        OpenEnv(**{"url": "http://x", "action": "door", **options})


def test_a_server_of_the_openenv_package_plays_whole_sessions() -> None:
    pytest.importorskip("openenv", reason="the openenv package is not installed")
    import uvicorn
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class Door(Action):
        door: str

    class Seen(Observation):
        text: str

    class DoorsEnvironment(Environment):  # type: ignore[type-arg]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Seen:
            self.door, self.tries = (seed or 0) % 4, 0
            return Seen(text="0-3?")

        def step(self, action: Door, timeout_s: float | None = None, **kwargs: Any) -> Seen:
            self.tries += 1
            right = action.door == str(self.door)
            return Seen(text="no", reward=float(right), done=right or self.tries == 3)

        @property
        def state(self) -> State:
            return State(step_count=self.tries)

    app = create_fastapi_app(DoorsEnvironment, Door, Seen, max_concurrent_envs=4)

    async def run() -> list[tuple[Reward, list[float]]]:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            env = OpenEnv(f"http://127.0.0.1:{listening.getsockname()[1]}", "door", "{text}", sessions=4)
            policies = [FakePolicy("1", str(seed % 4), "9") for seed in range(8)]
            rewards = await asyncio.gather(*(env.episode(env.task(i), each) for i, each in enumerate(policies)))
            server.should_exit = True
            await serving
            return [(reward, policy.rewards) for reward, policy in zip(rewards, policies, strict=True)]

    for seed, (reward, rewards) in enumerate(asyncio.run(run())):
        assert rewards == ([1.0] if seed % 4 == 1 else [0.0, 1.0])
        assert reward.metrics == {"turns": len(rewards), "invalid_action": 0.0, "cut": 0.0}
