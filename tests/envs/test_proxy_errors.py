"""Requests that get no turn: the right status in each dialect's shape, and never more than the client should know."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from proxy_server import USER, ScriptedSession, Served, play, says, script

from streamrl.envs.episode import ContextFull
from streamrl.envs.proxy import routes

BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": USER},
    "completions": {"prompt": "a"},
    "responses": {"input": "a"},
    "messages": {"messages": USER, "max_tokens": 5},
}
ALL = pytest.mark.parametrize("path", BODIES)


def code(path: str, body: dict[str, Any]) -> str:
    """The code of an error after a look at its shape."""
    error = body["error"]
    if path == "messages":
        assert body["type"] == "error"
        assert set(error) == {"type", "message", "code"}
    else:
        assert set(error) == {"message", "type", "param", "code"}
    return str(error["code"])


@ALL
@pytest.mark.parametrize("key", ["", "Bearer ", "Bearer wrong", "Bearer sk-0-", "Bearer sk-\udcff-x", "Basic abc"])
def test_a_key_that_was_never_given_out_is_unauthorized(path: str, key: str):
    async def scene(session: ScriptedSession, served: Served) -> None:
        status, body, _ = await served.post(path, BODIES[path], Authorization=key)
        assert (status, code(path, body)) == (401, "invalid_api_key")
        assert session.requests == []

    play(script(says("3")), scene)


@ALL
def test_the_name_of_a_key_is_nothing_without_its_secret(path: str):
    async def scene(_: ScriptedSession, served: Served) -> None:
        almost = served.key[:-1] + ("a" if served.key[-1] != "a" else "b")
        status, body, _ = await served.post(path, BODIES[path], Authorization=f"Bearer {almost}")
        served.desk.close(served.key)
        after, _, _ = await served.post(path, BODIES[path], Authorization=f"Bearer {almost}")
        assert (status, after, code(path, body)) == (401, 401, "invalid_api_key")

    play(script(says("3")), scene)


@ALL
def test_an_ended_episode_is_gone(path: str):
    async def scene(_: ScriptedSession, served: Served) -> None:
        served.desk.close(served.key)
        status, body, _ = await served.post(path, BODIES[path])
        assert (status, code(path, body)) == (410, "episode_ended")

    play(script(says("3")), scene)


@ALL
@pytest.mark.parametrize("stream", [False, True])
def test_an_episode_that_ends_during_a_call_cancels_it(path: str, stream: bool):
    async def scene(session: ScriptedSession, served: Served) -> None:
        asking = asyncio.create_task(served.post(path, {**BODIES[path], "stream": stream}))
        await session.started.wait()
        served.desk.close(served.key)
        status, body, _ = await asking
        assert (status, code(path, body)) == (410, "episode_ended")
        assert session.cancelled.is_set()

    play(script(says("3"), hold=True), scene)


@ALL
@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"a": "\xff"}', b"[" * 100_000, b"NaN", b'{"messages": [}', b'{"a": "\\ud800"}']
)
def test_a_body_that_is_not_json_is_refused(path: str, body: bytes):
    async def scene(_: ScriptedSession, served: Served) -> None:
        status, told, _headers = await served.post(path, body)
        assert (status, code(path, told)) == (400, "invalid_json")

    play(script(says("3")), scene)


@ALL
@pytest.mark.parametrize("body", [b"[]", b"null", b'"text"', b"{}", b'{"stream": 7}'])
def test_a_body_of_another_shape_is_refused(path: str, body: bytes):
    async def scene(_: ScriptedSession, served: Served) -> None:
        status, told, _headers = await served.post(path, body)
        assert (status, code(path, told)) == (400, "invalid_request")

    play(script(says("3")), scene)


@ALL
def test_a_body_that_says_it_is_too_large_is_not_read(path: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(routes, "BODY_BYTES", 1_000)

    async def scene(_: ScriptedSession, served: Served) -> None:
        status, body, _ = await served.post(path, b"x" * 1_001)
        assert (status, code(path, body)) == (413, "request_too_large")

    play(script(says("3")), scene)


def test_a_body_without_a_length_is_read_up_to_the_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(routes, "BODY_BYTES", 1_000)

    async def chunks() -> Any:
        for _ in range(11):
            yield b" " * 100

    async def scene(_: ScriptedSession, served: Served) -> None:
        headers = {"Authorization": f"Bearer {served.key}"}
        async with served.http.post(f"{served.url}/v1/responses", data=chunks(), headers=headers) as response:
            assert response.status == 413

    play(script(says("3")), scene)


def test_a_small_body_that_unpacks_to_a_large_one_is_refused(monkeypatch: pytest.MonkeyPatch):
    import gzip

    monkeypatch.setattr(routes, "BODY_BYTES", 100_000)

    async def scene(_: ScriptedSession, served: Served) -> None:
        packed = gzip.compress(b" " * 10_000_000)
        assert len(packed) < 100_000
        status, body, _ = await served.post("responses", packed, **{"Content-Encoding": "gzip"})
        assert (status, body["error"]["code"]) == (413, "request_too_large")

    play(script(says("3")), scene)


def test_a_body_that_does_not_arrive_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(routes, "BODY_S", 0.05)

    async def scene(_: ScriptedSession, served: Served) -> None:
        never = asyncio.Event()

        async def stuck() -> Any:
            yield b"{"
            await never.wait()

        headers = {"Authorization": f"Bearer {served.key}"}
        asking = served.http.post(f"{served.url}/v1/responses", data=stuck(), headers=headers)
        async with asking as response:
            assert response.status == 408
            never.set()

    play(script(says("3")), scene)


@ALL
def test_a_full_context_says_so(path: str):
    async def scene(_: ScriptedSession, served: Served) -> None:
        status, body, _ = await served.post(path, BODIES[path])
        assert (status, code(path, body)) == (400, "context_length_exceeded")
        assert "model.max_length" in body["error"]["message"]

    play(script(ContextFull("140 tokens leave no room to sample in model.max_length=128")), scene)


def test_what_the_session_refuses_names_the_field():
    async def scene(_: ScriptedSession, served: Served) -> None:
        status, body, _ = await served.post("chat/completions", {"messages": USER})
        assert (status, body["error"]["param"]) == (400, "messages[2].content[0]")

    play(script(ValueError("messages[2].content[0]: only text parts can be sampled from, got 'image'")), scene)


@ALL
def test_an_engine_that_closes_is_unavailable(path: str):
    async def scene(_: ScriptedSession, served: Served) -> None:
        status, body, _ = await served.post(path, BODIES[path])
        assert (status, code(path, body)) == (503, "engine_closed")

    play(script(asyncio.CancelledError()), scene)


def test_an_engine_that_closes_under_several_choices_is_unavailable():
    async def scene(_: ScriptedSession, served: Served) -> None:
        status, body, _ = await served.post("chat/completions", {"messages": USER, "n": 3})
        assert (status, body["error"]["code"]) == (503, "engine_closed")

    play(script(asyncio.CancelledError()), scene)


@ALL
def test_an_error_of_the_engine_is_unavailable_and_not_told(path: str):
    def make() -> ScriptedSession:
        session = ScriptedSession(ArithmeticError("secret"))
        session.episode.engine_error = ArithmeticError("secret")
        return session

    async def scene(_: ScriptedSession, served: Served) -> None:
        status, body, _ = await served.post(path, BODIES[path])
        assert (status, code(path, body)) == (503, "engine_closed")
        assert "secret" not in str(body)

    play(make, scene)


@ALL
def test_an_unexpected_error_is_logged_and_not_told(path: str, caplog: pytest.LogCaptureFixture):
    async def scene(_: ScriptedSession, served: Served) -> None:
        status, body, _ = await served.post(path, BODIES[path])
        assert (status, code(path, body)) == (500, "internal_error")
        assert "secret" not in str(body)
        assert "Traceback" not in str(body)
        assert "secret" in caplog.text

    play(script(LookupError("secret")), scene)


def test_one_failed_choice_cancels_the_others():
    async def scene(session: ScriptedSession, served: Served) -> None:
        asking = asyncio.create_task(served.post("chat/completions", {"messages": USER, "n": 2}))
        await session.started.wait()
        session.hold.set()
        status, body, _ = await asking
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")

    play(script(ContextFull("full"), says("3"), hold=True), scene)


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "chat/completions"), ("POST", "embeddings"), ("POST", "v1/messages/count_tokens")]
)
def test_a_path_that_is_not_served_says_which_are(method: str, path: str):
    async def scene(_: ScriptedSession, served: Served) -> None:
        async with served.http.request(method, f"{served.url}/v1/{path}") as response:
            body = await response.json()
        assert response.status == 404
        assert "POST /v1/chat/completions" in body["error"]["message"]

    play(script(says("3")), scene)


def test_the_sdks_raise_the_errors_that_they_have_for_each_status():
    openai = pytest.importorskip("openai", reason="the OpenAI SDK is not installed")
    anthropic = pytest.importorskip("anthropic", reason="the Anthropic SDK is not installed")

    async def scene(_: ScriptedSession, served: Served) -> None:
        chat, messages = served.openai.chat.completions.create, served.anthropic.messages.create
        with pytest.raises(openai.BadRequestError) as caught:
            await chat(model="any", messages=USER)
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(anthropic.BadRequestError):
            await messages(model="any", messages=USER, max_tokens=1)
        with pytest.raises(openai.BadRequestError):
            await chat(model="any", messages=USER, stream=True)
        served.desk.close(served.key)
        with pytest.raises(openai.APIStatusError) as gone:
            await chat(model="any", messages=USER)
        assert gone.value.status_code == 410
        served.key = "wrong"
        with pytest.raises(openai.AuthenticationError):
            await served.openai.models.list()
        with pytest.raises(anthropic.AuthenticationError):
            await served.anthropic.messages.create(model="any", messages=USER, max_tokens=1)

    play(script(ContextFull("full")), scene)


def test_any_model_is_the_policy():
    async def scene(_: ScriptedSession, served: Served) -> None:
        openai = pytest.importorskip("openai", reason="the OpenAI SDK is not installed")
        assert openai is not None
        assert [model.id for model in (await served.openai.models.list()).data] == ["policy"]
        assert (await served.openai.models.retrieve("some/other")).id == "some/other"

    play(script(says("3")), scene)


def test_health_needs_no_key():
    async def scene(_: ScriptedSession, served: Served) -> None:
        async with served.http.get(f"{served.url}/health") as response:
            assert (response.status, await response.json()) == (200, {"status": "ok"})

    play(script(says("3")), scene)
