"""Clients that wait, leave, or come in great numbers."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import aiohttp
import psutil
import pytest
from proxy_server import PATIENT, USER, ScriptedSession, Served, play, says, script, serving

from streamrl.envs.episode import ContextFull
from streamrl.envs.proxy import desk, routes

CHAT = {"messages": USER}
EACH = pytest.mark.parametrize("stream", [False, True])


@EACH
def test_a_client_that_disconnects_ends_its_sampling(stream: bool):
    async def scene(session: ScriptedSession, served: Served) -> None:
        asking = asyncio.create_task(served.post("chat/completions", {**CHAT, "stream": stream}))
        await session.started.wait()
        asking.cancel()
        await session.cancelled.wait()
        session.hold.set()
        status, _, _ = await served.post("chat/completions", CHAT)
        assert status == 200
        assert served.desk.counts["disconnected"] == 1

    play(script(says("3"), hold=True), scene)


def test_a_stream_begins_with_comments_while_the_turn_is_sampled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(routes, "KEEP_ALIVE_S", 0.01)

    async def scene(session: ScriptedSession, served: Served) -> None:
        async with asked(served, stream=True) as response:
            assert await response.content.readline() == b": sampling\n"
            session.hold.set()
            rest = await response.content.read()
        assert rest.endswith(b"data: [DONE]\n\n")

    play(script(says("3"), hold=True), scene)


def test_the_sdks_read_past_the_comments(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("openai", reason="the OpenAI SDK is not installed")
    pytest.importorskip("anthropic", reason="the Anthropic SDK is not installed")
    monkeypatch.setattr(routes, "KEEP_ALIVE_S", 0.01)

    async def scene(session: ScriptedSession, served: Served) -> None:
        stream = await served.openai.chat.completions.create(model="any", messages=USER, stream=True)
        session.hold.set()
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "3"
        session.hold.clear()
        session.started.clear()
        reading = served.anthropic.messages.create(model="any", messages=USER, max_tokens=5, stream=True)
        kinds = [each.type async for each in await released(reading, session)]
        assert kinds[0] == "message_start"
        assert kinds[-1] == "message_stop"

    play(script(says("3"), hold=True), scene)


async def released(reading: Any, session: ScriptedSession) -> Any:
    """The stream, whose turn ends only after it has begun."""
    stream = await reading
    session.hold.set()
    return stream


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_a_failure_after_the_stream_began_is_an_event_in_it(path: str, monkeypatch: pytest.MonkeyPatch):
    openai = pytest.importorskip("openai", reason="the OpenAI SDK is not installed")
    anthropic = pytest.importorskip("anthropic", reason="the Anthropic SDK is not installed")
    monkeypatch.setattr(routes, "KEEP_ALIVE_S", 0.01)

    async def scene(session: ScriptedSession, served: Served) -> None:
        if path == "chat/completions":
            stream = await served.openai.chat.completions.create(model="any", messages=USER, stream=True)
        elif path == "responses":
            stream = await served.openai.responses.create(model="any", input="a", stream=True)
        else:
            stream = await served.anthropic.messages.create(model="any", messages=USER, max_tokens=5, stream=True)
        session.hold.set()
        with pytest.raises((openai.APIError, anthropic.APIError)) as caught:
            [each async for each in stream]
        assert "full" in str(caught.value)

    play(script(ContextFull("full"), hold=True), scene)


def test_a_client_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(routes, "WRITE_S", 0.05)

    async def scene(session: ScriptedSession, served: Served) -> None:
        given_up = asyncio.Event()
        monkeypatch.setattr(served.desk, "counts", Watched(given_up))
        async with asked(served, stream=True):
            await given_up.wait()
        assert session.requests

    play(script(says("a" * 3_000_000)), scene)


class Watched(dict[str, int]):
    """Counts that say when a client was given up."""

    def __init__(self, given_up: asyncio.Event) -> None:
        super().__init__()
        self._given_up = given_up

    def __missing__(self, key: str) -> int:
        return 0

    def __setitem__(self, key: str, value: int) -> None:
        super().__setitem__(key, value)
        if key == "disconnected":
            self._given_up.set()


def asked(served: Served, **fields: Any) -> Any:
    return served.http.post(
        f"{served.url}/v1/chat/completions",
        json={**CHAT, **fields},
        headers={"Authorization": f"Bearer {served.key}"},
    )


def test_a_session_samples_only_so_many_turns_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(desk, "CALLS_PER_SESSION", 2)

    async def scene(session: ScriptedSession, served: Served) -> None:
        two = asyncio.create_task(served.post("chat/completions", {**CHAT, "n": 2}))
        await session.started.wait()
        status, body, _ = await served.post("chat/completions", CHAT)
        assert (status, body["error"]["code"]) == (429, "too_many_calls")
        session.hold.set()
        assert (await two)[0] == 200
        assert (await served.post("chat/completions", CHAT))[0] == 200

    play(script(says("3"), hold=True), scene)


def test_bodies_of_all_sessions_together_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(desk, "HELD_BYTES", 10_000)
    large = {"messages": [{"role": "user", "content": "x" * 6_000}]}

    async def scene(session: ScriptedSession, served: Served) -> None:
        first = asyncio.create_task(served.post("chat/completions", large))
        await session.started.wait()
        other = {"Authorization": f"Bearer {served.desk.open(session)}"}
        status, body, _ = await served.post("chat/completions", large, **other)
        assert (status, body["error"]["code"]) == (503, "too_busy")
        session.hold.set()
        assert (await first)[0] == 200
        assert (await served.post("chat/completions", large, **other))[0] == 200

    play(script(says("3"), hold=True), scene)


def test_a_body_counts_while_it_arrives(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(desk, "HELD_BYTES", 10_000)
    size = 6_000

    async def scene(session: ScriptedSession, served: Served) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {served.key}\r\n"
        writer.write(f"{head}Expect: 100-continue\r\nContent-Length: {size}\r\n\r\n".encode())
        assert await reader.readline() == b"HTTP/1.1 100 Continue\r\n"  # the server waits for the body now
        assert await reader.readline() == b"\r\n"
        status, body, _ = await served.post("chat/completions", b" " * size)
        assert (status, body["error"]["code"]) == (503, "too_busy")
        writer.write(b" " * size)
        assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")
        assert (await served.post("chat/completions", b" " * size))[0] == 400
        writer.close()

    play(script(says("3")), scene)


SESSIONS = 1_000
FILES = 4_096
"""Open files that the tests below need: two sockets per session."""
MEGABYTE = 1 << 20


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = max(soft, FILES) if soft != resource.RLIM_INFINITY else soft
    if hard != resource.RLIM_INFINITY and enough > hard:
        pytest.skip(f"needs {FILES} open files, the hard limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_a_thousand_sessions_at_once_are_served_in_bounded_memory():
    async def scene() -> None:
        gate = ScriptedSession(says("3"), hold=True)
        async with serving(gate) as served:
            keys = [served.desk.open(gate) for _ in range(SESSIONS)]
            body = {"messages": [{"role": "user", "content": "x" * 4_096}]}
            before = psutil.Process().memory_info().rss
            asking = [
                asyncio.create_task(served.post("chat/completions", body, Authorization=f"Bearer {key}"))
                for key in keys
            ]
            while len(gate.requests) < SESSIONS:
                gate.started.clear()
                await gate.started.wait()
            held = psutil.Process().memory_info().rss - before
            gate.hold.set()
            answers = await asyncio.gather(*asking)
            for key in keys:
                served.desk.close(key)
            assert [status for status, _, _ in answers] == [200] * SESSIONS
            assert held < 100 * MEGABYTE  # client and server together; about 35 KiB of each for a body of 4 KiB
            assert len(served.desk) == 1
            assert (await served.post("chat/completions", body, Authorization=f"Bearer {keys[0]}"))[0] == 410

    asyncio.run(scene())


@pytest.mark.usefixtures("many_files")
def test_a_thousand_clients_that_leave_leave_nothing_behind():
    async def scene() -> None:
        gate = ScriptedSession(says("3"), hold=True)
        async with serving(gate) as served:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=PATIENT) as leaving:
                there = replace(served, http=leaving)
                keys = [served.desk.open(gate) for _ in range(SESSIONS)]
                asking = [
                    asyncio.create_task(there.post("chat/completions", CHAT, Authorization=f"Bearer {key}"))
                    for key in keys
                ]
                while len(gate.requests) < SESSIONS:
                    gate.started.clear()
                    await gate.started.wait()
                for each in asking:
                    each.cancel()
                await asyncio.wait(asking)
            while served.desk.counts["disconnected"] < SESSIONS:
                gate.cancelled.clear()
                await gate.cancelled.wait()
            assert [seat.sampling for seat in map(served.desk.recognise, keys)] == [0] * SESSIONS

    asyncio.run(scene())
